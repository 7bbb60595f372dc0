"""Publication and reduction over two levels: nodes, and the ranks in them.

Between nodes each matrix crosses once in each direction, whatever the number of ranks in a node: gradients are first
added up inside a node, and weights go first to one rank of each node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dmuon.ownership.routes import Pending, Transfer, exchange, send_parts


class TwoLevelRoutes:
    """Exchange among all ranks of a mesh of (replicate, shard): nodes by ranks. Construction is collective.

    Each direction has a group inside the node and one across nodes. The legs of one exchange follow each other in
    a worker thread per direction, on CUDA on a stream per direction, so that nobody waits between them.

    Args:
        mesh: of two dimensions, with ranks in ascending order.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._nodes, self._locals = mesh.shape
        self.rank, self.size = dist.get_rank(), mesh.size()
        self._node, self._local = divmod(self.rank, self._locals)
        # The buffer is ordered by the rank in the node, then by node: both legs then send contiguous parts.
        self.order = [i * self._locals + j for j in range(self._locals) for i in range(self._nodes)]
        grid = mesh.mesh.tolist()
        columns = [list(column) for column in zip(*grid, strict=True)]
        (self._publish_in, self._publish_across), (self._reduce_in, self._reduce_across) = (
            (_mine(grid, self.rank), _mine(columns, self.rank)) for _ in range(2)
        )
        for group in (self._publish_in, self._publish_across, self._reduce_in, self._reduce_across):
            dist.all_reduce(torch.zeros(1, device=mesh.device_type), group=group)
        chain = StreamChain if mesh.device_type == "cuda" else ThreadChain
        self._publications, self._reductions = chain(), chain()

    def publish(self, flat: Tensor, sizes: Sequence[int]) -> Pending:
        """Fill ``flat`` on every rank: consecutive parts of ``sizes``, from the ranks of ``order``."""
        by_local = self._by_local(sizes)
        mine = self._local_part(flat, by_local)

        def legs() -> Tensor:
            send_parts(mine, by_local[self._local], self._publish_across).wait()
            send_parts(flat, [sum(parts) for parts in by_local], self._publish_in).wait()
            return flat

        return self._publications.run(legs, (flat,))

    def reduce(self, packed: Tensor, sizes: Sequence[int]) -> Pending:
        """Send the parts of ``packed`` to the ranks of ``order``; the result is (nodes, own size), fp32 or wider."""
        by_local = self._by_local(sizes)
        wide = torch.promote_types(packed.dtype, torch.float32)

        def legs() -> Tensor:
            inside = exchange(packed, [sum(parts) for parts in by_local], self._local, self._reduce_in).wait()
            summed = inside.sum(0, dtype=wide)
            return exchange(summed, by_local[self._local], self._node, self._reduce_across).wait()

        return self._reductions.run(legs, (packed,))

    def sum(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over all ranks, in place."""
        dist.all_reduce(value, group=self._reduce_in)
        dist.all_reduce(value, group=self._reduce_across)
        return value

    def _by_local(self, sizes: Sequence[int]) -> list[list[int]]:
        """The sizes by rank in the node, then by node."""
        return [list(sizes[j * self._nodes : (j + 1) * self._nodes]) for j in range(self._locals)]

    def _local_part(self, flat: Tensor, by_local: list[list[int]]) -> Tensor:
        start = sum(map(sum, by_local[: self._local]))
        return flat[start : start + sum(by_local[self._local])]


@dataclass(frozen=True, eq=False)
class Chained:
    """Legs under way one after the other; as :class:`~dmuon.ownership.routes.Transfer`."""

    future: Future[Tensor]
    buffers: tuple[Tensor, ...]

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self.future.done()

    def wait(self) -> Tensor:
        """What the last leg brought."""
        return self.future.result()


class ThreadChain:
    """Runs legs one after the other, in the order in which they are handed in, beside the caller."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="dmuon")

    def run(self, legs: Callable[[], Tensor], buffers: tuple[Tensor, ...]) -> Chained:
        """Start ``legs``, which use ``buffers``."""
        return Chained(self._worker.submit(legs), buffers)


class StreamChain:
    """The same on a CUDA stream: the host only enqueues."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self, legs: Callable[[], Tensor], buffers: tuple[Tensor, ...]) -> Transfer:
        """Enqueue ``legs`` after what the current stream has been given so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = legs()
            event = self._stream.record_event()
        return Transfer([_Awaited(event)], (*buffers, result))


@dataclass(frozen=True)
class _Awaited:
    """An event with the methods of a dist.Work."""

    event: torch.cuda.Event

    def is_completed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def _mine(lists: list[list[int]], rank: int) -> dist.ProcessGroup:
    """Make a group of each list, on every rank; return the one with ``rank``."""
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in lists]
    return next(group for group, ranks in zip(groups, lists, strict=True) if rank in ranks)
