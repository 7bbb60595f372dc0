"""Greedy assignments: longest processing time first, with batches of several sizes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dmuon.planner.instance import Counts, Instance


def greedy(instance: Instance) -> list[Counts]:
    """:func:`longest_first` with batch caps of 1, 2, 4, …, the best first; empty where nothing fits the memory.

    Caps matter where batches are cheaper than their matrices one by one: chunks of many keep that gain on one rank,
    chunks of few balance better.
    """
    found = [counts for cap in _caps(instance) if (counts := longest_first(instance, cap)) is not None]
    if not found and (counts := heaviest_first(instance)) is not None:
        found = [counts]
    return sorted(found, key=lambda counts: _merit(instance, counts))


def longest_first(instance: Instance, cap: int = 1) -> Counts | None:
    """Each chunk of up to ``cap`` items of a kind, the longest first, goes to the rank that would be done first.

    Ties go to the kind that comes first and to the lowest rank. A kind whose cost is linear goes item by item. None
    where a chunk fits the memory of no rank any more.
    """
    jobs = [job for kind in range(len(instance.kinds)) for job in _chunks(instance, kind, cap)]
    times = instance.kind_times
    return _deal(instance, sorted(jobs, key=lambda job: -times[job[0]][job[1]]))


def heaviest_first(instance: Instance) -> Counts | None:
    """The same by memory: items in descending size, each to the rank that keeps the least; None if it fails, too."""
    assigned = np.zeros((instance.ranks, len(instance.kinds)), dtype=np.int64)
    for kind in np.argsort(-instance.kept, kind="stable"):
        for _ in range(instance.counts[kind]):
            rank = int(np.argmin(assigned @ instance.kept))
            assigned[rank, kind] += 1
            if not instance.fits(assigned[rank]):
                return None
    return assigned


def _deal(instance: Instance, jobs: list[tuple[int, int]]) -> Counts | None:
    ranks = np.arange(instance.ranks)
    assigned = np.zeros((instance.ranks, len(instance.kinds)), dtype=np.int64)
    units = np.zeros((instance.ranks, len(instance.tables)), dtype=np.int64)
    loads = np.zeros(instance.ranks)
    touched = [np.flatnonzero(row) for row in instance.per_item]
    for kind, size in jobs:
        after = loads.copy()
        for s in touched[kind]:
            times, here = instance.tables[s].times, units[:, s]
            after += times[here + size * instance.per_item[kind, s]] - times[here]
        if instance.memory_bytes is not None:
            assigned[:, kind] += size
            after[~instance.fits(assigned)] = np.inf
            assigned[:, kind] -= size
        rank = ranks[np.argmin(after)]
        if not np.isfinite(after[rank]):
            return None
        loads[rank] = after[rank]
        assigned[rank, kind] += size
        units[rank] += size * instance.per_item[kind]
    return assigned


def _chunks(instance: Instance, kind: int, cap: int) -> Iterator[tuple[int, int]]:
    count = int(instance.counts[kind])
    chunks = count if instance.linear[kind] else -(-count // cap)
    return ((kind, (count + k) // chunks) for k in reversed(range(chunks)))


def _caps(instance: Instance) -> list[int]:
    most = int(instance.counts[~instance.linear].max(initial=1))
    return [1 << k for k in range(max(1, (most - 1).bit_length() + 1))]


def _merit(instance: Instance, counts: Counts) -> tuple[float, float]:
    loads = instance.loads(counts)
    return float(loads.max()), float(loads.sum())
