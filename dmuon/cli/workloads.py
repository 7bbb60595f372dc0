"""What one optimizer step of a model asks of Newton–Schulz, as tuning problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dmuon.autotune import Cost, CostTable, ns_problem
from dmuon.batching import batch_sizes
from dmuon.kernels.choose import Problem

if TYPE_CHECKING:
    from dmuon.models import ModelShapes


@dataclass(frozen=True)
class Workload:
    """``count`` matrices of one shape: the optimizer runs them in batches of ``sizes``.

    ``problem`` is the largest batch; smaller ones, of nearly the same size, are answered by it.
    """

    problem: Problem
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(self.sizes)

    @property
    def title(self) -> str:
        """Such as ``"12 × 768×3072"``."""
        return f"{self.count} × {self.problem.m}×{self.problem.n}"

    def step_cost(self, costs: CostTable) -> Cost:
        """Milliseconds of all batches; "measured" if one at least was, the rest being of nearly its size."""
        largest = costs.ms(self.problem.m, self.problem.n, self.problem.batch)
        total = sum(costs.ms(self.problem.m, self.problem.n, size).ms for size in self.sizes)
        return Cost(total, largest.source)


def workloads_of(shapes: ModelShapes, device: str, precision: str, coefficients: str) -> list[Workload]:
    """The workloads of a step, in the order of the model's shapes: most work first.

    Transposed shapes are batched apart, as the optimizer does, but pose the same problem.
    """
    counts: dict[tuple[int, int], int] = {}
    for routing in shapes.parameters:
        for matrix in routing.matrices:
            sides = (matrix.rows, matrix.cols)
            counts[sides] = counts.get(sides, 0) + matrix.batch
    sizes: dict[Problem, list[int]] = {}
    for (rows, cols), count in counts.items():
        batches = batch_sizes(count, rows, cols)
        problem = ns_problem(
            rows, cols, batches[0], device=device, precision=precision, coefficients=coefficients
        )
        sizes.setdefault(problem, []).extend(batches)
    ranks = {(each.m, each.n): rank for rank, each in enumerate(shapes.matrices())}
    found = [Workload(problem, tuple(batches)) for problem, batches in sizes.items()]
    return sorted(found, key=lambda work: (ranks[work.problem.m, work.problem.n], -work.problem.batch))
