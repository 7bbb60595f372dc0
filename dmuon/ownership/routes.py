"""How flat buffers travel between owners and everyone: publication and reduction on one level of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Transfer:
    """An exchange under way. Holding it keeps its buffers alive, which the backends do not promise to do."""

    works: Sequence[dist.Work]
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
        # A group's first collective connects it; here all ranks get to it at once and in one order.
        for group in (self._publishing, self._reducing):
            dist.all_reduce(torch.zeros(1, device=mesh.device_type), group=group)

    def publish(self, flat: Tensor, sizes: Sequence[int]) -> Transfer:
        """Fill ``flat`` on every rank: consecutive parts of ``sizes``, each from the rank of its position."""
        stops = accumulate(sizes)
        works = [
            dist.broadcast(flat[stop - size : stop], group_src=rank, group=self._publishing, async_op=True)
            for rank, (size, stop) in enumerate(zip(sizes, stops, strict=True))
            if size
        ]
        return Transfer(works, (flat,))

    def reduce(self, packed: Tensor, sizes: Sequence[int]) -> Transfer:
        """Send part k of ``packed`` to rank k; the result is (ranks, own size): what each rank sent here."""
        received = packed.new_empty(self.size, sizes[self.rank])
        work = dist.all_to_all_single(
            received.view(-1),
            packed,
            output_split_sizes=[sizes[self.rank]] * self.size,
            input_split_sizes=list(sizes),
            group=self._reducing,
            async_op=True,
        )
        return Transfer([work], (packed, received))

    def sum(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over all ranks, in place."""
        dist.all_reduce(value, group=self._reducing)
        return value
