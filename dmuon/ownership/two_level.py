"""Publication and reduction over two levels: nodes, and the ranks in them.

Between nodes each matrix crosses once in each direction, whatever the number of ranks in a node: gradients are first
added up inside a node, and weights go first to one rank of each node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread, current_thread
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dmuon.ownership.exchange import Transfer
from dmuon.ownership.link_costs import GroupCosts
from dmuon.ownership.routes import LANES, Grid, Pending, exchanges
from dmuon.ownership.statistics import Statistics


class TwoLevelRoutes:
    """Exchange among all ranks of a mesh of (replicate, shard): nodes by ranks. Construction is collective.

    Reductions, and each lane of publications, have a group inside the node and one across nodes, and for each group a
    worker thread, on CUDA a stream: the two legs of an exchange follow each other without the host, and beside one
    exchange's second leg the next one's first is under way.

    Args:
        mesh: of two dimensions, with ranks in ascending order.
        costs: level ("intra", "inter") → what exchanges take, equal on all ranks; what is missing is assumed.
        lanes: how many pairs of groups publications have.
        timeout: of the groups' collectives; None for torch's default.
        grids: the ranks of this mesh and of those beside it that all processes are in; None for this one alone.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        costs: Mapping[str, GroupCosts] | None = None,
        lanes: int = LANES,
        timeout: timedelta | None = None,
        grids: Sequence[Grid] | None = None,
    ) -> None:
        self._nodes, self._locals = mesh.shape
        self.rank, self.size = dist.get_rank(), mesh.size()
        mine: Grid = mesh.mesh.tolist()
        # The buffer is ordered by the rank in the node, then by node: both legs then send contiguous parts.
        self.order = [rank for column in zip(*mine, strict=True) for rank in column]
        self._local = self.order.index(self.rank) // self._nodes
        rows = [row for grid in grids or [mine] for row in grid]
        columns = [list(column) for grid in grids or [mine] for column in zip(*grid, strict=True)]
        self.statistics = Statistics()
        made = exchanges(
            [rows, columns] * (1 + lanes),
            ["intra", "inter"] * (1 + lanes),
            mesh.device_type,
            costs or {},
            self.statistics,
            timeout,
        )
        self._reduce_in, self._reduce_across = made[:2]
        self._publish_in, self._publish_across = made[2::2], made[3::2]
        self.levels = {
            "intra": (self._publish_in[0], self._reduce_in),
            "inter": (self._publish_across[0], self._reduce_across),
        }
        self.lanes = lanes
        chain = StreamChain if mesh.device_type == "cuda" else ThreadChain
        self._publications, self._reductions = [chain(2) for _ in range(lanes)], chain(2)

    def publish(self, flat: Tensor, sizes: Sequence[int], lane: int = 0) -> Pending:
        """Fill ``flat`` on every rank: consecutive parts of ``sizes``, from the ranks of ``order``."""
        by_local = self._by_local(sizes)
        mine = self._local_part(flat, by_local)

        def across(flat: Tensor) -> Tensor:
            self._publish_across[lane].publish(mine, by_local[self._local]).wait()
            return flat

        def inside(flat: Tensor) -> Tensor:
            return self._publish_in[lane].publish(flat, [sum(parts) for parts in by_local]).wait()

        return self._publications[lane].run([across, inside], flat)

    def reduce(self, packed: Tensor, sizes: Sequence[int]) -> Pending:
        """Send the parts of ``packed`` to the ranks of ``order``; the result's rows, (any, own size), add up."""
        by_local = self._by_local(sizes)
        wide = torch.promote_types(packed.dtype, torch.float32)

        def inside(packed: Tensor) -> Tensor:
            rows = self._reduce_in.reduce(packed, [sum(parts) for parts in by_local]).wait()
            return rows.sum(0, dtype=wide)

        def across(summed: Tensor) -> Tensor:
            return self._reduce_across.reduce(summed, by_local[self._local]).wait()

        return self._reductions.run([inside, across], packed)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over all ranks, in place."""
        for exchange in (self._reduce_in, self._reduce_across):
            dist.all_reduce(value, group=exchange.group)
        return value

    def _by_local(self, sizes: Sequence[int]) -> list[list[int]]:
        """The sizes by rank in the node, then by node."""
        return [list(sizes[j * self._nodes : (j + 1) * self._nodes]) for j in range(self._locals)]

    def _local_part(self, flat: Tensor, by_local: list[list[int]]) -> Tensor:
        start = sum(map(sum, by_local[: self._local]))
        return flat[start : start + sum(by_local[self._local])]


Leg = Callable[[Tensor], Tensor]
"""A part of an exchange: takes what the one before it brought."""


@dataclass(frozen=True, eq=False)
class Chained:
    """Legs under way one after the other; as :class:`~dmuon.ownership.exchange.Transfer`."""

    future: Future[Tensor]

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self.future.done()

    def wait(self) -> Tensor:
        """What the last leg brought."""
        return self.future.result()


class ThreadChain:
    """Runs exchanges of several legs beside the caller: the legs of each one after the other, and each leg in the
    order in which the exchanges are handed in, while others' further legs are under way.

    Once a leg has failed, the same one of all later exchanges does: it would meet other ranks' earlier ones.

    Args:
        legs: how many each exchange has.
    """

    def __init__(self, legs: int) -> None:
        self._queues: list[SimpleQueue[_Entry | None]] = [SimpleQueue() for _ in range(legs)]
        # Daemons: a process whose main thread fails must end, so that its peers notice, whatever a leg waits for.
        threads = [Thread(target=_serve, args=(queue,), name="dmuon", daemon=True) for queue in self._queues]
        for thread in threads:
            thread.start()
        finalize(self, _stop, self._queues, threads)

    def run(self, legs: Sequence[Leg], start: Tensor) -> Chained:
        """Start ``legs``, the first of them on ``start``."""
        future: Future[Tensor] = Future()
        future.set_result(start)
        for queue, leg in zip(self._queues, legs, strict=True):
            before, future = future, Future()
            queue.put((leg, before, future))
        return Chained(future)


_Entry = tuple[Leg, "Future[Tensor]", "Future[Tensor]"]


def _serve(queue: SimpleQueue[_Entry | None]) -> None:
    """Run one leg of all exchanges."""
    failure: BaseException | None = None
    while (entry := queue.get()) is not None:
        leg, before, after = entry
        try:
            if failure is not None:
                raise RuntimeError(f"an earlier exchange has failed: {failure}") from failure
            after.set_result(leg(before.result()))
        except BaseException as error:
            failure = failure or error
            after.set_exception(error)
        # Do not keep buffers until the next exchange comes.
        del entry, leg, before, after


def _stop(queues: Sequence[SimpleQueue[_Entry | None]], threads: Sequence[Thread]) -> None:
    """Also at exit: legs under way get a moment, for a thread that wakes up in a dying interpreter aborts it."""
    for queue in queues:
        queue.put(None)
    for thread in threads:
        if thread is not current_thread():
            thread.join(timeout=5.0 / len(threads))


class StreamChain:
    """The same on CUDA streams, one for each leg: the host only enqueues.

    Args:
        legs: how many each exchange has.
    """

    def __init__(self, legs: int) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(legs)]  # type: ignore[no-untyped-call]

    def run(self, legs: Sequence[Leg], start: Tensor) -> Transfer:
        """Enqueue ``legs`` after what the current stream has been given so far, the first of them on ``start``."""
        buffers, before = [start], torch.cuda.current_stream().record_event()
        for stream, leg in zip(self._streams, legs, strict=True):
            # What a leg allocates may be memory that the current stream has just given back.
            stream.wait_stream(torch.cuda.current_stream())
            stream.wait_event(before)
            with torch.cuda.stream(stream):
                buffers.append(leg(buffers[-1]))
                before = stream.record_event()
        return Transfer([_Awaited(before)], tuple(buffers))


@dataclass(frozen=True)
class _Awaited:
    """An event with the methods of a dist.Work."""

    event: torch.cuda.Event

    def is_completed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)
