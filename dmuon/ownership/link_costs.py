"""By which way an exchange goes: what each would take, from its calls and the bytes through the busiest rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkCosts:
    """What one way of exchange takes in one group of ranks.

    Args:
        alpha_s: seconds per call.
        beta_s_per_byte: seconds per byte through the busiest rank.
    """

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, calls: int, nbytes: int) -> float:
        """How long ``calls`` calls that move ``nbytes`` in all take."""
        return calls * self.alpha_s + nbytes * self.beta_s_per_byte


@dataclass(frozen=True)
class GroupCosts:
    """The costs of every way, by its name: to publish what each rank has, and to reduce to each rank its part."""

    publish: Mapping[str, LinkCosts]
    reduce: Mapping[str, LinkCosts]


def publication_loads(sizes: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Way → calls, and bytes through the busiest rank, where rank k has ``sizes[k]`` bytes for all others."""
    return {
        "broadcast": (_parts(sizes), sum(sizes)),
        "all_gather": (1, _padded(sizes)),
        "all_to_all": (1, _pairwise(sizes)),
    }


def reduction_loads(sizes: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Way → calls, and bytes through the busiest rank, where all have ``sizes[k]`` bytes for rank k to add up."""
    return {
        "all_to_all": (1, _pairwise(sizes)),
        "reduce": (_parts(sizes), sum(sizes)),
        "reduce_scatter": (1, _padded(sizes)),
    }


def summed_loads(counts: Sequence[int], itemsize: int, sum_itemsize: int) -> dict[str, tuple[int, int]]:
    """The same of elements: of ``itemsize`` bytes as they are, of ``sum_itemsize`` where sums travel.

    Sums are never rounded to less than fp32, so what is narrower goes as it is, or is widened first.
    """
    as_they_are = reduction_loads([count * itemsize for count in counts])
    return {
        **reduction_loads([count * sum_itemsize for count in counts]),
        "all_to_all": as_they_are["all_to_all"],
    }


def quickest(loads: Mapping[str, tuple[int, int]], costs: Mapping[str, LinkCosts]) -> str:
    """The way that takes least; of equals the first. A way without costs is none."""
    return min((way for way in loads if way in costs), key=lambda way: costs[way].seconds(*loads[way]))


def assumed_costs(device_type: str) -> GroupCosts:
    """What is assumed where nothing was measured.

    On CUDA, that eight broadcasts catch up with one all-gather at 100 MB, as on eight A800s; that pairwise sends take
    a little longer a byte than a ring; all at the bandwidth of links within a node. On a CPU, what gloo took over the
    loopback device: broadcasts and reductions by tree move a byte several times quicker than all other ways.
    """
    return _CUDA if device_type == "cuda" else _CPU


def _parts(sizes: Sequence[int]) -> int:
    return sum(size > 0 for size in sizes)


def _pairwise(sizes: Sequence[int]) -> int:
    """The rank with the largest part exchanges it with every other; all others exchange everything but theirs."""
    return max((len(sizes) - 1) * max(sizes), sum(sizes) - min(sizes))


def _padded(sizes: Sequence[int]) -> int:
    """All parts count as the largest; what is padded is copied once more."""
    largest = max(sizes)
    padding = sum(sizes) if min(sizes) < largest else 0
    return (len(sizes) - 1) * largest + padding


_CUDA = GroupCosts(
    publish={
        "broadcast": LinkCosts(20e-6, 5.0e-12),
        "all_gather": LinkCosts(20e-6, 7.3e-12),
        "all_to_all": LinkCosts(20e-6, 8.0e-12),
    },
    reduce={
        "all_to_all": LinkCosts(20e-6, 8.0e-12),
        "reduce": LinkCosts(20e-6, 5.0e-12),
        "reduce_scatter": LinkCosts(20e-6, 7.3e-12),
    },
)

_CPU = GroupCosts(
    publish={
        "broadcast": LinkCosts(0.1e-3, 1.0e-9),
        "all_gather": LinkCosts(0.4e-3, 4.5e-9),
        "all_to_all": LinkCosts(0.4e-3, 4.5e-9),
    },
    reduce={
        "all_to_all": LinkCosts(0.4e-3, 4.5e-9),
        "reduce": LinkCosts(3.0e-3, 1.5e-9),
        "reduce_scatter": LinkCosts(0.8e-3, 5.5e-9),
    },
)
