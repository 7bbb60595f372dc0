"""Column generation: of the sets of items that a rank can run in a given time, take one for each rank.

The cutting-stock view of the problem (Gilmore and Gomory, 1961): as few ranks as can be are to cover all items, and the
time that each may take is searched. The linear relaxation bounds the makespan closer than closed forms do, and
its columns, rounded one after the other, make good plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dmuon.planner.effort import LINEAR_PROGRAM, Effort
from dmuon.planner.instance import Counts, Instance
from dmuon.planner.knapsack import most_valuable

if TYPE_CHECKING:
    import highspy

COARSE, FINE = 4_000, 20_000
"""Steps into which a rank's time is divided: to find columns, and to prove that no better ones are left."""

EXACT = 1e-9
"""What linear programs may be off by, relative."""


class Columns:
    """Sets of items as counts by kind, and the linear program that covers all items with the fewest of them.

    Args:
        instance: whose items.
        needed: how many of each kind.
        starts: sets to begin with, beside those of one item each.
        limit: ticks that a set may take.
        effort: what it may take.
    """

    def __init__(
        self, instance: Instance, needed: Counts, starts: Counts, limit: float, effort: Effort
    ) -> None:
        self._instance, self._needed, self._effort, self._limit = instance, needed, effort, limit
        self.sets = np.zeros((0, len(needed)), dtype=np.int64)
        self._loads = np.zeros(0)
        self._highs = solver()
        nothing = np.zeros(len(needed) + 1, dtype=np.int32)
        below, above = needed.astype(np.float64), np.full(len(needed), np.inf)
        self._highs.addRows(len(needed), below, above, 0, nothing, nothing[:0], np.zeros(0))
        self.add(np.concatenate([np.diag(np.minimum(needed, 1)), starts]))

    def add(self, sets: Counts) -> bool:
        """Take in sets, without what is not needed or does not fit the memory; False if all are there already."""
        sets = _fitting(self._instance, np.minimum(sets, self._needed))
        known = {each.tobytes() for each in self.sets}
        new = [each for each in np.unique(sets, axis=0) if each.any() and each.tobytes() not in known]
        if not new:
            return False
        sets = np.stack(new)
        loads = self._instance.loads(sets)
        self.sets, self._loads = np.concatenate([self.sets, sets]), np.concatenate([self._loads, loads])
        rows, kinds = np.nonzero(sets)
        starts = np.searchsorted(rows, np.arange(len(sets))).astype(np.int32)
        self._highs.addCols(
            len(sets),
            np.ones(len(sets)),
            np.zeros(len(sets)),
            np.where(loads <= self._limit, np.inf, 0.0),
            len(rows),
            starts,
            kinds.astype(np.int32),
            sets[rows, kinds].astype(np.float64),
        )
        return True

    def allow(self, limit: float) -> None:
        """Use those alone that take ``limit`` ticks at most."""
        self._limit = limit
        every, most = np.arange(len(self.sets), dtype=np.int32), np.where(self._loads <= limit, np.inf, 0.0)
        self._highs.changeColsBounds(len(every), every, np.zeros(len(every)), most)

    def cover(self) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
        """The fewest sets, in fractions; how often each is taken; and by how much an item of each kind fewer would
        lower their number."""
        self._effort.spend(LINEAR_PROGRAM)
        optimal(self._highs)
        solution = self._highs.getSolution()
        least = float(self._highs.getInfo().objective_function_value)
        return least, np.array(solution.col_value), np.maximum(np.array(solution.row_dual), 0.0)


def relaxation(
    instance: Instance, columns: Columns, assigned: Counts, low: float, tolerance: float, effort: Effort
) -> tuple[float, float]:
    """How short a makespan could be if sets could be taken in fractions: to a quarter of ``tolerance``, or to an eighth
    of the gap of ``assigned`` where that is more. Adds columns.

    Returns:
        A bound on the makespan, at least ``low``, and a makespan for which the relaxation is feasible or nearly so.
    """
    high = makespan = float(instance.loads(assigned).max())
    middle = low * (1 + tolerance / 4)
    while high - low > max(low * tolerance / 4, (makespan - low) / 8):
        columns.allow(middle)
        feasible = _feasible(instance, columns, middle, effort)
        if feasible is None:  # undecided within the steps of the dynamic program
            return low, middle
        low, high = (low, middle) if feasible else (middle, high)
        middle = (low + high) / 2
    return low, high


def _feasible(instance: Instance, columns: Columns, limit: float, effort: Effort) -> bool | None:
    """Whether fractions of columns within ``limit`` can cover all items; None if that cannot be told."""
    steps, enough = COARSE, instance.ranks * (1 + EXACT)
    while True:
        least, _, values = columns.cover()
        if least <= enough:
            return True
        value, found = most_valuable(values, instance.kind_times, instance.linear, limit, steps, effort)
        # Farley's bound: no column saves more than the best one of the relaxed program.
        if least / max(value, 1.0) > enough:
            return False
        if values @ found > 1 + EXACT and instance.loads(found) <= limit and columns.add(found[None]):
            continue
        if steps == FINE:
            return None
        steps = FINE


def dive(instance: Instance, columns: Columns, limit: float, effort: Effort) -> Counts:
    """An assignment in which ranks take about ``limit`` ticks: take the columns that the relaxation takes whole, or
    else the one that it takes most of; generate columns for the rest; and so on. What is left over in the end goes
    where it is done first."""
    needed, taken, pool = instance.counts, list[Counts](), columns.sets
    while needed.any() and len(taken) < instance.ranks:
        rest, used = _rest(instance, pool, needed, instance.ranks - len(taken), limit, effort)
        whole = np.floor(used + EXACT).astype(np.int64)
        if not whole.any():
            whole[np.argmax(used)] = 1
        for index in np.repeat(np.arange(len(whole)), whole)[: instance.ranks - len(taken)]:
            taken.append(np.minimum(rest.sets[index], needed))
            needed = needed - taken[-1]
        pool = rest.sets
    return spread(instance, np.array(taken))


def _rest(
    instance: Instance, pool: Counts, needed: Counts, ranks: int, limit: float, effort: Effort
) -> tuple[Columns, NDArray[np.float64]]:
    """Columns that cover ``needed`` with ``ranks`` if that can be, and how much of each."""
    rest = Columns(instance, needed, pool, limit, effort)
    times = [each[: count + 1] for each, count in zip(instance.kind_times, needed, strict=True)]
    while True:
        least, used, values = rest.cover()
        if least <= ranks * (1 + EXACT):
            return rest, used
        _, found = most_valuable(values, times, instance.linear, limit, COARSE, effort)
        if values @ found <= 1 + EXACT or instance.loads(found) > limit or not rest.add(found[None]):
            return rest, used


def spread(instance: Instance, sets: Counts) -> Counts:
    """An assignment of ``sets`` to as many ranks: without items that are in too many of them, and with those that
    are in too few, the longest first, where they are done first."""
    assigned = np.zeros((instance.ranks, len(instance.kinds)), dtype=np.int64)
    needed = instance.counts.copy()
    for rank, each in enumerate(sets):
        assigned[rank] = np.minimum(each, needed)
        needed -= assigned[rank]
    one = np.eye(len(needed), dtype=np.int64)
    for kind in np.argsort([-times[1] for times in instance.kind_times], kind="stable"):
        for _ in range(needed[kind]):
            with_it = assigned + one[kind]
            loads = np.where(instance.fits(with_it), instance.loads(with_it), np.inf)
            assigned[np.argmin(loads)] += one[kind]
    return assigned


def solver() -> highspy.Highs:
    """A silent HiGHS that does the same in every run."""
    import highspy

    class Silent(highspy.Highs):
        def enableCallbacks(self) -> None:
            # HiGHS prints its banner when the constructor calls this, before anybody could set an option.
            self.silent()
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    highs = Silent()  # type: ignore[no-untyped-call]
    for option, value in (("threads", 1), ("random_seed", 0)):
        highs.setOptionValue(option, value)
    return highs


def optimal(highs: highspy.Highs) -> None:
    """Solve.

    Raises:
        RuntimeError: without an optimal solution.
    """
    import highspy

    highs.run()
    if (status := highs.getModelStatus()) != highspy.HighsModelStatus.kOptimal:
        raise RuntimeError(f"HiGHS ended with {highs.modelStatusToString(status)!r}")


def _fitting(instance: Instance, sets: Counts) -> Counts:
    """``sets`` without their largest items, as far as the memory demands."""
    while not (fits := instance.fits(sets)).all():
        largest = np.argmax(np.where(sets > 0, instance.kept, -1), axis=1)
        sets[~fits, largest[~fits]] -= 1
    return sets
