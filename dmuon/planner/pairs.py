"""Level an assignment: divide what the busiest rank and another one have anew between the two, as well as can be."""

from __future__ import annotations

import numpy as np

from dmuon.planner.effort import Effort
from dmuon.planner.instance import Counts, Instance
from dmuon.planner.knapsack import Filled, Options

STEPS = 4_000
"""Into which the time of a pair is divided."""

PARTNERS = 32
"""Ranks that are tried for one, those with the least to do first."""


def level(instance: Instance, assigned: Counts, goal: float, effort: Effort) -> Counts:
    """Shorten the busiest rank until it takes ``goal`` ticks at most, or no partner helps. Others do not get longer
    than it was."""
    assigned = assigned.copy()
    loads = instance.loads(assigned)
    while loads.max() > goal:
        busiest = int(np.argmax(loads))
        for partner in map(int, np.argsort(loads, kind="stable")[:PARTNERS]):
            if partner == busiest:
                continue
            pair = [busiest, partner]
            divided = _divide(instance, assigned[pair].sum(axis=0), loads[busiest], effort)
            after = instance.loads(divided)
            if after.max() < loads[busiest] * (1 - 1e-6) and instance.fits(divided).all():
                assigned[pair], loads[pair] = divided, after
                break
        else:
            break
    return assigned


def _divide(instance: Instance, counts: Counts, limit: float, effort: Effort) -> Counts:
    """``counts`` of each kind between two ranks, so that the longer one is as short as it can be."""
    options, kinds = [], list(map(int, np.flatnonzero(counts)))
    for kind in kinds:
        times = instance.kind_times[kind][: counts[kind] + 1]
        within = np.flatnonzero(times <= limit)[1:]
        weights = np.rint(times[within] * (STEPS / limit)).astype(np.int64)
        # What the second rank is spared.
        options.append(Options(within, weights, times[-1] - times[len(times) - 1 - within]))
    filled = Filled(options, kinds, STEPS, effort)
    whole = sum(instance.kind_times[kind][counts[kind]] for kind in kinds)
    longer = np.maximum(np.arange(STEPS + 1) * (limit / STEPS), whole - filled.best)
    first = filled.counts(int(np.argmin(longer)), len(counts))
    return np.stack([first, counts - first])
