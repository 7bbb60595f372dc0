"""A trial: one configuration of one problem, tried once on one device."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn

STATUSES = ("ok", "rejected", "failed")

_IDENTITY = (
    "op",
    "batch",
    "m",
    "n",
    "dtype",
    "device",
    "coefficients",
    "backend",
    "config",
    "source_hash",
    "created_at",
)


@dataclass(frozen=True)
class Trial:
    """What was tried, and what came of it.

    The problem is ``batch`` matrices of m×n in ``dtype`` on ``device``, put to ``op`` with ``coefficients``
    (empty where the operation has none). ``backend`` is a label; ``config`` is what reproduces the run.

    ``status`` is ``"ok"`` (right and timed), ``"rejected"`` (wrong numbers) or ``"failed"`` (raised);
    ``message`` says why it is not ok. ``error`` is relative, against fp64, and held to ``tolerance``. Give
    ``None`` for an error that is not finite, and say so in ``message``. ``median_ms`` is in milliseconds,
    ``spread`` is (p75 − p25) / median over ``samples`` timings. ``created_at`` is in unix seconds.

    Raises:
        ValueError: a field has the wrong type or an impossible value; the text names it.
    """

    op: str
    batch: int
    m: int
    n: int
    dtype: str
    device: str
    coefficients: str
    backend: str
    config: dict[str, Any]
    status: str
    error: float | None
    tolerance: float | None
    median_ms: float | None
    spread: float | None
    samples: int
    message: str
    versions: dict[str, str]
    source_hash: str
    created_at: float

    def __post_init__(self) -> None:
        for name in ("op", "dtype", "device", "backend"):
            _check_text(name, getattr(self, name))
        for name in ("coefficients", "message", "source_hash"):
            _check_text(name, getattr(self, name), may_be_empty=True)
        for name in ("batch", "m", "n"):
            _check_count(name, getattr(self, name), least=1)
        _check_count("samples", self.samples, least=0)
        for name in ("error", "tolerance", "median_ms", "spread", "created_at"):
            # An int would become a float on its way through the store, and change the trial's identity.
            object.__setattr__(self, name, _number(name, getattr(self, name), optional=name != "created_at"))
        object.__setattr__(self, "config", _plain_object("config", self.config))
        object.__setattr__(self, "versions", _plain_object("versions", self.versions))
        if not all(isinstance(version, str) for version in self.versions.values()):
            raise ValueError(f"versions must map names to strings, got {self.versions!r}")
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")
        if self.status == "ok":
            self._check_ok()

    def _check_ok(self) -> None:
        if not self.median_ms or self.samples < 1:
            raise ValueError(
                f"median_ms and samples of an ok trial must be positive, got {self.median_ms}, {self.samples}"
            )
        if self.error is None or self.tolerance is None or self.error > self.tolerance:
            raise ValueError(
                f"error of an ok trial must be within tolerance, got {self.error} against {self.tolerance}"
            )

    @property
    def uid(self) -> str:
        """Equal for two records of the same run: same problem, configuration, kernel source and time."""
        identity = json.dumps([getattr(self, name) for name in _IDENTITY], sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()

    def to_json(self) -> str:
        """One line of ASCII JSON; :meth:`from_json` reads it back to an equal trial."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Trial:
        """Read :meth:`to_json`'s form.

        Raises:
            ValueError: not a JSON object, or a field is missing, unknown or wrong.
        """
        try:
            values = json.loads(text, parse_constant=_refuse_constant)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from None
        if not isinstance(values, dict):
            raise ValueError(f"a trial must be a JSON object, got {type(values).__name__}")
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trial:
        """Build a trial from exactly its fields. Raises ValueError for a missing, unknown or wrong one."""
        names = {field.name for field in fields(cls)}
        if missing := names - set(values):
            raise ValueError(f"missing {', '.join(sorted(missing))}")
        if unknown := set(values) - names:
            raise ValueError(f"unknown field {', '.join(sorted(unknown))}")
        return cls(**values)


def _check_text(name: str, value: object, *, may_be_empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or may_be_empty):
        raise ValueError(f"{name} must be a {'' if may_be_empty else 'non-empty '}string, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be valid Unicode, got {value!r}") from None


def _check_count(name: str, value: object, *, least: int) -> None:
    # bool is an int; the upper limit is SQLite's.
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _number(name: str, value: object, *, optional: bool) -> float | None:
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and not negative{' or null' * optional}, got {value!r}")
    return float(value)


def _plain_object(name: str, value: object) -> dict[str, Any]:
    """A private copy made of JSON's own types, so that what is stored reads back equal."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{name} must be an object with string keys, got {value!r}")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must hold JSON values only: {error}") from None
    return plain


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
