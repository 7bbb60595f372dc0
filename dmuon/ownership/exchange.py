"""Parts of flat buffers from each rank of a group to all, and sums of them to each: every way there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from dmuon.ownership.link_costs import GroupCosts, publication_loads, quickest, summed_loads
from dmuon.ownership.statistics import Statistics


class Work(Protocol):
    """What is used of a ``torch.distributed.Work``."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


@dataclass(frozen=True, eq=False)
class Transfer:
    """An exchange under way. Holding it keeps its buffers alive, which the backends do not promise to do."""

    works: Sequence[Work]
    buffers: tuple[Tensor, ...]
    unpack: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> Tensor:
        """The last buffer, once all has arrived (on CUDA: once the current stream will wait for it)."""
        for work in self.works:
            work.wait()
        if self.unpack is not None:
            self.unpack()
        return self.buffers[-1]


class Exchange:
    """Publication and reduction within one process group, each by the way that takes least for its sizes.

    All ranks have to call the same in the same order, with equal ``sizes`` and costs.

    Args:
        group: of the ranks that take part; rank k has, or gets, part k.
        level: its name in the statistics.
        costs: of the ways there are; what has none is not used.
        statistics: counts what is moved.
    """

    def __init__(
        self, group: dist.ProcessGroup, level: str, costs: GroupCosts, statistics: Statistics
    ) -> None:
        self.group, self.level, self.costs = group, level, costs
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.statistics = statistics

    def publish(self, flat: Tensor, sizes: Sequence[int], way: str | None = None) -> Transfer:
        """Fill ``flat`` on every rank: part k, of ``sizes[k]`` elements, comes from rank k.

        Args:
            flat: contiguous, of one dimension.
            sizes: of all parts.
            way: broadcast, all_gather or all_to_all; None for what takes least.
        """
        if self.size == 1 or not flat.numel():
            return Transfer((), (flat,))
        way = way or quickest(publication_loads(_nbytes(flat, sizes)), self.costs.publish)
        self._count("publish", way, flat, sizes)
        with record_function("dmuon::publish"):
            return _PUBLICATIONS[way](flat, sizes, self.rank, self.group)

    def reduce(self, packed: Tensor, sizes: Sequence[int], way: str | None = None) -> Transfer:
        """Send part k of ``packed``, of ``sizes[k]`` elements, to rank k.

        The result is (any, own size): its rows add up to the sum over the ranks. What is narrower than fp32 is sent as
        it is, one row from each rank, or widened and then added up on the way, as takes least: sums are never rounded
        to less. ``packed`` may be overwritten.

        Args:
            packed: contiguous, of one dimension.
            sizes: of all parts.
            way: all_to_all, reduce or reduce_scatter; None for what takes least.
        """
        if self.size == 1 or not packed.numel():
            return Transfer((), (packed.view(1, packed.numel()),))
        wide = torch.promote_types(packed.dtype, torch.float32)
        way = way or quickest(summed_loads(sizes, packed.itemsize, wide.itemsize), self.costs.reduce)
        if way != "all_to_all":
            packed = packed.to(wide)
        self._count("reduce", way, packed, sizes)
        with record_function("dmuon::reduce"):
            return _REDUCTIONS[way](packed, sizes, self.rank, self.group)

    def all_to_all(
        self, kind: str, received: Tensor, from_each: Sequence[int], sent: Tensor, to_each: Sequence[int]
    ) -> Transfer:
        """Send ``to_each`` rank so many elements of ``sent``, and bring so many ``from_each`` to ``received``.

        Args:
            kind: its name in the statistics.
            received: contiguous, of one dimension; as ``sent``.
            from_each: by rank.
            sent: what is here.
            to_each: by rank.
        """
        if self.size == 1:
            return Transfer((), (sent,))
        nbytes = (sent.numel() - to_each[self.rank]) * sent.element_size()
        self.statistics.exchanged(kind, "all_to_all", self.level, nbytes)
        with record_function(f"dmuon::{kind}"):
            return _pairs(received, from_each, sent, to_each, self.group)

    def _count(self, kind: str, way: str, flat: Tensor, sizes: Sequence[int]) -> None:
        padded = way in ("all_gather", "reduce_scatter")
        others = max(sizes) * (self.size - 1) if padded else sum(sizes) - sizes[self.rank]
        self.statistics.exchanged(kind, way, self.level, others * flat.element_size())


def _nbytes(flat: Tensor, sizes: Sequence[int]) -> list[int]:
    return [size * flat.element_size() for size in sizes]


def _broadcast(flat: Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup) -> Transfer:
    works = [
        dist.broadcast(part, group_src=source, group=group, async_op=True)
        for source, part in enumerate(torch.split(flat, list(sizes)))
        if part.numel()
    ]
    return Transfer(works, (flat,))


def _all_gather(flat: Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup) -> Transfer:
    parts, largest = torch.split(flat, list(sizes)), max(sizes)
    if min(sizes) == largest:
        return Transfer([_all_gather_single(flat, parts[rank], group=group, async_op=True)], (flat,))
    padded = flat.new_empty(len(sizes), largest)
    padded[rank, : sizes[rank]] = parts[rank]
    work = _all_gather_single(padded.view(-1), padded[rank], group=group, async_op=True)

    def unpack() -> None:
        for source, part in enumerate(parts):
            if source != rank:
                part.copy_(padded[source, : part.numel()])

    return Transfer([work], (padded, flat), unpack)


def _all_to_all(flat: Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup) -> Transfer:
    # Copies for all: a list of one and the same tensor is not taken by every backend.
    copies = torch.split(flat, list(sizes))[rank].repeat(len(sizes))
    return _pairs(flat, sizes, copies, [sizes[rank]] * len(sizes), group)


def _exchange(packed: Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup) -> Transfer:
    received = packed.new_empty(len(sizes), sizes[rank])
    return _pairs(received, [sizes[rank]] * len(sizes), packed, sizes, group)


def _reduce(packed: Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup) -> Transfer:
    parts = torch.split(packed, list(sizes))
    works = [
        dist.reduce(part, group_dst=target, group=group, async_op=True)
        for target, part in enumerate(parts)
        if part.numel()
    ]
    return Transfer(works, (packed, parts[rank].view(1, sizes[rank])))


def _reduce_scatter(packed: Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup) -> Transfer:
    largest, sent = max(sizes), packed
    if min(sizes) < largest:
        sent = packed.new_empty(len(sizes), largest)
        for row, part in zip(sent, torch.split(packed, list(sizes)), strict=True):
            row[: part.numel()] = part
            row[part.numel() :] = 0
    received = packed.new_empty(largest)
    work = _reduce_scatter_single(received, sent.view(-1), group=group, async_op=True)
    return Transfer([work], (sent, received[: sizes[rank]].view(1, sizes[rank])))


def _pairs(
    received: Tensor, from_each: Sequence[int], sent: Tensor, to_each: Sequence[int], group: dist.ProcessGroup
) -> Transfer:
    """Every rank to every rank."""
    splits = {"output_split_sizes": list(from_each), "input_split_sizes": list(to_each)}
    work = dist.all_to_all_single(received.view(-1), sent, **splits, group=group, async_op=True)
    return Transfer([work], (sent, received))


# torch renamed them in 2.13 and warns of the old names.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

_PUBLICATIONS = {"broadcast": _broadcast, "all_gather": _all_gather, "all_to_all": _all_to_all}
_REDUCTIONS = {"all_to_all": _exchange, "reduce": _reduce, "reduce_scatter": _reduce_scatter}
