"""Improve a greedy assignment, and the bound that it is measured by, until they meet."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from dmuon.planner.columns import dive, relaxation
from dmuon.planner.effort import Effort, Spent
from dmuon.planner.instance import Counts, Instance
from dmuon.planner.pairs import level
from dmuon.planner.patterns import exact

SLACKS = (0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
"""By how many tolerances the goals of successive dives exceed the relaxation's makespan."""


@dataclass
class Found:
    """The best assignment so far, what no other can undercut in ticks, and how the assignment was found."""

    assigned: Counts
    bound: float
    method: str


def improve(instance: Instance, assigned: Counts, bound: float, tolerance: float, effort: Effort) -> Found:
    """Look for a makespan within ``tolerance`` of a bound. The same for equal input.

    Raises:
        OutOfTime: before the search had come to its end.
        RuntimeError, ImportError: the solver fails, or is not there.
    """
    best = Found(assigned, bound, "greedy")
    with suppress(Spent):
        _search(instance, best, tolerance, effort)
    return best


def _search(instance: Instance, best: Found, tolerance: float, effort: Effort) -> None:
    def offer(assigned: Counts, method: str) -> None:
        makespan, fits = instance.loads(assigned).max(), instance.fits(assigned).all()
        if fits and makespan < instance.loads(best.assigned).max():
            best.assigned, best.method = assigned, method

    def beyond(goal: float) -> bool:
        return bool(instance.loads(best.assigned).max() > max(goal, best.bound * (1 + tolerance)))

    offer(level(instance, best.assigned, best.bound * (1 + tolerance), effort), "pairs")
    if not beyond(best.bound):
        return
    low, high, columns = relaxation(instance, best.assigned, best.bound, tolerance, effort)
    if instance.separable:
        best.bound = low
    for slack in SLACKS:
        if not beyond(high * (1 + slack * tolerance)):
            break
        found = dive(instance, columns, high * (1 + slack * tolerance), effort)
        offer(level(instance, found, low * (1 + tolerance), effort), "columns")
    if beyond(best.bound) and instance.monotone:
        found, best.bound = exact(instance, best.assigned, best.bound, tolerance / 4, effort)
        offer(found, "sets")
