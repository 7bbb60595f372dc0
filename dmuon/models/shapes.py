"""What a model asks of Newton–Schulz: its distinct matrix shapes and how many of each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dmuon.names import merge_patterns
from dmuon.policy import Matrix, Routing


@dataclass(frozen=True)
class ShapeCount:
    """``count`` matrices of m × n, m ≤ n, to orthogonalise each step; ``names``: patterns of their names."""

    m: int
    n: int
    count: int
    names: tuple[str, ...]

    @property
    def operations(self) -> int:
        """Operations of one step's Newton–Schulz in Gram form with one restart: count · (6m²n + 14m³)."""
        return self.count * (6 * self.m**2 * self.n + 14 * self.m**3)


@dataclass(frozen=True)
class ModelShapes:
    """A model's parameters as routed, with no weight loaded. ``source`` says where the shapes are from."""

    name: str
    source: str
    parameters: tuple[Routing, ...]

    def matrices(self) -> list[ShapeCount]:
        """The matrices grouped by shape, most work first. A stack of E experts counts as E matrices."""
        found: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for routing in self.parameters:
            for matrix in routing.matrices:
                shape = min(matrix.rows, matrix.cols), max(matrix.rows, matrix.cols)
                found.setdefault(shape, []).append((routing.name, matrix.batch))
        counts = [
            ShapeCount(m, n, sum(batch for _, batch in uses), tuple(merge_patterns(name for name, _ in uses)))
            for (m, n), uses in found.items()
        ]
        return sorted(counts, key=lambda shape: shape.operations, reverse=True)

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(routing.numel for routing in self.parameters)


def shape_spec(text: str, count: int = 1) -> ModelShapes:
    """``count`` matrices of the one shape that ``text`` names: ``shape_spec("4096x11008", count=32)``.

    Raises:
        ValueError: ``text`` is not two positive integers with an x between, or ``count`` is below 1.
    """
    match = re.fullmatch(r"\s*([1-9]\d{0,9})\s*[x×X]\s*([1-9]\d{0,9})\s*", text, re.ASCII)
    if match is None:
        raise ValueError(f"a shape is written as in 4096x11008, got {text!r}")
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    rows, cols = int(match[1]), int(match[2])
    name = f"{rows}x{cols}"
    shape = (count, rows, cols)
    routing = Routing(name, shape, "muon", "given", (Matrix(shape, rows, cols, batch=count),))
    return ModelShapes(name, "given", (routing,))
