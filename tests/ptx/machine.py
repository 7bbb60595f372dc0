"""The state of the resident blocks: what each thread does, barriers, asynchronous work, and the closures to run."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmuon.kernels.gpu.binary import TensorMap
from ptx.fusion import fuse
from ptx.history import History
from ptx.layout import WARP, Shape
from ptx.memory import Memory
from ptx.report import Report
from ptx.spaces import Spaces
from ptx.syntax import Program
from ptx.table import DONE, HELD, RUNNING, Closure, Mask, close


class Machine(Spaces):
    """Some clusters of a grid, resident together.

    The arrays that closures hold stay the same objects for the life of a machine; :meth:`start` fills them anew for
    other clusters.

    Args:
        program, shape, grid, dynamic, memory, params, offsets: see :class:`ptx.operands.Operands`.
        tensor_maps: by offset in the parameter buffer.
        rng: for random scheduling; lockstep if ``None``.
        late: whether asynchronous work is late (early); as ``rng`` has it if ``None``.
        races: whether to look for them.
        report: to count in.
    """

    def __init__(
        self,
        program: Program,
        shape: Shape,
        grid: tuple[int, int, int],
        dynamic: int,
        memory: Memory,
        params: bytes,
        offsets: dict[str, int],
        tensor_maps: dict[int, TensorMap],
        rng: np.random.Generator | None,
        late: bool | None,
        races: bool,
        report: Report,
    ) -> None:
        super().__init__(program, shape, grid, dynamic, memory, params, offsets)
        self.tensor_maps, self.rng, self.late, self.report = tensor_maps, rng, late, report
        self.pc = np.zeros(self.threads, np.int64)
        self.state = np.zeros(self.threads, np.uint8)
        self.index = 0
        self.counts = [0] * len(program.code)
        self._together: dict[int, Mask] = {}
        # Named barriers of each block: threads that have arrived, and threads that wait at which.
        self.arrived = np.zeros((self.blocks, 16), np.int64)
        self.expected = np.zeros((self.blocks, 16), np.int64)
        self.barrier = np.full(self.threads, -1, np.int64)
        self.cluster_arrived = np.zeros(self.threads, np.bool_)
        self.cluster_passed = np.zeros(self.threads, np.bool_)
        # What the threads that arrived at a barrier had done; for a cluster's, also of the last one that is over.
        self.barrier_known: dict[int, Any] = {}
        self.cluster_known: dict[int, Any] = {}
        self.cluster_over: dict[int, Any] = {}
        self.history = History(self, races)
        self.units: dict[str, Any] = {}
        self.code: list[Closure] = [close(self, statement) for statement in program.code]
        fuse(self)

    def start(self, clusters: list[tuple[int, int, int]]) -> None:
        """Puts ``clusters`` (indices in x, y, z) in place; slots beyond them stay empty."""
        self.place(clusters, self.specials)
        self.pc[:] = 0
        self.state[:] = RUNNING
        self.state[(self.thread >= self.shape.block_threads) | (self.cluster >= len(clusters))] = DONE
        self.arrived[:] = 0
        self.barrier[:] = -1
        self.cluster_arrived[:] = False
        self.cluster_passed[:] = False
        for known in (self.barrier_known, self.cluster_known, self.cluster_over):
            known.clear()
        self.poison()
        self.shared.reset()
        self.local.reset()
        self.history.reset()
        for unit in self.units.values():
            unit.reset()

    def unit(self, kind: type[Any]) -> Any:
        """The machine's only object of ``kind``: an engine for asynchronous work, made when first needed."""
        if kind.__name__ not in self.units:
            self.units[kind.__name__] = kind(self)
        return self.units[kind.__name__]

    def postponed(self) -> bool:
        """Whether a piece of asynchronous work just issued is to be done as late as possible, rather than now."""
        if self.late is not None or self.rng is None:
            return self.late is not False
        return bool(self.rng.random() < 0.5)

    def whole_warps(self, mask: Mask) -> bool:
        """Whether every warp of the mask takes part with all of its threads that have not exited."""
        if mask is True:
            return True
        warps = mask.reshape(-1, WARP)
        live = (self.state != DONE).reshape(-1, WARP)
        return not (warps.any(1)[:, None] & live & ~warps).any()

    def gather(self, mask: Mask, index: int, width: int, following: int, members: Any = None) -> Mask | None:
        """Threads that can run a collective statement together: those of the mask, and those held there before.

        Args:
            mask: who arrives now.
            index: the statement.
            width: threads that must take part together: a warp, or a warpgroup.
            following: the statement after it.
            members: who must take part, one bool for each thread; everyone who has not exited if ``None``.

        Returns:
            The mask to run; ``None`` if nobody can yet. Then, and if only some can, the others are held, and all
            program counters are set: the closure must return MOVED.
        """
        if mask is True or (members is None and self._together.get(width) is mask):
            return mask
        needed = self.state != DONE
        if members is not None:
            needed &= members
        here = mask | ((self.state == HELD) & (self.pc == index))
        groups = here.reshape(-1, width)
        complete = groups.any(1) & ~(needed.reshape(-1, width) & ~groups).any(1)
        ready = np.repeat(complete, width) & here
        if np.array_equal(ready, mask):
            if members is None:
                # Threads only ever leave a group by exiting: what is whole stays whole.
                self._together[width] = mask
            return mask
        waiting = mask & ~ready
        self.state[waiting] = HELD
        self.pc[waiting] = index
        if not ready.any():
            return None
        self.state[ready] = RUNNING
        self.pc[ready] = following
        return ready
