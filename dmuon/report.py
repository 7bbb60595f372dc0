"""Who goes where: a model's routing as a table to print and a list to walk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from dmuon.names import merge_patterns, plural
from dmuon.policy import MatrixPolicy, Routing

_TITLES = {"muon": "Muon", "adamw": "AdamW", "frozen": "Frozen"}


@dataclass(frozen=True)
class RoutingGroup:
    """Parameters that go the same way for the same reason, with the same shape and matrices."""

    routings: tuple[Routing, ...]

    @property
    def patterns(self) -> tuple[str, ...]:
        """The names in short: ``model.layers.*.self_attn.{q_proj,o_proj}.weight``."""
        return tuple(merge_patterns(routing.name for routing in self.routings))


@dataclass(frozen=True)
class Description:
    """The routing of every parameter of a model. Iterates over :class:`Routing`; prints as a table."""

    routings: tuple[Routing, ...]

    def __iter__(self) -> Iterator[Routing]:
        return iter(self.routings)

    def __len__(self) -> int:
        return len(self.routings)

    def __str__(self) -> str:
        groups = group_routings(self.routings)
        header = ("count", "shape", "as", "reason", "names")
        rows = {
            algorithm: [_row(g) for g in groups if g.routings[0].algorithm == algorithm]
            for algorithm in _TITLES
        }
        every = [header, *(row for section in rows.values() for row in section)]
        widths = [max(len(row[column]) for row in every) for column in range(len(header))]
        lines = []
        for algorithm, section in rows.items():
            if section:
                lines += [
                    self._title(algorithm),
                    _line(header, widths),
                    *(_line(row, widths) for row in section),
                    "",
                ]
        return "\n".join([*lines, self._total()])

    __repr__ = __str__

    def _title(self, algorithm: str) -> str:
        mine = [routing for routing in self.routings if routing.algorithm == algorithm]
        matrices = sum(matrix.batch for routing in mine for matrix in routing.matrices)
        counted = f", {plural(matrices, 'matrix', 'matrices')}" if algorithm == "muon" else ""
        parameters = plural(len(mine), "parameter", "parameters")
        return f"{_TITLES[algorithm]}: {parameters}{counted}, {_elements(mine)}"

    def _total(self) -> str:
        return f"Total: {plural(len(self), 'parameter', 'parameters')}, {_elements(self.routings)}"


def describe(model: nn.Module, policy: MatrixPolicy | None = None) -> Description:
    """How ``policy`` (default: :class:`MatrixPolicy`'s rules) routes ``model``: ``print(describe(model))``.

    The model may be on the meta device.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return Description(tuple((policy or MatrixPolicy()).route_model(model)))


def group_routings(routings: Sequence[Routing]) -> list[RoutingGroup]:
    """Gather what reads the same, in order of first appearance."""
    groups: dict[object, list[Routing]] = {}
    for routing in routings:
        key = (routing.algorithm, routing.shape, routing.reason, routing.matrices)
        groups.setdefault(key, []).append(routing)
    return [RoutingGroup(tuple(group)) for group in groups.values()]


def matrices_text(routing: Routing) -> str:
    """What Muon orthogonalises in a parameter, fan-out × fan-in: ``"64 × 2816×2048"``; ``"-"`` if nothing."""
    return (
        " + ".join(
            f"{matrix.rows}×{matrix.cols}"
            if matrix.batch == 1
            else f"{matrix.batch} × {matrix.rows}×{matrix.cols}"
            for matrix in routing.matrices
        )
        or "-"
    )


def shape_text(shape: tuple[int, ...]) -> str:
    """``(768,)`` → ``"(768)"``."""
    return f"({', '.join(map(str, shape))})"


def _row(group: RoutingGroup) -> tuple[str, ...]:
    first = group.routings[0]
    more = f" and {len(group.patterns) - 2} more" if len(group.patterns) > 2 else ""
    names = ", ".join(group.patterns[:2]) + more
    return str(len(group.routings)), shape_text(first.shape), matrices_text(first), first.reason, names


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    count, *rest = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
    return "  ".join(["", row[0].rjust(len(count)), *rest]).rstrip()


def _elements(routings: Sequence[Routing]) -> str:
    return plural(sum(routing.numel for routing in routings), "element", "elements")
