"""Loads and stores of any state space, for some of the threads at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx.history import History
from ptx.memory import Shared
from ptx.operands import WINDOW, Operands
from ptx.owners import Who, everyone
from ptx.syntax import Instruction
from ptx.types import UNSIGNED, Array

OFFSET = (1 << WINDOW) - 1
"""The bits of a generic address that are an address in its window."""


class Spaces(Operands):
    """The memory that a program's threads see. Threads are named by an index into the axis of all, ``lanes``."""

    history: History

    def shared_places(
        self, addresses: NDArray[np.int64], lanes: Any, size: int, what: str
    ) -> tuple[Any, Any]:
        """Shared addresses (of any block of the threads' clusters) as (blocks, places in items)."""
        ranks = addresses >> Shared.RANK_SHIFT
        if self.shape.cluster_blocks == 1:
            if np.count_nonzero(ranks):
                raise IndexError(f"{what} at {int(addresses[ranks != 0][0]):#x}, which is no shared address")
            return self.block[lanes], self.shared.places(addresses, size, what)
        if int(ranks.max()) >= self.shape.cluster_blocks or int(ranks.min()) < 0:
            raise IndexError(
                f"{what} at {int(addresses[ranks.argmax()]):#x}, which is no shared address of the cluster"
            )
        offsets = addresses & ((1 << Shared.RANK_SHIFT) - 1)
        return self.cluster_first[lanes] + ranks, self.shared.places(offsets, size, what)

    def load(self, space: str, addresses: NDArray[np.int64], lanes: Any, size: int, what: str) -> Any:
        """Items of ``size`` bytes, one for each thread of ``lanes``."""
        if space == "shared":
            blocks, places = self.shared_places(addresses, lanes, size, what)
            if not _atomic(what):
                self.history.read(blocks, places * size, size, lanes)
            return self.shared.views[size][blocks, places]
        if space in ("global", "const"):
            return self.memory.load(addresses, size, what, self._who(lanes, what))
        if space == "local":
            places = self.local.places(addresses & 0xFFFFFFFF, size, what)
            return self.local.views[size][np.arange(self.threads)[lanes], places]
        if space == "param":
            return np.frombuffer(self.params, np.uint8)[(addresses & OFFSET)[:, None] + np.arange(size)].view(
                UNSIGNED[size]
            )[:, 0]
        return self._by_window(addresses, lanes, lambda s, a, k, part: self.load(s, a, k, size, what))

    def store(
        self, space: str, addresses: NDArray[np.int64], lanes: Any, values: Array, size: int, what: str
    ) -> None:
        """Writes items of ``size`` bytes, one for each thread of ``lanes``."""
        if space == "shared":
            blocks, places = self.shared_places(addresses, lanes, size, what)
            self.shared.views[size][blocks, places] = values
            if not _atomic(what):
                self.history.write(blocks, places * size, size, lanes)
        elif space == "global":
            self.memory.store(addresses, values, size, what, self._who(lanes, what))
        elif space == "local":
            places = self.local.places(addresses & 0xFFFFFFFF, size, what)
            self.local.views[size][np.arange(self.threads)[lanes], places] = values
        elif space == "generic":
            self._by_window(
                addresses, lanes, lambda s, a, k, part: self.store(s, a, k, values[part], size, what)
            )
        else:
            raise NotImplementedError(f"stores to {space}")

    def _who(self, lanes: Any, what: str) -> Who | None:
        """Who accesses global memory; atomics go unwatched."""
        return None if _atomic(what) else self.who(lanes)

    def who(self, lanes: Any) -> Who:
        """Threads in the eyes of those who watch global memory."""
        history = self.history
        return everyone(self.cluster_number[lanes], self.warp[lanes], history.now, history.known)

    def _by_window(self, addresses: NDArray[np.int64], lanes: Any, access: Any) -> Any:
        """``access`` for each window that the generic ``addresses`` lie in."""
        windows = addresses >> WINDOW
        names = ("global", "shared", "local", "param")
        first = int(windows[0])
        if (windows == first).all():
            return access(names[first], addresses & OFFSET, lanes, slice(None))
        index, result = np.arange(self.threads)[lanes], None
        for window in np.unique(windows).tolist():
            (part,) = (windows == window).nonzero()
            values = access(names[window], addresses[part] & OFFSET, index[part], part)
            if values is not None:
                result = np.empty(addresses.size, values.dtype) if result is None else result
                result[part] = values
        return result


def _atomic(what: str) -> bool:
    """Whether an access, by its name, is an atomic: those race with each other lawfully."""
    return what.startswith(("atom", "red"))


def space_of(statement: Instruction) -> str:
    """Which state space a load or store names; ``"generic"`` for none."""
    for mod in statement.mods:
        space = mod.split("::")[0]
        if space in ("shared", "global", "local", "param", "const"):
            return space
    return "generic"
