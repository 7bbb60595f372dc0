"""Which rank owns which matrix: costs in, a plan out. Pure data, equal on every rank."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from dmuon.autotune.costs import operations
from dmuon.kernels.choose import Problem, device_key, heuristic_choice
from dmuon.kernels.coefficients import resolve_coefficients
from dmuon.matrix import Matrix
from dmuon.policy import Routing


@dataclass(frozen=True)
class Plan:
    """The owners of every owned parameter.

    Args:
        owners: name → the ranks that own it. One rank each for now; several are to share one matrix.
        costs: name → what its update costs, in any one unit.
        ranks: how many ranks there are.

    Raises:
        ValueError: names without a cost, or an owner that is no rank.
    """

    owners: Mapping[str, tuple[int, ...]]
    costs: Mapping[str, float]
    ranks: int

    def __post_init__(self) -> None:
        if self.owners.keys() != self.costs.keys():
            differing = sorted(self.owners.keys() ^ self.costs.keys())
            raise ValueError(
                f"a plan needs an owner and a cost for each name; one is missing for {differing}"
            )
        for name, ranks in self.owners.items():
            if len(ranks) != 1:
                raise ValueError(f"{name!r} must have one owner, got the ranks {ranks}")
            if not 0 <= ranks[0] < self.ranks:
                raise ValueError(f"the owner of {name!r} must be a rank below {self.ranks}, got {ranks[0]}")

    @property
    def loads(self) -> tuple[float, ...]:
        """The cost that each rank bears."""
        loads = [0.0] * self.ranks
        for name, (rank,) in self.owners.items():
            loads[rank] += self.costs[name]
        return tuple(loads)

    @property
    def makespan(self) -> float:
        """The largest load: how long the optimizer step takes."""
        return max(self.loads)

    @property
    def bound(self) -> float:
        """No plan that keeps matrices whole has a smaller makespan."""
        costs = self.costs.values()
        return max(sum(costs) / self.ranks, max(costs, default=0.0))

    @property
    def gap(self) -> float:
        """makespan / bound − 1: 0 when the plan is as good as can be."""
        return self.makespan / self.bound - 1 if self.bound else 0.0

    @property
    def hash(self) -> str:
        """Equal for equal owners, on every rank and in every run."""
        text = json.dumps([self.ranks, sorted(self.owners.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def greedy_plan(costs: Mapping[str, float], ranks: int) -> Plan:
    """Longest processing time first: each matrix, the costliest first, goes to the rank with the least to do.

    Ties go to the name that comes first and to the lowest rank, so that equal costs give equal plans.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        load, rank = loads[0]
        owners[name] = (rank,)
        heapq.heapreplace(loads, (load + costs[name], rank))
    return Plan({name: owners[name] for name in costs}, dict(costs), ranks)


def matrix_costs(
    routings: Iterable[Routing], device: torch.device | str, precision: str = "fp32"
) -> dict[str, float]:
    """Arithmetic operations of one orthogonalisation, by name of the parameter.

    Parameters of equal size differ here: 6m²n + 14m³ for m × n has little to do with m·n.
    """
    key = device_key(device)
    return {
        routing.name: sum(_operations(matrix, key, precision) for matrix in routing.matrices)
        for routing in routings
    }


def given_plan(
    plan: Plan | Mapping[str, int | tuple[int, ...]], costs: Mapping[str, float], ranks: int
) -> Plan:
    """A plan that the caller gave, checked against the matrices there are.

    Raises:
        ValueError: it is for other names or for another number of ranks.
    """
    owners = plan.owners if isinstance(plan, Plan) else plan
    if isinstance(plan, Plan) and plan.ranks != ranks:
        raise ValueError(f"the plan is for {plan.ranks} ranks, but the mesh has {ranks}")
    if owners.keys() != costs.keys():
        raise ValueError(
            f"the plan is for other parameters: it lacks {sorted(costs.keys() - owners.keys()) or 'none'} "
            f"and has {sorted(owners.keys() - costs.keys()) or 'none'} too many"
        )
    return Plan({name: _ranks(owners[name]) for name in costs}, dict(costs), ranks)


def _ranks(owner: int | tuple[int, ...]) -> tuple[int, ...]:
    return (owner,) if isinstance(owner, int) else tuple(owner)


def _operations(matrix: Matrix, device: str, precision: str) -> float:
    coefficients = resolve_coefficients("polar_express")
    m, n = sorted((matrix.rows, matrix.cols))
    problem = Problem("gram_ns", matrix.batch, m, n, precision, device, coefficients.key)
    count: float = operations(problem, heuristic_choice(problem, coefficients))
    return count
