"""Seconds of collectives on a network of two levels, by the latency and bandwidth of each level.

Between one rank and the next a ring takes one hop, as NCCL counts them. What all ranks of several nodes pass around
crosses between nodes by all adapters of a node at once; what one rank sends to another goes by its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dmuon.ownership.link_costs import GroupCosts, LinkCosts, publication_loads, summed_loads
from dmuon.simulator.machines import Cluster, Machine

INSIDE, ACROSS = "links in nodes", "links across nodes"
WIDE = 4
"""Bytes of an element as gradients are summed."""


@dataclass(frozen=True)
class Leg:
    """``seconds`` for which ``lanes`` are busy; ``way``: by which collective."""

    seconds: float
    lanes: tuple[str, ...]
    way: str


@dataclass(frozen=True)
class Group:
    """``size`` ranks that exchange over ``lanes``.

    Args:
        size: how many.
        lanes: what they keep busy.
        costs: of each way, by calls and bytes.
        around: seconds of one turn around the ring of all ranks.
        between: seconds that messages of every rank to every other are under way.
    """

    size: int
    lanes: tuple[str, ...]
    costs: GroupCosts
    around: float = 0.0
    between: float = 0.0

    def all_gather(self, nbytes: float) -> Leg:
        """Equal shards of ``nbytes`` in all, to everyone."""
        return self._evenly(self.costs.publish, "all_gather", nbytes)

    def reduce_scatter(self, nbytes: float) -> Leg:
        """``nbytes`` of everyone, summed, a shard to each."""
        return self._evenly(self.costs.reduce, "reduce_scatter", nbytes)

    def all_reduce(self, nbytes: float) -> Leg:
        """``nbytes`` of everyone, summed, to everyone."""
        seconds = self.reduce_scatter(nbytes).seconds + self.all_gather(nbytes).seconds
        return Leg(seconds, self.lanes, "all_reduce")

    def all_to_all(self, nbytes: float) -> Leg:
        """Everyone sends ``nbytes`` in all, as much to each."""
        return self._evenly(self.costs.reduce, "all_to_all", nbytes)

    def publish(self, sizes: Sequence[int]) -> Leg:
        """Rank k's ``sizes[k]`` bytes to everyone, by what takes least."""
        return self._quickest(self.costs.publish, publication_loads(sizes))

    def reduce(self, elements: Sequence[int], itemsize: int) -> Leg:
        """Everyone's ``elements[k]`` to rank k, by what takes least: in ``itemsize`` bytes as they are or, where
        partial sums travel, in the four that those need."""
        return self._quickest(self.costs.reduce, summed_loads(elements, itemsize, WIDE))

    def _evenly(self, costs: Mapping[str, LinkCosts], way: str, nbytes: float) -> Leg:
        return self._leg(costs, way, 1, int(nbytes * (self.size - 1) / self.size))

    def _quickest(self, costs: Mapping[str, LinkCosts], loads: Mapping[str, tuple[int, int]]) -> Leg:
        legs = [self._leg(costs, way, *load) for way, load in loads.items() if way in costs]
        return min(legs, key=lambda leg: leg.seconds)

    def _leg(self, costs: Mapping[str, LinkCosts], way: str, calls: int, nbytes: int) -> Leg:
        if self.size == 1 or not calls:
            return Leg(0.0, self.lanes, way)
        # Calls from one rank after the other follow each other around the ring: together they take two turns.
        latency = self.between if way == "all_to_all" else self.around * min(calls, 2)
        return Leg(latency + costs[way].seconds(calls, nbytes), self.lanes, way)


class Network:
    """The collectives of a training step on ``cluster``.

    Args:
        cluster: where.
        hybrid: FSDP shards inside nodes and replicates across them; owners are then reached over two levels.
        itemsize: bytes of a published element, and of a gradient that goes as it is.
        measured: the costs among all ranks, if they are known; for use without ``hybrid``.
    """

    def __init__(
        self, cluster: Cluster, hybrid: bool = False, itemsize: int = 2, measured: GroupCosts | None = None
    ) -> None:
        self.cluster, self.itemsize, machine = cluster, itemsize, cluster.machine
        self.hybrid = hybrid
        local, nodes = cluster.node_ranks, cluster.nodes
        lanes = (INSIDE, ACROSS) if nodes > 1 else (INSIDE,)
        self._all = (
            Group(cluster.ranks, lanes, measured) if measured else group_of(machine, nodes, local, lanes)
        )
        self._node = group_of(machine, 1, local, (INSIDE,))
        self._column = group_of(machine, nodes, 1, (ACROSS,))

    @property
    def shards(self) -> int:
        """Among how many ranks FSDP shards a parameter."""
        return self.cluster.node_ranks if self.hybrid else self.cluster.ranks

    def gather(self, elements: float) -> list[Leg]:
        """FSDP's all-gather."""
        return [(self._node if self.hybrid else self._all).all_gather(elements * self.itemsize)]

    def reduce(self, elements: float) -> list[Leg]:
        """FSDP's reduction in fp32: scattered and, between replicas, summed everywhere."""
        if not self.hybrid:
            return [self._all.reduce_scatter(elements * WIDE)]
        across = self._column.all_reduce(elements * WIDE / self._node.size)
        return [self._node.reduce_scatter(elements * WIDE), across]

    def publish(self, elements: Mapping[int, int]) -> list[Leg]:
        """Owners' weights to all ranks; ``elements`` by owner."""
        sizes = [elements.get(rank, 0) * self.itemsize for rank in range(self.cluster.ranks)]
        if not self.hybrid:
            return [self._all.publish(sizes)]
        columns = self._columns(sizes)
        return [_slowest(map(self._column.publish, columns)), self._node.publish(list(map(sum, columns)))]

    def to_owners(self, elements: Mapping[int, int]) -> list[Leg]:
        """All ranks' gradients to the owners, summed in fp32; ``elements`` by owner."""
        counts = [elements.get(rank, 0) for rank in range(self.cluster.ranks)]
        if not self.hybrid:
            return [self._all.reduce(counts, self.itemsize)]
        columns = self._columns(counts)
        inside = self._node.reduce(list(map(sum, columns)), self.itemsize)
        return [inside, _slowest(self._column.reduce(column, WIDE) for column in columns)]

    def redistribute(self, elements: float) -> list[Leg]:
        """From shards of as many matrices as there are shards to a whole one on each rank, or back."""
        return [(self._node if self.hybrid else self._all).all_to_all(elements * self.itemsize)]

    def _columns(self, by_rank: Sequence[int]) -> list[Sequence[int]]:
        """By place in a node, then by node."""
        places = self.cluster.node_ranks
        return [by_rank[place::places] for place in range(places)]


def group_of(machine: Machine, nodes: int, local: int, lanes: tuple[str, ...]) -> Group:
    """``nodes`` × ``local`` ranks on the links of ``machine``."""
    inside, across, ranks = machine.inside, machine.across, nodes * local
    per_byte = max(
        1 / inside.rate if local > 1 else 0.0,
        1 / (local * across.rate) if nodes > 1 else 0.0,
    )
    others = max(1, ranks - 1)
    pairwise = max((local - 1) / others / inside.rate, (ranks - local) / others / across.rate)
    ring, pairs = LinkCosts(machine.call, per_byte), LinkCosts(machine.call, pairwise)
    return Group(
        ranks,
        lanes,
        GroupCosts(
            publish={"broadcast": ring, "all_gather": ring, "all_to_all": pairs},
            reduce={"all_to_all": pairs, "reduce": ring, "reduce_scatter": ring},
        ),
        around=(ranks - nodes) * inside.hop + (nodes - 1) * across.hop,
        # Messages to one node travel together.
        between=(local - 1) * inside.hop + (nodes - 1) * across.hop,
    )


def _slowest(legs: Iterable[Leg]) -> Leg:
    return max(legs, key=lambda leg: leg.seconds)
