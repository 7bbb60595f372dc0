"""In which batches, and in which order, a rank runs what it owns."""

from __future__ import annotations

from collections.abc import Sequence

from dmuon.batching import batch_sizes
from dmuon.planner.instance import Costs
from dmuon.planner.items import Item, Shape
from dmuon.planner.plan import Batch


def batches_of(items: Sequence[Item], costs: Costs) -> tuple[Batch, ...]:
    """The batches of one rank's ``items``, given in the order of the forward.

    Equal matrices run together, as many as the optimizer allows (:mod:`dmuon.batching`), dealt in the order of the
    forward. The batch that serves the earliest of them runs first: the order of batches costs nothing, and a weight
    that the forward wants first is published first.
    """
    shapes: dict[Shape, list[tuple[int, str, int]]] = {}
    for position, item in enumerate(items):
        for count, rows, cols in item.stacks:
            shapes.setdefault((rows, cols), []).append((position, item.name, count))
    found: list[tuple[int, Batch]] = []
    for (rows, cols), pieces in shapes.items():
        for size, (first, dealt) in _deal(pieces, batch_sizes(sum(n for *_, n in pieces), rows, cols)):
            cost = costs.cost(rows, cols, size)
            found.append((first, Batch(dealt, rows, cols, cost.ms, cost.source)))
    return tuple(batch for _, batch in sorted(found, key=lambda pair: pair[0]))


def _deal(
    pieces: Sequence[tuple[int, str, int]], sizes: Sequence[int]
) -> list[tuple[int, tuple[int, tuple[tuple[str, int], ...]]]]:
    """For each size the position of its first piece, and its pieces."""
    left, dealt = list(reversed(pieces)), []
    for size in sizes:
        first, taken, missing = left[-1][0], [], size
        while missing:
            position, name, count = left.pop()
            take = min(count, missing)
            taken.append((name, take))
            missing -= take
            if take < count:
                left.append((position, name, count - take))
        dealt.append((size, (first, tuple(taken))))
    return dealt
