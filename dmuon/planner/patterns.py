"""All sets of items that a rank can run in a given time, where there are few kinds: then the best plan can be found
and proved to be it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dmuon.planner.columns import solver, spread
from dmuon.planner.effort import LINEAR_PROGRAM, Effort, OutOfTime
from dmuon.planner.instance import Counts, Instance

PARTIAL, MAXIMAL = 5_000, 1_000
"""Sets to go through, and maximal ones that an integer program may choose from."""

NODES = 200
"""Of its branch and bound."""


def exact(
    instance: Instance, assigned: Counts, low: float, precision: float, effort: Effort
) -> tuple[Counts, float]:
    """Halve the gap between ``low`` and the makespan of ``assigned`` until it is within ``precision``, or there are
    too many sets, or the integer program is too hard.

    Returns:
        The best assignment, and the best bound.
    """
    high = float(instance.loads(assigned).max())
    while high > low * (1 + precision):
        middle = (low + high) / 2
        sets = maximal_sets(instance, middle, effort)
        if sets is None or not instance.fits(sets).all():
            break
        found = _cover(instance, sets, effort)
        if found is None:
            break
        if found.any():
            assigned, high = found, float(instance.loads(found).max())
        else:
            low = middle
    return assigned, low


def maximal_sets(instance: Instance, limit: float, effort: Effort) -> Counts | None:
    """Every set within ``limit`` ticks to which no item can be added; None if there are too many. More items must
    not take less time."""
    one = np.eye(len(instance.kinds), dtype=np.int64)
    sets = one[:0].sum(axis=0, keepdims=True)
    for kind in np.argsort([-times[1] for times in instance.kind_times], kind="stable"):
        effort.spend(len(sets) * int(instance.counts[kind]))
        grown = [sets + count * one[kind] for count in range(instance.counts[kind] + 1)]
        sets = np.concatenate([each[_within(instance, each, limit)] for each in grown])
        if len(sets) > PARTIAL:
            return None
    for kind, count in enumerate(instance.counts):
        larger = np.minimum(sets + one[kind], instance.counts)
        sets = sets[(sets[:, kind] == count) | ~_within(instance, larger, limit)]
    return sets if len(sets) <= MAXIMAL else None


def _cover(instance: Instance, sets: Counts, effort: Effort) -> Counts | None:
    """An assignment of one of ``sets`` to each rank; all zeros if there is none; None if that cannot be told."""
    import highspy

    effort.spend(LINEAR_PROGRAM * (1 + len(sets) // 10))
    highs = solver()
    highs.setOptionValue("mip_max_nodes", NODES)
    highs.setOptionValue("objective_target", instance.ranks + 0.5)
    highs.setOptionValue("time_limit", effort.seconds)
    for count in instance.counts:
        highs.addRow(float(count), np.inf, 0, np.array([], np.int32), np.array([], np.float64))
    for each in sets:
        kinds = np.flatnonzero(each)
        entries = each[kinds].astype(np.float64)
        highs.addCol(1.0, 0.0, np.inf, len(kinds), kinds.astype(np.int32), entries)
    columns = np.arange(len(sets), dtype=np.int32)
    highs.changeColsIntegrality(
        len(sets), columns, np.full(len(sets), highspy.HighsVarType.kInteger.value, np.uint8)
    )
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    if status == highspy.HighsModelStatus.kTimeLimit:
        raise OutOfTime
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible.value:
        if info.objective_function_value < instance.ranks + 0.5:
            used = np.rint(np.array(highs.getSolution().col_value)).astype(np.int64)
            return spread(instance, sets[np.repeat(columns, used)])
        if status == highspy.HighsModelStatus.kOptimal:
            return np.zeros((instance.ranks, len(instance.kinds)), dtype=np.int64)
    return None


def _within(instance: Instance, sets: Counts, limit: float) -> NDArray[np.bool_]:
    return instance.loads(sets) <= limit * (1 + 1e-12)
