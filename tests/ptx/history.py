"""Who read and wrote which shared memory, and who knows of it: races, and writes that the async proxy cannot see.

Every access is ordered by vector clocks. An *actor* is a warp, or something that acts for one: the tensor cores of a
warpgroup, the bulk stores of a warp, or the loads that arrive at one mbarrier. An actor's accesses carry its tick; a
warp knows, for every actor, up to which tick it comes after it. It learns at barriers and mbarriers, and of its own
asynchronous work by waiting for it. An access is a race if the warp does not know of the last write there, or, for a
write, of some read. Warps are units: races between the threads of one are not looked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.owners import Race
from ptx.syntax import Immediate, Instruction, Vector, integer
from ptx.table import Mask
from ptx.types import bytes_of

if TYPE_CHECKING:
    from ptx.machine import Machine


class History:
    """The accesses to the shared memory of all resident blocks."""

    def __init__(self, machine: Machine, races: bool) -> None:
        self.machine, self.races = machine, races
        code = machine.program.code
        self.proxied = any(statement.op == "wgmma" or _is_bulk(statement) for statement in code)
        self.active = races or self.proxied
        # Two accesses may not be told apart below this many bytes.
        self.grain = min([_access(statement) for statement in code if _is_shared(statement)], default=4)
        self.warps = machine.warps
        self.cluster_warps = machine.warps // machine.shape.resident
        groups, self.cluster_groups = machine.warps // 4, self.cluster_warps // 4
        self.tensor_first, self.bulk_first = self.warps, self.warps + groups
        self.actors = self.bulk_first + self.warps
        if self.active:
            self.columns = self._reader_columns()
        self.reset()

    def _reader_columns(self) -> Any:
        """For each block, the actors that can read its memory: of its cluster."""
        rows = []
        for block in range(self.machine.blocks):
            cluster = block // self.machine.shape.cluster_blocks
            warps = np.arange(self.cluster_warps) + cluster * self.cluster_warps
            groups = self.tensor_first + np.arange(self.cluster_groups) + cluster * self.cluster_groups
            rows.append(np.concatenate([warps, groups, self.bulk_first + warps]))
        return np.array(rows)

    def reset(self) -> None:
        self.known = np.zeros((self.warps, self.actors), np.int32)
        self.now = np.ones(self.warps, np.int32)
        self.known[np.arange(self.warps), np.arange(self.warps)] = 1
        self.loads: dict[tuple[int, int], int] = {}
        self.clean = True
        if self.active:
            # New zeros cost less than old ones overwritten: the system makes the pages as they are touched.
            shape = (self.machine.blocks, self.machine.shared.data.shape[1] // self.grain)
            self.writer = np.zeros(shape, np.int16)
            self.written = np.zeros(shape, np.int32)
            self.line = np.zeros(shape, np.int32)
            self.dirty = np.zeros(shape, np.bool_)
            self.read_at = np.zeros((*shape, self.columns.shape[1]), np.int32)

    # Knowledge

    def publish(self, warps: Any) -> Any:
        """What ``warps`` know and did, for others to learn; what they do from now on belongs to a new tick."""
        known = self.known[warps].max(0)
        self.now[warps] += 1
        self.known[warps, warps] = self.now[warps]
        return known

    def learn(self, warps: Any, known: Any) -> None:
        """``warps`` come after everything in ``known``."""
        if known is not None:
            width = known.size
            self.known[warps, :width] = np.maximum(self.known[warps, :width], known)

    def load_actor(self, block: int, offset: int) -> int:
        """The actor of the bulk loads that arrive at an mbarrier."""
        actor = self.loads.get((block, offset))
        if actor is None:
            actor = self.loads[block, offset] = self.known.shape[1]
            self.known = np.concatenate([self.known, np.zeros((self.warps, 1), np.int32)], axis=1)
        return actor

    def knows(self, warps: Any, actor: int, tick: int) -> None:
        """``warps`` waited for what ``actor`` did up to ``tick``."""
        self.known[warps, actor] = np.maximum(self.known[warps, actor], tick)

    # Accesses

    def grains(self, offsets: Any, size: int) -> Any:
        """The grains of ``size`` bytes at each of ``offsets``, on a last axis."""
        first = np.asarray(offsets) // self.grain
        return first[..., None] + np.arange(max(1, size // self.grain))

    def read(self, blocks: Any, offsets: Any, size: int, lanes: Any) -> None:
        """Ordinary reads by threads, one place each."""
        if not self.races:
            return
        warps, grains = self.machine.warp[lanes], self.grains(offsets, size)
        blocks = np.asarray(blocks)[..., None]
        late = self.written[blocks, grains] > self.known[warps[:, None], self.writer[blocks, grains]]
        if np.count_nonzero(late):
            self._race("reads", late, blocks, grains, warps)
        self.read_at[blocks, grains, (warps % self.cluster_warps)[:, None]] = self.now[warps][:, None]

    def write(self, blocks: Any, offsets: Any, size: int, lanes: Any) -> None:
        """Ordinary writes by threads, one place each."""
        if not self.active:
            return
        warps, grains = self.machine.warp[lanes], self.grains(offsets, size)
        blocks = np.asarray(blocks)[..., None]
        if self.races:
            late = self.written[blocks, grains] > self.known[warps[:, None], self.writer[blocks, grains]]
            if np.count_nonzero(late):
                self._race("overwrites", late, blocks, grains, warps)
            seen = self.known[warps[:, None], self.columns[blocks[:, 0]]]
            unseen = (self.read_at[blocks, grains] > seen[:, None, :]).any(-1)
            if np.count_nonzero(unseen):
                self._race("overwrites what others still read,", unseen, blocks, grains, warps)
        self.writer[blocks, grains] = warps[:, None]
        self.written[blocks, grains] = self.now[warps][:, None]
        self.line[blocks, grains] = self.machine.index
        if self.proxied:
            self.dirty[blocks, grains] = True
            self.clean = False

    def actor_reads(self, block: int, grains: Any, warps: Any, actor: int, tick: int, what: str) -> None:
        """Asynchronous reads on behalf of ``warps``, over once ``actor`` has reached ``tick``."""
        if not self.active:
            return
        self.check_visible(block, grains, what)
        if self.races:
            seen = self.known[warps].min(0)
            late = self.written[block, grains] > seen[self.writer[block, grains]]
            if np.count_nonzero(late):
                self._race(
                    f"({what}) reads",
                    late,
                    np.full(grains.shape, block),
                    grains,
                    np.full(grains.shape, warps[0]),
                )
            column = int((self.columns[block] == actor).argmax())
            self.read_at[block, grains, column] = tick

    def load_writes(self, block: int, start: int, size: int, warp: int, actor: int, tick: int) -> None:
        """A bulk load of ``warp`` into ``size`` bytes from ``start``, over once ``actor`` has reached ``tick``."""
        if not self.active:
            return
        part = slice(start // self.grain, -(-(start + size) // self.grain))
        if self.races:
            late = self.written[block, part] > self.known[warp][self.writer[block, part]]
            unseen = (self.read_at[block, part] > self.known[warp][self.columns[block]]).any(-1)
            for bad, text in (
                (late, "(a bulk load) overwrites"),
                (unseen, "(a bulk load) overwrites what others still read,"),
            ):
                if np.count_nonzero(bad):
                    grains = np.arange(part.start, part.stop)
                    self._race(text, bad, np.full(grains.shape, block), grains, np.full(grains.shape, warp))
        self.writer[block, part] = actor
        self.written[block, part] = tick
        self.line[block, part] = self.machine.index
        self.dirty[block, part] = False

    # The async proxy

    def fence(self, mask: Mask) -> None:
        """A ``fence.proxy.async`` by the threads of ``mask``: it covers all writes that they come after."""
        if not self.proxied or self.clean:
            return
        warps = np.arange(self.warps) if mask is True else np.unique(self.machine.warp[mask])
        known = self.known[warps].max(0)
        blocks, grains = self.dirty.nonzero()
        seen = self.written[blocks, grains] <= known[self.writer[blocks, grains]]
        self.dirty[blocks[seen], grains[seen]] = False
        self.clean = bool(seen.all())

    def check_visible(self, block: int, grains: Any, what: str) -> None:
        """Raise if a write at ``grains`` is not visible to the async proxy."""
        if self.clean:
            return
        dirty = self.dirty[block, grains]
        if np.count_nonzero(dirty):
            place = int(grains[dirty.argmax()])
            raise RuntimeError(
                f"{what} reads shared address {place * self.grain:#x}, which {self._actor(self.writer[block, place])} "
                f"wrote without a fence.proxy.async since ({self._statement(block, place)})"
            )

    # Messages

    def _race(self, verb: str, bad: Any, blocks: Any, grains: Any, warps: Any) -> None:
        where = tuple(index[0] for index in bad.nonzero())
        block = int(np.broadcast_to(blocks, bad.shape)[where])
        grain, warp = int(np.broadcast_to(grains, bad.shape)[where]), int(warps[where[0]])
        raise Race(
            f"race: warp {warp} {verb} shared address {grain * self.grain:#x} of block {block}, last written by "
            f"{self._actor(self.writer[block, grain])} ({self._statement(block, grain)}), with nothing in between"
        )

    def _actor(self, actor: int) -> str:
        if actor < self.warps:
            return f"warp {actor}"
        return "a bulk load" if actor >= self.actors else "asynchronous work"

    def _statement(self, block: int, grain: int) -> str:
        return (
            self.machine.program.code[self.line[block, grain]].where
            if self.written[block, grain]
            else "never"
        )


def union(x: Any, y: Any) -> Any:
    """All that two vectors of ticks know; either may be shorter, or missing."""
    if x is None or y is None:
        return y if x is None else x
    size = max(x.size, y.size)
    return np.maximum(np.pad(x, (0, size - x.size)), np.pad(y, (0, size - y.size)))


def _is_bulk(statement: Instruction) -> bool:
    return statement.op == "cp" and "bulk" in statement.mods[:3]


def _is_shared(statement: Instruction) -> bool:
    if statement.op == "cp":
        return statement.mods[1:2] in (("ca",), ("cg",))
    return statement.op in ("ld", "st") and (
        any(mod.startswith("shared") for mod in statement.mods)
        or not any(mod.split("::")[0] in ("global", "param", "local", "const") for mod in statement.mods)
    )


def _access(statement: Instruction) -> int:
    """Bytes of a load, store or copy, at most 16."""
    if statement.op == "cp":
        size = statement.args[2]
        return integer(size.text) if isinstance(size, Immediate) else 4
    value = statement.args[0 if statement.op == "ld" else 1]
    return min(16, bytes_of(statement.mods[-1]) * (len(value.items) if isinstance(value, Vector) else 1))
