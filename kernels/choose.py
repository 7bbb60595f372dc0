"""Which backend and configuration runs a problem: the protocol, and the heuristics used when nobody tuned.

`kernels` never imports the tuner. It asks a *chooser* — any object with ``choose(problem)`` — and falls back
to :func:`heuristic_choice` when that answers ``None``. A chooser is installed by :func:`set_chooser`, or found
once, at the first call, through the ``dmuon.chooser`` entry point (``DMUON_AUTOTUNE=off`` prevents that).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import torch

from dmuon.kernels.coefficients import CoefficientSet, coefficients_of
from dmuon.kernels.precision import PRECISIONS, precision_name
from dmuon.kernels.restarts import default_restarts

OPERATIONS = ("gram_ns", "gram", "symmetric_product", "apply")
METHODS = ("gram", "standard")


@dataclass(frozen=True, order=True)
class Problem:
    """One thing to run and to tune: ``batch`` matrices of m×n (m ≤ n) in one working precision on one device.

    ``coefficients`` names the polynomials of a ``gram_ns`` problem (:attr:`CoefficientSet.key`); the three
    products leave it empty. ``device`` is the key of :func:`device_key`.
    """

    op: str
    batch: int
    m: int
    n: int
    dtype: str
    device: str
    coefficients: str = ""

    def __post_init__(self) -> None:
        if self.op not in OPERATIONS:
            raise ValueError(f"op must be one of {', '.join(OPERATIONS)}, got {self.op!r}")
        if self.dtype not in PRECISIONS:
            raise ValueError(f"dtype must be one of {', '.join(PRECISIONS)}, got {self.dtype!r}")
        if min(self.batch, self.m, self.n) < 1:
            raise ValueError(f"batch, m and n must be at least 1, got {self.batch}, {self.m}, {self.n}")
        if bool(self.coefficients) != (self.op == "gram_ns"):
            raise ValueError(
                f"coefficients belong to gram_ns problems alone, got {self.coefficients!r} for {self.op}"
            )


@dataclass(frozen=True)
class ProductChoice:
    """The backend of one of the three products, with that backend's configuration (JSON values only)."""

    backend: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NSChoice:
    """How a whole Newton–Schulz iteration runs.

    ``restarts`` are the 0-based iterations run right after a restart (Gram form only). ``loop`` runs a batch
    one matrix at a time instead of through batched products. With ``whole``, a kernel that runs the whole
    iteration takes the place of the three products; they serve what it cannot.

    Where a backend has it, ``gram`` may keep to the lower half of its result (``"lower": "write"`` in its
    configuration), and ``symmetric_product`` then reads and writes lower halves (``"lower": "both"``): the mirror is
    written of what ``apply`` reads alone.
    """

    method: str
    restarts: tuple[int, ...] = ()
    gram: ProductChoice = ProductChoice("torch")
    symmetric_product: ProductChoice = ProductChoice("torch")
    apply: ProductChoice = ProductChoice("torch")
    loop: bool = False
    whole: ProductChoice | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.method == "standard" and self.restarts:
            raise ValueError(
                f"restarts belong to the Gram form; the standard form has none, got {self.restarts}"
            )
        if any(first >= second for first, second in pairwise((0, *self.restarts))):
            raise ValueError(f"restarts must be increasing iterations >= 1, got {self.restarts}")
        lower = tuple(each.config.get("lower") for each in (self.gram, self.symmetric_product, self.apply))
        if lower not in ((None, None, None), ("write", "both", None)):
            raise ValueError(
                "what gram leaves out, symmetric_product must not read: lower must be 'write' for the one and 'both' "
                f"for the other, or absent, and absent for apply; got {', '.join(map(repr, lower))}"
            )

    @property
    def backends(self) -> tuple[str, ...]:
        """The distinct backends used, sorted."""
        used = (self.gram, self.symmetric_product, self.apply, self.whole)
        return tuple(sorted({choice.backend for choice in used if choice is not None}))

    def to_config(self) -> dict[str, Any]:
        """JSON form; :meth:`from_config` reads it back."""
        products = {
            op: {"backend": choice.backend, **choice.config}
            for op, choice in (
                ("gram", self.gram),
                ("symmetric_product", self.symmetric_product),
                ("apply", self.apply),
                ("whole", self.whole),
            )
            if choice is not None
        }
        return {"method": self.method, "restarts": list(self.restarts), "loop": self.loop, **products}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> NSChoice:
        """Read :meth:`to_config`'s form. Stored configurations are data from outside: every field is checked.

        Raises:
            ValueError: a field is missing, unknown or of the wrong kind.
        """
        expected = {"method", "restarts", "loop", "gram", "symmetric_product", "apply"}
        if set(config) - {"whole"} != expected:
            raise ValueError(f"an NS configuration has the fields {sorted(expected)}, got {sorted(config)}")
        restarts, loop = config["restarts"], config["loop"]
        if not isinstance(restarts, (list, tuple)) or not all(type(k) is int and k >= 1 for k in restarts):
            raise ValueError(f"restarts must be a list of iterations >= 1, got {restarts!r}")
        if not isinstance(loop, bool):
            raise ValueError(f"loop must be true or false, got {loop!r}")

        def product(op: str) -> ProductChoice:
            value = config[op]
            if not isinstance(value, Mapping) or not isinstance(value.get("backend"), str):
                raise ValueError(f"{op} must be an object with a backend, got {value!r}")
            return ProductChoice(value["backend"], {k: v for k, v in value.items() if k != "backend"})

        return cls(
            method=config["method"],
            restarts=tuple(restarts),
            gram=product("gram"),
            symmetric_product=product("symmetric_product"),
            apply=product("apply"),
            loop=loop,
            whole=product("whole") if "whole" in config else None,
        )


NEAR_SQUARE = 1.5
"""Below this aspect n/m the heuristics take the standard form: Gram saves little there (its break-even is
between 1 and 1.5), and the small singular values of a nearly square matrix lose accuracy in Gram space."""

TINY = 16
"""Below this m, half precision takes the standard form: with so few entries rounding errors do not average out,
and the Gram form let a singular value of a 2×5 matrix reach 1.7 in bf16. It would save nothing either."""


SMALL = 128
"""Up to this m, a lone matrix takes a CPU less time in fp32, which needs no restart, than in bf16: measured, 0.42 times
as much at 32×1024 and 0.84 at 128×896 and 128×2048, but 1.09 at 192×768."""


def computing_dtype(problem: Problem) -> torch.dtype:
    """What a ``gram_ns`` problem is computed in: its precision or, where that is faster, a higher one."""
    small = problem.batch == 1 and problem.m <= SMALL and problem.device.startswith("cpu")
    return torch.float32 if small and problem.dtype == "bf16" else PRECISIONS[problem.dtype]


@lru_cache(maxsize=4096)
def heuristic_choice(problem: Problem, coefficients: CoefficientSet | None = None) -> NSChoice:
    """The choice for a ``gram_ns`` problem that nobody tuned.

    * Form: standard below an aspect of :data:`NEAR_SQUARE`, and in half precision below m = :data:`TINY`; else
      Gram with :func:`default_restarts`.
    * Products: on a CPU, lower blocks from m = 512 on — panels, or halves in fp32 and fp64 from m = 1024 — of
      192 rows, 256 in half precision, more for the largest m; whole products below, and on any other device until
      it is tuned.
    * Batches: one matrix at a time from m = 512 on a CPU, where a single product fills it; else together.

    ``coefficients`` are needed for a caller's own list; a named set is found from the problem.
    """
    coefficients = coefficients or coefficients_of(problem.coefficients)
    dtype = computing_dtype(problem)
    half = dtype.itemsize == 2
    tiny = half and problem.m < TINY
    gram_form = problem.n >= NEAR_SQUARE * problem.m and not tiny and coefficients is not None
    restarts = default_restarts(coefficients, dtype) if gram_form and coefficients else ()
    large = problem.device.startswith("cpu") and problem.m >= 512
    products = ProductChoice("torch")
    if large:
        split = "panel" if half or problem.m < 1024 else "halves"
        block = max(256 if half else 192, problem.m // 8)
        products = ProductChoice("blocked", {"block": block, "split": split})
    return NSChoice(
        method="gram" if gram_form else "standard",
        restarts=restarts,
        gram=products,
        symmetric_product=products,
        loop=large and problem.batch > 1,
    )


class Chooser(Protocol):
    """Answers with the choice for a ``gram_ns`` problem, or ``None`` for "use the heuristics"."""

    def choose(self, problem: Problem) -> NSChoice | None: ...


_UNSET: Any = object()
_chooser: Any = _UNSET


def set_chooser(chooser: Chooser | None) -> Chooser | None:
    """Install ``chooser`` for the process (``None``: heuristics only) and return the one it replaces."""
    global _chooser
    previous = None if _chooser is _UNSET else _chooser
    _chooser = chooser
    return previous


def current_chooser() -> Chooser | None:
    """The installed chooser; at the first call, the one the ``dmuon.chooser`` entry point names."""
    global _chooser
    if _chooser is _UNSET:
        _chooser = None if os.environ.get("DMUON_AUTOTUNE") == "off" else _discover()
    chooser: Chooser | None = _chooser
    return chooser


def _discover() -> Chooser | None:
    from importlib.metadata import entry_points

    for entry in entry_points(group="dmuon.chooser"):
        try:
            chooser: Chooser = entry.load()()
            return chooser
        except Exception as error:
            warnings.warn(f"tuned choices are not used: {entry.value} failed with {error!r}", stacklevel=4)
    return None


def device_key(device: torch.device | str) -> str:
    """Name what timings depend on: the processor's or GPU's model and, on a CPU, the thread count."""
    device = torch.device(device)
    if device.type == "cuda":
        return f"cuda:{torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu:{_cpu_name()}:{torch.get_num_threads()}"
    return device.type


def _cpu_name() -> str:
    global _cpu
    if _cpu is None:
        _cpu = str(torch.backends.cpu.get_cpu_capability())
        try:
            with open("/proc/cpuinfo") as lines:  # noqa: PTH123 - a plain read of a pseudo-file
                names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
                _cpu = f"{next(names)} {_cpu}"
        except (OSError, StopIteration):
            import platform

            _cpu = f"{platform.processor() or platform.machine()} {_cpu}"
    return _cpu


_cpu: str | None = None


def problem_of(op: str, X: torch.Tensor, coefficients: str = "") -> Problem:
    """The problem that a (B, m, n) working tensor poses."""
    batch, m, n = X.shape
    return Problem(op, batch, m, n, precision_name(X.dtype), device_key(X.device), coefficients)
