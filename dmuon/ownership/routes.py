"""How flat buffers travel between owners and everyone: publication and reduction, directly among all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Work(Protocol):
    """What is used of a ``torch.distributed.Work``."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


@dataclass(frozen=True, eq=False)
class Transfer:
    """An exchange under way. Holding it keeps its buffers alive, which the backends do not promise to do."""

    works: Sequence[Work]
    buffers: tuple[Tensor, ...]

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> Tensor:
        """The last buffer, once all has arrived (on CUDA: once the current stream will wait for it)."""
        for work in self.works:
            work.wait()
        return self.buffers[-1]


class Pending(Protocol):
    """A transfer by whatever route."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> Tensor: ...


class Routes(Protocol):
    """What buckets travel by. ``order``: the ranks in the order of their parts in a buffer."""

    rank: int
    size: int
    order: list[int]

    def publish(self, flat: Tensor, sizes: Sequence[int]) -> Pending: ...

    def reduce(self, packed: Tensor, sizes: Sequence[int]) -> Pending: ...

    def sum(self, value: Tensor) -> Tensor: ...


class FlatRoutes:
    """Direct exchange among all ranks of a 1-D mesh. Construction is collective.

    Publications and reductions have process groups of their own: neither is ever ordered against the other, nor
    against the collectives of FSDP.

    Args:
        mesh: one-dimensional.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        ranks = mesh.mesh.flatten().tolist()
        self._publishing, self._reducing = (dist.new_group(ranks) for _ in range(2))
        self.rank, self.size = dist.get_rank(self._publishing), len(ranks)
        self.order = list(range(self.size))
        # A group's first collective connects it; here all ranks get to it at once and in one order.
        for group in (self._publishing, self._reducing):
            dist.all_reduce(torch.zeros(1, device=mesh.device_type), group=group)

    def publish(self, flat: Tensor, sizes: Sequence[int]) -> Pending:
        """Fill ``flat`` on every rank: consecutive parts of ``sizes``, from the ranks of ``order``."""
        return send_parts(flat, sizes, self._publishing)

    def reduce(self, packed: Tensor, sizes: Sequence[int]) -> Pending:
        """Send the parts of ``packed`` to the ranks of ``order``; the result is (ranks, own size)."""
        return exchange(packed, sizes, self.rank, self._reducing)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over all ranks, in place."""
        dist.all_reduce(value, group=self._reducing)
        return value


def send_parts(flat: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Transfer:
    """Fill ``flat`` on every rank of ``group``: part k, of ``sizes[k]``, comes from rank k."""
    works = [
        dist.broadcast(flat[stop - size : stop], group_src=rank, group=group, async_op=True)
        for rank, (size, stop) in enumerate(zip(sizes, accumulate(sizes), strict=True))
        if size
    ]
    return Transfer(works, (flat,))


def exchange(packed: Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup) -> Transfer:
    """Send part k of ``packed`` to rank k of ``group``; the result is (ranks, own size): what each sent here."""
    received = packed.new_empty(len(sizes), sizes[rank])
    work = dist.all_to_all_single(
        received.view(-1),
        packed,
        output_split_sizes=[sizes[rank]] * len(sizes),
        input_split_sizes=list(sizes),
        group=group,
        async_op=True,
    )
    return Transfer([work], (packed, received))
