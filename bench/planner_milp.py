"""The published way to plan: a mixed-integer program over how many batches of each shape and size a rank gets."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from dmuon.planner import Costs, Item

SIZES = (1, 2, 4, 8)
"""Of batches, where batches are cheaper than their matrices."""


def plan_by_milp(
    items: list[Item], ranks: int, costs: Costs, seconds: float, *, batched: bool
) -> dict[str, int] | None:
    """Owners by name, or None if SciPy's ``milp`` finds no solution in ``seconds``.

    One integer for each shape, batch size and rank; all matrices are dealt; no rank takes longer than the makespan;
    and the ranks are ordered by load, so that they cannot be exchanged.
    """
    names: dict[tuple[int, int], list[str]] = {}
    for item in items:
        ((_, rows, cols),) = item.stacks
        names.setdefault((rows, cols), []).append(item.name)
    sizes = SIZES if batched else (1,)
    kinds = [(shape, size) for shape in names for size in sizes if size <= len(names[shape])]
    ms = np.array([costs.cost(*shape, size).ms for shape, size in kinds])
    shapes = list(names)
    columns = len(kinds) * ranks  # kind by kind, rank after rank; the makespan comes last
    entries: list[tuple[int, int, float]] = []
    low, high = [], []
    for row, shape in enumerate(shapes):
        for k, (of, size) in enumerate(kinds):
            if of == shape:
                entries += [(row, k * ranks + rank, float(size)) for rank in range(ranks)]
        low.append(float(len(names[shape])))
        high.append(float(len(names[shape])))
    for rank in range(ranks):
        row = len(low)
        entries += [(row, k * ranks + rank, cost) for k, cost in enumerate(ms)] + [(row, columns, -1.0)]
        low.append(-np.inf)
        high.append(0.0)
    for rank in range(ranks - 1):
        row = len(low)
        for k, cost in enumerate(ms):
            entries += [(row, k * ranks + rank, cost), (row, k * ranks + rank + 1, -cost)]
        low.append(0.0)
        high.append(np.inf)
    rows, cols, values = (np.array(each) for each in zip(*entries, strict=True))
    matrix = coo_array((values, (rows, cols)), shape=(len(low), columns + 1)).tocsr()
    most = np.repeat([len(names[shape]) // size for shape, size in kinds], ranks)
    found = milp(
        np.append(np.zeros(columns), 1.0),
        constraints=LinearConstraint(matrix, low, high),
        bounds=Bounds(0, np.append(most, np.inf)),
        integrality=np.append(np.ones(columns), 0),
        options={"time_limit": seconds},
    )
    if found.x is None:
        return None
    owners: dict[str, int] = {}
    left = {shape: list(reversed(each)) for shape, each in names.items()}
    for k, (shape, size) in enumerate(kinds):
        for rank in range(ranks):
            for _ in range(round(found.x[k * ranks + rank]) * size):
                owners[left[shape].pop()] = rank
    return owners if not any(left.values()) else None
