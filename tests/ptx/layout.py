"""The threads of the resident blocks on one axis, and what each can know of its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx.types import Array

WARP = 32
WARPGROUP = 128


@dataclass(frozen=True)
class Shape:
    """Threads of a block in x, y and z, blocks of a cluster, and clusters that run at a time."""

    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    resident: int

    @property
    def block_threads(self) -> int:
        return int(np.prod(self.block))

    @property
    def cluster_blocks(self) -> int:
        return int(np.prod(self.cluster))


class Layout:
    """Where the threads of some clusters lie; each block begins at a multiple of its width.

    Args:
        shape: of blocks, and how many clusters there are.
        grid: of the launch.
        unit: what a block's width is a multiple of: the threads that act together.
    """

    def __init__(self, shape: Shape, grid: tuple[int, int, int], unit: int) -> None:
        self.shape, self.grid = shape, grid
        self.blocks = shape.resident * shape.cluster_blocks
        self.block_width = -(-shape.block_threads // unit) * unit
        self.threads = self.blocks * self.block_width
        self.warps = self.threads // WARP
        axis = np.arange(self.threads)
        self.thread = axis % self.block_width
        self.lane = (axis % WARP).astype(np.uint32)
        self.warp = axis // WARP
        self.block = axis // self.block_width
        self.cluster = self.block // shape.cluster_blocks
        self.cluster_first = self.cluster * shape.cluster_blocks
        self.rank = (self.block - self.cluster_first).astype(np.uint32)
        self.cluster_number = np.zeros(self.threads, np.int32)

    def special_registers(self, dynamic: int, shared: int) -> dict[str, Array]:
        """The arrays behind ``%tid.x`` and the like; those that change from cluster to cluster are zero."""
        shape = self.shape
        x, y, _ = shape.block
        thread = self.thread.astype(np.uint32)
        values: dict[str, Any] = {
            "%tid.x": thread % x,
            "%tid.y": thread // x % y,
            "%tid.z": thread // (x * y),
            "%laneid": self.lane.copy(),
            "%warpid": thread // WARP,
            "%nwarpid": -(-shape.block_threads // WARP),
            "%smid": 0,
            "%nsmid": 1,
            "%dynamic_smem_size": dynamic,
            "%total_smem_size": shared,
            "%lanemask_eq": np.uint32(1) << self.lane,
            "%lanemask_lt": (np.uint32(1) << self.lane) - np.uint32(1),
            "%lanemask_le": np.uint32(0xFFFFFFFF) >> (np.uint32(31) - self.lane),
            "%lanemask_gt": ~(np.uint32(0xFFFFFFFF) >> (np.uint32(31) - self.lane)),
            "%lanemask_ge": np.uint32(0xFFFFFFFF) << self.lane,
            "%cluster_ctarank": self.rank,
            "%cluster_nctarank": shape.cluster_blocks,
            "%is_explicit_cluster": int(shape.cluster_blocks > 1),
            "%clock": 0,
            "%clock_hi": 0,
        }
        ranks = self.rank
        for axis, name in enumerate("xyz"):
            size = shape.cluster[axis]
            values[f"%ntid.{name}"] = shape.block[axis]
            values[f"%nctaid.{name}"] = self.grid[axis]
            values[f"%ctaid.{name}"] = 0
            values[f"%cluster_nctaid.{name}"] = size
            values[f"%cluster_ctaid.{name}"] = ranks % np.uint32(size)
            values[f"%nclusterid.{name}"] = self.grid[axis] // size
            values[f"%clusterid.{name}"] = 0
            ranks = ranks // np.uint32(size)
        filled = {
            name: np.ascontiguousarray(np.broadcast_to(np.asarray(value, np.uint32), (self.threads,))).copy()
            for name, value in values.items()
        }
        for name in ("%clock64", "%globaltimer"):
            filled[name] = np.zeros(self.threads, np.uint64)
        return filled

    def place(self, clusters: list[tuple[int, int, int]], specials: dict[str, Array]) -> None:
        """Gives the threads the indices of ``clusters`` in the grid; those of missing ones keep zeros."""
        missing = self.shape.resident - len(clusters)
        for axis, name in enumerate("xyz"):
            mine = np.array([cluster[axis] for cluster in clusters] + [0] * missing)[self.cluster]
            specials[f"%clusterid.{name}"][:] = mine
            offset = specials[f"%cluster_ctaid.{name}"]
            specials[f"%ctaid.{name}"][:] = mine * self.shape.cluster[axis] + offset
        x, y, _ = (size // part for size, part in zip(self.grid, self.shape.cluster, strict=True))
        numbers = [1 + c[0] + x * (c[1] + y * c[2]) for c in clusters] + [0] * missing
        self.cluster_number[:] = np.array(numbers)[self.cluster]
