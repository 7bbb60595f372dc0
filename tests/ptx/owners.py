"""Who touched which global memory during a launch: races between clusters, and between the warps of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx.types import Array


class Race(RuntimeError):
    """Two accesses to the same memory, one of them a write, that nothing orders."""


@dataclass(frozen=True)
class Who:
    """The threads behind some accesses, one each or one for all.

    Args:
        cluster: their clusters' numbers in the launch, from 1 on.
        warp: their warps, whose knowledge decides what they come after.
        actor: who accesses, in the terms of :mod:`ptx.history`: the warp itself, or something that acts for it.
        tick: of the actor.
        known: ``known[warp, actor]``, the tick up to which a warp comes after an actor.
    """

    cluster: Array
    warp: Array
    actor: Array
    tick: Array
    known: Array

    def part(self, index: Array | slice) -> Who:
        """Of some of the accesses."""
        if np.ndim(self.cluster) == 0:
            return self
        return Who(self.cluster[index], self.warp[index], self.actor[index], self.tick[index], self.known)

    def columns(self) -> Who:
        """With an axis behind, for the grains of each access."""
        cluster, warp, actor, tick = (
            np.asarray(field)[..., None] for field in (self.cluster, self.warp, self.actor, self.tick)
        )
        return Who(cluster, warp, actor, tick, self.known)


class Owners:
    """Who last read and wrote each grain of a stretch of global memory.

    Nothing orders two clusters, so that what one writes no other may touch. Within one, vector clocks decide. Of
    several readers that do not know of each other only the fact is kept: a later write is then not checked.
    """

    GRAIN = 2
    MANY = -1

    def __init__(self, size: int) -> None:
        count = size // self.GRAIN
        self.readers, self.writers = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self.read_by, self.read_at = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self.written_by, self.written_at = np.zeros(count, np.int32), np.zeros(count, np.int32)

    def read(self, places: NDArray[np.int64], size: int, who: Who) -> None:
        """Items of ``size`` bytes are read.

        Raises:
            Race: somebody wrote them, and nothing lies between.
        """
        grains, who = self._grains(places, size), who.columns()
        self._check_clusters(self.writers[grains], who, "reads what cluster {} has written")
        self._check_actors(
            self.writers, self.written_by, self.written_at, grains, who, "reads what {} has written"
        )
        before, by = self.readers[grains], self.read_by[grains]
        mine = before == who.cluster
        unknown = mine & ((by == self.MANY) | (self.read_at[grains] > _known(who, by, mine)))
        self.readers[grains] = np.where((before == 0) | mine, who.cluster, self.MANY)
        self.read_by[grains] = np.where(unknown & (by != who.actor), self.MANY, who.actor)
        self.read_at[grains] = who.tick
        if who.cluster.size > 1:
            # Several clusters may read the same at once.
            self.readers[grains[self.readers[grains] != who.cluster]] = self.MANY

    def write(self, places: NDArray[np.int64], size: int, who: Who) -> None:
        """Items of ``size`` bytes are written.

        Raises:
            Race: somebody read or wrote them, and nothing lies between.
        """
        grains, who = self._grains(places, size), who.columns()
        self._check_clusters(self.writers[grains], who, "overwrites what cluster {} has written")
        self._check_clusters(self.readers[grains], who, "overwrites what cluster {} has read")
        self._check_actors(
            self.writers, self.written_by, self.written_at, grains, who, "overwrites what {} has written"
        )
        self._check_actors(
            self.readers, self.read_by, self.read_at, grains, who, "overwrites what {} has read"
        )
        self.writers[grains] = who.cluster
        self.written_by[grains], self.written_at[grains] = who.actor, who.tick
        if who.cluster.size > 1:
            self._check_clusters(self.writers[grains], who, "writes at the same time as cluster {}")

    def _grains(self, places: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        return places[:, None] * size // self.GRAIN + np.arange(max(1, size // self.GRAIN))

    @staticmethod
    def _check_clusters(found: Array, who: Who, text: str) -> None:
        bad = (found != 0) & (found != who.cluster)
        if np.count_nonzero(bad):
            other, me = int(found[bad][0]), int(np.broadcast_to(who.cluster, bad.shape)[bad][0])
            # Numbers are shown from 0 on, as the grid has them.
            name = "another" if other < 0 else str(other - 1)
            raise Race(f"race: cluster {me - 1} {text.format(name)}, in global memory")

    def _check_actors(
        self, clusters: Array, by: Array, at: Array, grains: Array, who: Who, text: str
    ) -> None:
        last = by[grains]
        mine = (clusters[grains] == who.cluster) & (last != self.MANY)
        late = mine & (at[grains] > _known(who, last, mine))
        if np.count_nonzero(late):
            other, warp = int(last[late][0]), int(np.broadcast_to(who.warp, late.shape)[late][0])
            name = f"warp {other}" if other < who.known.shape[0] else "asynchronous work"
            raise Race(f"race: warp {warp} {text.format(name)}, in global memory, with nothing in between")


def _known(who: Who, actors: Array, mine: Array) -> Array:
    """What ``who`` knows of ``actors`` where ``mine``. The numbers of another cluster's mean nothing here."""
    return who.known[who.warp, np.where(mine, actors, 0)]


def everyone(cluster: Any, warp: Any, now: Any, known: Any) -> Who:
    """Threads that act for themselves."""
    return Who(cluster, warp, warp, now[warp], known)
