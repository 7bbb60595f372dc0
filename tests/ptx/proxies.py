"""Which shared memory the generic proxy has written without a ``fence.proxy.async`` since."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.memory import Shared
from ptx.table import Mask

if TYPE_CHECKING:
    from ptx.machine import Machine

_GRAIN = 4


class ProxyTracker:
    """Ordinary writes to shared memory that asynchronous copies and wgmma could not see yet.

    A write is visible after a fence by a thread of the warp that wrote, or by any thread that comes after it through
    barriers. Four bytes are the unit: of two warps that write halves of one, the later counts.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        code = machine.program.code
        self.active = any(
            statement.op == "wgmma" or (statement.op == "cp" and "bulk" in statement.mods[:3])
            for statement in code
        )
        if self.active:
            self.writer = np.zeros((machine.blocks, machine.shared.data.shape[1] // _GRAIN), np.int16)
            self.tick = np.zeros(self.writer.shape, np.int32)
        self.clean = True

    def reset(self) -> None:
        if self.active:
            self.writer[:] = 0
            # clock[w, v]: the last tick of warp v that warp w knows to be over.
            self.clock = np.zeros((self.machine.warps, self.machine.warps), np.int32)
            self.now = np.ones(self.machine.warps, np.int32)
            np.fill_diagonal(self.clock, 1)
        self.clean = True

    def wrote(self, blocks: Any, offsets: Any, size: int, lanes: Any) -> None:
        """Ordinary stores by ``lanes`` at byte ``offsets``."""
        if not self.active:
            return
        warps = self.machine.warp[lanes]
        grains = offsets // _GRAIN
        for step in range(max(1, size // _GRAIN)):
            self.writer[blocks, grains + step] = warps + 1
            self.tick[blocks, grains + step] = self.now[warps]
        self.clean = False

    def synchronised(self, warps: Any) -> None:
        """``warps`` have met at a barrier."""
        if self.active:
            self.clock[warps] = self.clock[warps].max(0)
            self.release(warps)

    def release(self, warps: Any) -> None:
        """``warps`` published what they did; later writes belong to a new tick."""
        self.now[warps] += 1
        self.clock[warps, warps] = self.now[warps]

    def known(self, warps: Any) -> Any:
        """What ``warps`` know together."""
        return self.clock[warps].max(0)

    def learn(self, warps: Any, known: Any) -> None:
        """``warps`` come after everything in ``known``."""
        self.clock[warps] = np.maximum(self.clock[warps], known)

    def fence(self, mask: Mask) -> None:
        """A ``fence.proxy.async`` by the threads of ``mask``."""
        if not self.active or self.clean:
            return
        machine = self.machine
        warps = np.arange(machine.warps) if mask is True else np.unique(machine.warp[mask])
        known = self.known(warps)
        blocks, grains = self.writer.nonzero()
        seen = self.tick[blocks, grains] <= known[self.writer[blocks, grains] - 1]
        self.writer[blocks[seen], grains[seen]] = 0
        self.clean = bool(seen.all())

    def check(self, block: Any, offsets: Any, size: int, what: str) -> None:
        """Raise if any of ``size`` bytes at each of ``offsets`` of a block is not visible to the async proxy."""
        if self.clean:
            return
        grains = offsets // _GRAIN
        for step in range(max(1, size // _GRAIN)):
            dirty = self.writer[block, grains + step]
            if np.count_nonzero(dirty):
                place = int(np.ravel(offsets)[np.ravel(dirty).argmax()])
                raise RuntimeError(
                    f"{what} reads shared address {place:#x}, which warp {int(np.max(dirty)) - 1} wrote "
                    "without a fence.proxy.async since"
                )


__all__ = ["ProxyTracker", "Shared"]
