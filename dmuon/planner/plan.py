"""The plan: who owns what, in which batches each rank runs it, and how far that is from the best possible."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dmuon.tuning_cache.files import replace_file

Owners = Mapping[str, int | tuple[int, ...]]
"""Parameter → its owner, or owners."""

FORMAT = 1
"""Of saved plans; raised when an older reader would misunderstand a newer file, or planning has changed."""


@dataclass(frozen=True)
class Batch:
    """Equal matrices that one rank orthogonalises together.

    Args:
        pieces: (parameter, how many of its matrices), in the order of the forward.
        rows: of each matrix.
        cols: of each matrix.
        ms: what its step takes.
        source: of ``ms``: "measured", "model" (calibrated on what was measured) or "default" (nothing was).
    """

    pieces: tuple[tuple[str, int], ...]
    rows: int
    cols: int
    ms: float
    source: str

    @property
    def count(self) -> int:
        """How many matrices."""
        return sum(count for _, count in self.pieces)


@dataclass(frozen=True)
class Plan:
    """Who owns what. Made by :func:`~dmuon.planner.make_plan`, or of given owners by
    :func:`~dmuon.planner.plan_of_owners`.

    Args:
        owners: parameter → the ranks that own it. One rank each for now; several are to share one matrix.
        ranks: how many ranks there are.
        batches: of each rank, in the order in which it runs them.
        bound: milliseconds that no plan with whole parameters can undercut.
        share: milliseconds if the work could be divided evenly; never more than ``bound``.
        memory: bytes that each rank needs for what it owns and for its largest batch.
        method: how it was found: "greedy", "pairs", "columns", "sets" or "given".
        notes: what a reader should know: why the bound is above the even share, what a solver did not manage.

    Raises:
        ValueError: an owner that is no rank, a parameter with several, not one entry for each rank, or batches of
            other parameters than the rank owns.
    """

    owners: Mapping[str, tuple[int, ...]]
    ranks: int
    batches: tuple[tuple[Batch, ...], ...]
    bound: float
    share: float
    memory: tuple[int, ...]
    method: str
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_owners(self.owners, self.ranks)
        for field in ("batches", "memory"):
            if len(getattr(self, field)) != self.ranks:
                raise ValueError(
                    f"{field} needs an entry for each of {self.ranks} ranks, got {len(getattr(self, field))}"
                )

        for rank, batches in enumerate(self.batches):
            run = {name for batch in batches for name, _ in batch.pieces}
            if run != {name for name, owners in self.owners.items() if rank in owners}:
                raise ValueError(f"the batches of rank {rank} are not those of what it owns")

    @property
    def loads(self) -> tuple[float, ...]:
        """Milliseconds of each rank's optimizer step."""
        return tuple(sum(batch.ms for batch in batches) for batches in self.batches)

    @property
    def makespan(self) -> float:
        """The largest load: how long the optimizer step takes."""
        return max(self.loads)

    @property
    def gap(self) -> float:
        """makespan / bound − 1: 0 when the plan is as good as can be."""
        return max(self.makespan / self.bound - 1, 0.0) if self.bound else 0.0

    @property
    def excess(self) -> float:
        """makespan / share − 1: what whole parameters cost against an even division of the work."""
        return max(self.makespan / self.share - 1, 0.0) if self.share else 0.0

    @property
    def modelled(self) -> tuple[str, ...]:
        """The batches whose cost was not measured, as "count × rows×cols", each once."""
        every = [batch for batches in self.batches for batch in batches if batch.source != "measured"]
        return tuple(dict.fromkeys(f"{batch.count} × {batch.rows}×{batch.cols}" for batch in every))

    @property
    def hash(self) -> str:
        """Equal for equal owners, on every rank and in every run."""
        text = json.dumps([self.ranks, sorted(self.owners.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """One line of ASCII JSON; :meth:`from_json` reads it back to an equal plan."""
        return json.dumps({"format": FORMAT, "hash": self.hash, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read :meth:`to_json`'s form.

        Raises:
            ValueError: it is none, of another format, or was changed since.
        """
        try:
            values = json.loads(text)
            saved, format_ = values.pop("hash"), values.pop("format")
            plan = cls(**{**values, **_tuples(values)}) if format_ == FORMAT else None
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a plan: {error!r}") from None
        if plan is None:
            raise ValueError(f"a plan of format {format_}, and this DMuon reads format {FORMAT}")
        if plan.hash != saved:
            raise ValueError(f"the owners have the hash {plan.hash}, but the file says {saved}")
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; a file that is there is replaced whole, or not at all.

        Raises:
            OSError: it cannot be written.
        """
        replace_file(path, f"{self.to_json()}\n".encode("ascii"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what :meth:`save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no plan; the text names it.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="ascii"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None


def given_owners(plan: Plan | Owners, names: Sequence[str], ranks: int) -> dict[str, tuple[int, ...]]:
    """Who owns what in a plan that the caller gave, in the order of ``names``.

    Raises:
        ValueError: it is for other names or another number of ranks, or an owner is no rank.
    """
    if isinstance(plan, Plan) and plan.ranks != ranks:
        raise ValueError(f"the plan is for {plan.ranks} ranks, but there are {ranks}")
    owners: Owners = plan.owners if isinstance(plan, Plan) else plan
    if owners.keys() != set(names):
        raise ValueError(
            f"the plan is for other parameters: it lacks {sorted(set(names) - owners.keys()) or 'none'} "
            f"and has {sorted(owners.keys() - set(names)) or 'none'} too many"
        )
    given = {name: (owner,) if isinstance(owner := owners[name], int) else tuple(owner) for name in names}
    _check_owners(given, ranks)
    return given


def _check_owners(owners: Mapping[str, tuple[int, ...]], ranks: int) -> None:
    """Raise a ValueError that names a parameter without exactly one owner among the ranks."""
    for name, owning in owners.items():
        if len(owning) != 1:
            raise ValueError(f"{name!r} must have one owner, got the ranks {owning}")
        if not 0 <= owning[0] < ranks:
            raise ValueError(f"the owner of {name!r} must be a rank below {ranks}, got {owning[0]}")


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists and numbers as what they were."""

    def batch(saved: dict[str, Any]) -> Batch:
        pieces = tuple((name, int(count)) for name, count in saved["pieces"])
        return Batch(**{**saved, "pieces": pieces, "ms": float(saved["ms"])})

    return {
        "owners": {name: tuple(ranks) for name, ranks in values["owners"].items()},
        "batches": tuple(tuple(map(batch, batches)) for batches in values["batches"]),
        "bound": float(values["bound"]),
        "share": float(values["share"]),
        "memory": tuple(map(int, values["memory"])),
        "notes": tuple(values["notes"]),
    }
