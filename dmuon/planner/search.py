"""Improve a greedy assignment, and the bound that it is measured by, until they meet."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from dmuon.planner.columns import Columns, dive, relaxation
from dmuon.planner.effort import Effort, Spent
from dmuon.planner.instance import Counts, Instance
from dmuon.planner.pairs import level
from dmuon.planner.patterns import exact

SLACKS = (0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
"""By how many tolerances the goals of successive dives exceed the relaxation's makespan."""


WORTH = 0.7
"""A round that leaves more of the gap is the last."""


@dataclass
class Found:
    """The best assignment so far, what no other can undercut in ticks, and how the assignment was found."""

    assigned: Counts
    bound: float
    method: str


def improve(
    instance: Instance, starts: Sequence[Counts], best: Found, tolerance: float, effort: Effort
) -> None:
    """Look for a makespan within ``tolerance`` of the bound, and improve ``best`` in place. The same for equal input.

    Args:
        starts: assignments to begin with, the best first.
        best: what there is.

    Raises:
        OutOfTime: before the search had come to its end.
        RuntimeError, ImportError: the solver fails, or is not there; ``best`` is what was found before it was asked.
    """
    with suppress(Spent):
        _search(instance, starts, best, tolerance, effort)


def _search(
    instance: Instance, starts: Sequence[Counts], best: Found, tolerance: float, effort: Effort
) -> None:
    def offer(assigned: Counts, method: str) -> None:
        makespan, fits = instance.loads(assigned).max(), instance.fits(assigned).all()
        if fits and makespan < instance.loads(best.assigned).max():
            best.assigned, best.method = assigned, method

    def beyond(goal: float) -> bool:
        return bool(instance.loads(best.assigned).max() > max(goal, best.bound * (1 + tolerance)))

    # Beside the best, those that need the least time in all: levelling keeps most of that.
    thrifty = sorted(starts[1:], key=lambda counts: float(instance.loads(counts).sum()))
    for start in (starts[0], *thrifty[:2]):
        if beyond(best.bound):
            offer(level(instance, start, best.bound * (1 + tolerance), effort), "pairs")
    columns = None
    while beyond(best.bound):
        gap = float(instance.loads(best.assigned).max()) - best.bound
        columns = columns or Columns(instance, instance.counts, best.assigned, np.inf, effort)
        low, high = relaxation(instance, columns, best.assigned, best.bound, tolerance, effort)
        if instance.separable:
            best.bound = low
        for slack in SLACKS:
            if not beyond(high * (1 + slack * tolerance)):
                break
            found = dive(instance, columns, high * (1 + slack * tolerance), effort)
            offer(level(instance, found, low * (1 + tolerance), effort), "columns")
        if float(instance.loads(best.assigned).max()) - best.bound > WORTH * gap:
            break
    if beyond(best.bound) and instance.monotone:
        found, best.bound = exact(instance, best.assigned, best.bound, tolerance / 4, effort)
        offer(found, "sets")
