"""From how many of each kind a rank has to which ones: equal items change owners without changing the makespan."""

from __future__ import annotations

import heapq

import numpy as np

from dmuon.planner.instance import Counts, Instance


def owners_of(instance: Instance, assigned: Counts, ranks_per_node: int) -> dict[str, tuple[int, ...]]:
    """Name the items of ``assigned`` (ranks × kinds), so that each bucket comes from many links.

    Nodes first get ranks of about equal bytes. Then the items are dealt in the order of the forward, the largest of
    a bucket first, each to the rank that has least of this bucket so far, then to the place in a node that has, as
    weights cross between nodes from each rank to its likes there, then to the node, then to the rank with the largest
    part of its items still to come: so that nobody's are all early or all late.
    """
    left = assigned[_over_nodes(assigned @ instance.kept, ranks_per_node)]
    total = np.maximum(left.sum(axis=1), 1)
    nodes, places = np.divmod(np.arange(instance.ranks), ranks_per_node)
    kinds = {item.name: k for k, kind in enumerate(instance.kinds) for item in kind}
    buckets: dict[str, list[str]] = {}
    for item in instance.items:
        buckets.setdefault(item.bucket, []).append(item.name)
    owners: dict[str, tuple[int, ...]] = {}
    for names in buckets.values():
        on_rank, on_place, on_node = (
            np.zeros(size, dtype=np.int64) for size in (instance.ranks, ranks_per_node, nodes[-1] + 1)
        )
        for name in sorted(names, key=lambda name: -instance.kept[kinds[name]]):
            kind = kinds[name]
            able = np.flatnonzero(left[:, kind])
            to_come = left[able].sum(axis=1) / total[able]
            # The last key counts first; the order is stable, so that ties go to the lowest rank.
            keys = (-to_come, on_node[nodes[able]], on_place[places[able]], on_rank[able])
            best = able[np.lexsort(keys)[0]]
            owners[name] = (int(best),)
            left[best, kind] -= 1
            on_rank[best] += instance.kept[kind]
            on_place[places[best]] += instance.kept[kind]
            on_node[nodes[best]] += instance.kept[kind]
    return {item.name: owners[item.name] for item in instance.items}


def counts_of(instance: Instance, owners: dict[str, tuple[int, ...]]) -> Counts:
    """How many of each kind each rank has under ``owners``."""
    counts = np.zeros((instance.ranks, len(instance.kinds)), dtype=np.int64)
    for k, kind in enumerate(instance.kinds):
        for item in kind:
            counts[owners[item.name][0], k] += 1
    return counts


def _over_nodes(kept: Counts, ranks_per_node: int) -> list[int]:
    """For each rank the row it takes, so that nodes keep about the same: the heaviest row to the lightest node.

    Nodes start at different places, so that equal rows, which own the same kinds, are spread over the places, too.
    """
    rows: list[list[int]] = [[] for _ in range(len(kept) // ranks_per_node)]
    lightest = [(0, node) for node in range(len(rows))]
    for row in map(int, np.argsort(-kept, kind="stable")):
        weight, node = lightest[0]
        rows[node].append(row)
        if len(rows[node]) < ranks_per_node:
            heapq.heapreplace(lightest, (weight + int(kept[row]), node))
        else:
            heapq.heappop(lightest)
    return [row for node, each in enumerate(rows) for row in np.roll(each, node).tolist()]
