"""What no assignment of whole items can undercut, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dmuon.names import merge_patterns, plural
from dmuon.planner.instance import Costs, Instance
from dmuon.planner.items import Item


@dataclass(frozen=True)
class Bound:
    """A lower bound on the makespan.

    Args:
        ms: no plan with whole items takes less.
        share: the work divided evenly, in batches as large as they can be; at most ``ms``.
        reason: what keeps ``ms`` above ``share``; empty where nothing does.
    """

    ms: float
    share: float
    reason: str = ""


def lower_bound(items: Sequence[Item], ranks: int, costs: Costs) -> Bound:
    """The largest of these, in closed form:

    * the even share: all work over ``ranks``, each shape divided in the way that takes least;
    * the same with parts that take no longer than the bound itself;
    * the costliest item;
    * of k·ranks + 1 items some rank has k + 1: the k + 1 least of the k·ranks + 1 costliest.

    Raises:
        ValueError: no rank, or a name that is there twice.
    """
    return bound_of(Instance(items, ranks, costs))


def bound_of(instance: Instance) -> Bound:
    """The same for an instance."""
    if not instance.items:
        return Bound(0.0, 0.0)
    share = _divided(instance, np.inf) / instance.ranks
    alone, crowd = _alone(instance), _crowded(instance)
    costliest = float(alone.max())
    batches = _least(instance, max(share, costliest, crowd[0]))
    ticks = max(share, costliest, crowd[0], batches)
    reason = ""
    if ticks > share * (1 + 1e-9):
        if ticks == costliest:
            kind = instance.kinds[int(np.argmax(alone))]
            reason = f"no rank can take less than one of {_named(instance, kind)}, which has one owner"
        elif ticks == crowd[0]:
            reason = _crowd_reason(instance, crowd[1])
        else:
            reason = "batches that run within this time cost more per matrix than larger ones"
    return Bound(ticks * instance.tick_ms, share * instance.tick_ms, reason)


def _shares(instance: Instance) -> NDArray[np.float64]:
    """Of each kind, the least ticks that an item can add to those with which it shares batches."""
    units = [(table.times[1:] / np.arange(1, len(table.times))).min() for table in instance.tables]
    shares: NDArray[np.float64] = instance.per_item @ np.array(units)
    return shares


def _crowded(instance: Instance) -> tuple[float, int]:
    """Ticks of the bound by counting, and its k."""
    each = np.repeat(_shares(instance), instance.counts)
    descending = np.concatenate([[0.0], np.cumsum(np.sort(each)[::-1])])
    k = np.arange(1, (len(each) - 1) // instance.ranks + 1)
    if not len(k):
        return 0.0, 0
    sums = descending[k * instance.ranks + 1] - descending[k * instance.ranks - k]
    best = int(np.argmax(sums))
    return float(sums[best]), int(k[best])


def _least(instance: Instance, low: float) -> float:
    """The least time in which all matrices run, in parts that fit into that time."""
    high = low
    while _divided(instance, high) > instance.ranks * high:
        low, high = high, 2 * high
    while high - low > 1e-5 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if _divided(instance, middle) > instance.ranks * middle else (low, middle)
    return low


def _divided(instance: Instance, limit: float) -> float:
    """Ticks of all matrices if each shape is divided in the way that takes least, into parts within ``limit``."""
    return sum(_least_division(table.times, limit) for table in instance.tables)


def _least_division(times: NDArray[np.float64], limit: float) -> float:
    parts = np.where(times <= limit, times, np.inf)[1:]
    if (each := parts / np.arange(1, len(times))).min() >= each[0] * (1 - 1e-9):
        return float(each[0] * len(parts))
    least = np.zeros(len(times))
    for units in range(1, len(times)):
        least[units] = np.min(least[units - 1 :: -1][:units] + parts[:units])
    return float(least[-1])


def _alone(instance: Instance) -> NDArray[np.float64]:
    """Ticks that a rank with an item of each kind takes at least."""
    columns = [table.at_least[instance.per_item[:, s]] for s, table in enumerate(instance.tables)]
    alone: NDArray[np.float64] = np.sum(columns, axis=0)
    return alone


def _crowd_reason(instance: Instance, k: int) -> str:
    each = _shares(instance)
    crowd, found = [], 0
    for kind in np.argsort(-each, kind="stable"):
        crowd += instance.kinds[kind]
        found += int(instance.counts[kind])
        if found > k * instance.ranks:
            break
    return f"some rank must take {k + 1} of {_named(instance, crowd)}"


def _named(instance: Instance, items: Sequence[Item]) -> str:
    patterns = ", ".join(merge_patterns(item.name for item in items))
    return f"{patterns} ({plural(len(items), 'parameter', 'parameters')})"
