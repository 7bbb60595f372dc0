"""Instances to plan: the shipped models, and random ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dmuon.autotune import Cost
from dmuon.planner import Item


@dataclass(frozen=True)
class Table:
    """Milliseconds of each matrix and of each batch, by the number of rows less one."""

    each: tuple[float, ...]
    launch: tuple[float, ...]

    def cost(self, rows: int, cols: int, batch: int) -> Cost:
        return Cost(self.launch[rows - 1] + self.each[rows - 1] * batch, "default")


def items_by_shape(*counts: int) -> list[Item]:
    """So many matrices of 1 row, of 2 rows, and so on."""
    return [
        Item(f"{rows}.{k}", ((1, rows, 8),), str(k))
        for rows, count in enumerate(counts, 1)
        for k in range(count)
    ]


def random_instance(seed: int) -> tuple[list[Item], int, Table]:
    """10 to 20 shapes, 100 to 2000 matrices, 8 to 256 ranks. With odd seeds a batch costs up to 0.3 of a matrix more
    than its matrices; with even ones it costs just them."""
    random = np.random.default_rng(seed)
    shapes = int(random.integers(10, 21))
    matrices = int(np.exp(random.uniform(np.log(100), np.log(2000))))
    ranks = int(random.choice([8, 16, 32, 64, 128, 256]))
    each = np.round(random.uniform(0.05, 1, shapes) ** 3, 4) + 1e-3
    launch = each * random.uniform(0, 0.3, shapes) * (seed % 2)
    counts = random.multinomial(matrices - shapes, np.ones(shapes) / shapes) + 1
    return items_by_shape(*map(int, counts)), ranks, Table(tuple(each.tolist()), tuple(launch.tolist()))
