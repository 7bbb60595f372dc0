"""How flat buffers travel between owners and everyone: publication and reduction, directly among all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dmuon.ownership.exchange import Exchange
from dmuon.ownership.link_costs import GroupCosts, assumed_costs
from dmuon.ownership.statistics import Statistics

LANES = 2
"""Process groups that publications take turns in: what waits for a slow owner holds up its own lane only.

Each is a communicator, and on a GPU a waiting transfer occupies multiprocessors; so few.
"""


Grid = list[list[int]]
"""The ranks of a mesh, as (replicate, shard); one row where it has one dimension."""


class Pending(Protocol):
    """A transfer by whatever route."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> Tensor: ...


class Routes(Protocol):
    """What buckets travel by.

    Attributes:
        rank: this one's, of all processes.
        size: how many ranks take part.
        order: these ranks in the order of their parts in a buffer.
        statistics: what has been moved.
        levels: name → where publications, of the first lane, and where reductions are exchanged.
        lanes: how many publications can be under way without any order between them.
    """

    rank: int
    size: int
    order: list[int]
    statistics: Statistics
    levels: dict[str, tuple[Exchange, Exchange]]
    lanes: int

    def publish(self, flat: Tensor, sizes: Sequence[int], lane: int = 0) -> Pending: ...

    def reduce(self, packed: Tensor, sizes: Sequence[int]) -> Pending: ...

    def sum(self, value: Tensor) -> Tensor: ...


class FlatRoutes:
    """Direct exchange among all ranks of a 1-D mesh. Construction is collective.

    Publications and reductions have process groups of their own: neither is ever ordered against the other, nor
    against the collectives of FSDP.

    Args:
        mesh: one-dimensional.
        costs: level ("flat") → what exchanges take, equal on all ranks; what is missing is assumed.
        lanes: how many groups publications have.
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
        self.order = mesh.mesh.tolist()
        self.statistics = Statistics()
        rows = [row for grid in grids or [[self.order]] for row in grid]
        self._reducing, *self._publishing = exchanges(
            [rows] * (1 + lanes),
            ["flat"] * (1 + lanes),
            mesh.device_type,
            costs or {},
            self.statistics,
            timeout,
        )
        self.levels, self.lanes = {"flat": (self._publishing[0], self._reducing)}, lanes
        self.rank, self.size = dist.get_rank(), self._reducing.size

    def publish(self, flat: Tensor, sizes: Sequence[int], lane: int = 0) -> Pending:
        """Fill ``flat`` on every rank: consecutive parts of ``sizes``, from the ranks of ``order``."""
        return self._publishing[lane].publish(flat, sizes)

    def reduce(self, packed: Tensor, sizes: Sequence[int]) -> Pending:
        """Send the parts of ``packed`` to the ranks of ``order``; the result's rows, (any, own size), add up."""
        return self._reducing.reduce(packed, sizes)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over all ranks, in place."""
        dist.all_reduce(value, group=self._reducing.group)
        return value


def exchanges(
    partitions: Sequence[Sequence[list[int]]],
    levels: Sequence[str],
    device_type: str,
    costs: Mapping[str, GroupCosts],
    statistics: Statistics,
    timeout: timedelta | None = None,
) -> list[Exchange]:
    """New process groups of this rank: one in each of ``partitions`` of all ranks into lists. Collective."""
    made = []
    for lists, level in zip(partitions, levels, strict=True):
        # Every rank takes part in making every group.
        groups: list[dist.ProcessGroup] = [dist.new_group(ranks, timeout) for ranks in lists]
        (group,) = (g for g, ranks in zip(groups, lists, strict=True) if dist.get_rank() in ranks)
        made.append(Exchange(group, level, costs.get(level) or assumed_costs(device_type), statistics))
    # A group's first collective connects it; here all ranks get to it at once and in one order.
    for exchange in made:
        dist.all_reduce(torch.zeros(1, device=device_type), group=exchange.group)
    return made
