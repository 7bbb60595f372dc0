"""The planning problem in numbers: kinds of equal items, and what any number of them takes on one rank."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dmuon.autotune import Cost
from dmuon.batching import batch_sizes
from dmuon.planner.items import Item, Shape

Counts = NDArray[np.int64]
"""How many items of each kind one rank has; with a row for each rank, a whole assignment."""

TICKS = 1 << 50
"""Times are whole numbers of ticks, and all matrices on one rank take about this many: sums are exact then, so that
they compare alike in whatever order and on whatever machine they were added up."""


class Costs(Protocol):
    """What the owner's step takes; :class:`~dmuon.planner.StepCosts` is the one from measurements."""

    def cost(self, rows: int, cols: int, batch: int) -> Cost:
        """Milliseconds of the whole step of ``batch`` matrices in one batch."""
        ...


@dataclass(frozen=True, eq=False)
class ShapeTable:
    """By units of matrices of one shape on one rank: ticks (``times``) and bytes for the largest batch
    (``working``). The first entry is for none. A unit is ``unit`` matrices."""

    unit: int
    times: NDArray[np.float64]
    working: NDArray[np.int64]

    @cached_property
    def at_least(self) -> NDArray[np.float64]:
        """Ticks that these matrices take at least, however many more there are: times may dip where a batch is full."""
        return np.minimum.accumulate(self.times[::-1])[::-1]


class Instance:
    """Items, ranks and costs as arrays.

    Attributes:
        kinds: the items by kind, each in the order given; kinds in the order of their first items.
        counts: how many of each kind there are.
        per_item: kinds × shapes, the units of each shape in an item.
        tables: of each shape.
        tick_ms: milliseconds of a tick.

    Args:
        items: with distinct names.
        ranks: how many can own.
        costs: of batches.
        memory_bytes: what a rank has for owned parameters and the working memory of its step; None for no limit.

    Raises:
        ValueError: no rank, no memory, or a name that is there twice.
    """

    def __init__(
        self, items: Sequence[Item], ranks: int, costs: Costs, memory_bytes: int | None = None
    ) -> None:
        if not hasattr(ranks, "__index__") or ranks < 1:
            raise ValueError(f"ranks must be a whole number of at least 1, got {ranks!r}")
        if memory_bytes is not None and not memory_bytes > 0:
            raise ValueError(f"memory_bytes must be positive, or None for no limit, got {memory_bytes!r}")
        names = [item.name for item in items]
        if len(set(names)) < len(names):
            raise ValueError(f"items need distinct names, got {max(names, key=names.count)!r} more than once")
        self.items, self.ranks, self.costs, self.memory_bytes = tuple(items), ranks, costs, memory_bytes
        kinds: dict[object, list[Item]] = {}
        for item in items:
            kinds.setdefault(item.kind, []).append(item)
        self.kinds = list(kinds.values())
        self.counts = np.array([len(kind) for kind in self.kinds], dtype=np.int64)
        self.kept = np.array([kind[0].kept_bytes for kind in self.kinds], dtype=np.int64)
        shapes: dict[Shape, list[int]] = {}
        for k, kind in enumerate(self.kinds):
            for count, rows, cols in kind[0].stacks:
                shapes.setdefault((rows, cols), [0] * len(self.kinds))[k] += count
        matrices = np.array(list(shapes.values()), dtype=np.int64).reshape(len(shapes), len(self.kinds)).T
        units = np.gcd.reduce(matrices, axis=0) if len(items) else np.ones(len(shapes), dtype=np.int64)
        self.shapes, self.per_item = list(shapes), matrices // units
        itemsize = max((item.itemsize for item in items), default=4)
        ms = [self._times(*shape, unit, total) for shape, unit, total in self._totals(units)]
        # A power of two, so that it divides and multiplies exactly.
        self.tick_ms = 2.0 ** math.ceil(math.log2(sum(float(each[-1]) for each in ms) or 1.0)) / TICKS
        self.tables = [
            ShapeTable(unit, np.round(each / self.tick_ms), _working(*shape, unit, total, itemsize))
            for (shape, unit, total), each in zip(self._totals(units), ms, strict=True)
        ]

    def loads(self, counts: Counts) -> NDArray[np.float64]:
        """Ticks of each row of ``counts``."""
        units = counts @ self.per_item
        columns = [table.times[units[..., s]] for s, table in enumerate(self.tables)]
        return np.sum(columns, axis=0) if columns else np.zeros(counts.shape[:-1])

    def memory(self, counts: Counts) -> NDArray[np.int64]:
        """Bytes that each row of ``counts`` needs on its rank."""
        units = counts @ self.per_item
        columns = [table.working[units[..., s]] for s, table in enumerate(self.tables)]
        kept: NDArray[np.int64] = counts @ self.kept
        return kept + np.max(columns, axis=0) if columns else kept

    def fits(self, counts: Counts) -> NDArray[np.bool_]:
        """Whether each row of ``counts`` keeps within the memory of a rank."""
        if self.memory_bytes is None:
            return np.ones(counts.shape[:-1], dtype=np.bool_)
        return self.memory(counts) <= self.memory_bytes

    def key(self, *more: object) -> str:
        """Equal for instances whose plans are equal, and for equal ``more``."""
        items = [(item.name, item.stacks, item.bucket, item.itemsize) for item in self.items]
        times = [table.times.tolist() for table in self.tables]
        text = json.dumps([items, self.ranks, self.memory_bytes, self.shapes, self.tick_ms, times, more])
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def separable(self) -> bool:
        """Whether no shape occurs in two kinds, so that kinds cannot share batches and their times add up."""
        return bool((np.count_nonzero(self.per_item, axis=0) <= 1).all())

    @cached_property
    def kind_times(self) -> list[NDArray[np.float64]]:
        """Of each kind, ticks by how many of it there are, alone on a rank."""
        return [
            self.loads(np.outer(np.arange(n + 1), row)) for n, row in zip(self.counts, self._eye, strict=True)
        ]

    @cached_property
    def linear(self) -> NDArray[np.bool_]:
        """Of each kind, whether n items take n times as long as one, to a millionth."""
        return np.array(
            [
                np.allclose(times, times[1] * np.arange(len(times)), rtol=1e-6, atol=0.0)
                for times in self.kind_times
            ],
            dtype=np.bool_,
        )

    @cached_property
    def monotone(self) -> bool:
        """Whether more matrices never take less time."""
        return all(bool((np.diff(table.times) >= 0).all()) for table in self.tables)

    @property
    def _eye(self) -> Counts:
        return np.eye(len(self.kinds), dtype=np.int64)

    def _totals(self, units: Counts) -> list[tuple[Shape, int, int]]:
        totals = self.counts @ self.per_item
        return [(s, int(unit), int(total)) for s, unit, total in zip(self.shapes, units, totals, strict=True)]

    def _times(self, rows: int, cols: int, unit: int, total: int) -> NDArray[np.float64]:
        known: dict[int, float] = {}

        def ms(size: int) -> float:
            if size not in known:
                known[size] = self.costs.cost(rows, cols, size).ms
                if not 0 <= known[size] < math.inf:
                    raise ValueError(
                        f"the cost of {size} × {rows}×{cols} must be finite, got {known[size]} ms"
                    )
            return known[size]

        return np.array(
            [sum(map(ms, batch_sizes(units * unit, rows, cols))) for units in range(total + 1)],
            dtype=np.float64,
        )


def _working(rows: int, cols: int, unit: int, total: int, itemsize: int) -> NDArray[np.int64]:
    """Bytes of the stack of the largest batch, of the iteration's copy of it, and of four m×m matrices each."""
    m = min(rows, cols)
    each = (2 * rows * cols + 4 * m * m) * itemsize
    largest = [max(batch_sizes(units * unit, rows, cols), default=0) for units in range(total + 1)]
    return np.array(largest, dtype=np.int64) * each
