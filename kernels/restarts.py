"""Where Gram Newton–Schulz restarts: found by simulating the iteration's rounding on scalars.

Gram NS carries R = XXᵀ and Q, the product of the step polynomials. Rounding makes R slightly indefinite: an
eigenvalue that should be x² becomes x² + δ, with δ < 0 of the size of the dtype's rounding, and from there the
recurrence amplifies it. A restart (X ← QX, R ← XXᵀ, Q ← I) clears that. What is lost in forming QX grows with
the spread of Q's eigenvalues, so a good set of restarts keeps max|q| / min|q| small in every segment — the
criterion of gram-newton-schulz (Dao-AILab), whose published positions this search reproduces.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np
import torch

from dmuon.kernels.coefficients import CoefficientSet, Triple
from dmuon.kernels.precision import precision_name

ROUNDING = {"fp64": -1.2e-16, "fp32": -6e-8, "bf16": -3.1e-3, "fp16": -4.9e-4}
"""δ per working precision, about its unit roundoff u: rounding moves each entry of R by at most u·|Rᵢⱼ|, so an
eigenvalue by at most u·‖R‖. Independent errors leave u/√m; rows of two distinct values come closest to the bound.
For bf16 it is the worst of 12 million such matrices (u is 3.9e-3), against 1e-3 in rank-1 and all-ones inputs."""

SPREAD_LIMIT = {"fp64": 1e8, "fp32": 1e4, "bf16": 150.0, "fp16": 150.0}
"""Restarts are added until the spread is below this: beyond it, QX keeps too few digits of a small singular
value next to a large one."""

SHIPPED: dict[tuple[str, str], tuple[int, ...]] = {
    ("polar_express:5", "fp16"): (2,),
    ("polar_express:5", "bf16"): (1, 3),
    ("you:5", "fp16"): (2,),
    ("you:5", "bf16"): (1, 3),
    ("keller_jordan:5", "fp16"): (3,),
    ("keller_jordan:5", "bf16"): (2,),
}
"""What :func:`search_restarts` finds for the shipped sets, so that a first call need not search."""


def default_restarts(coefficients: CoefficientSet, dtype: torch.dtype) -> tuple[int, ...]:
    """The fewest restarts (0-based iterations run right after one) that keep the Gram form stable in ``dtype``.

    Wide precisions need none for the shipped sets. A set so steep that no choice reaches the limit gets a
    restart before every step, which is the standard form.
    """
    name = precision_name(dtype)
    shipped = SHIPPED.get((coefficients.key, name))
    return shipped if shipped is not None else _fewest(coefficients.steps, name)


@lru_cache
def search_restarts(steps: tuple[Triple, ...], count: int, rounding: float) -> tuple[tuple[int, ...], float]:
    """The best ``count`` restart positions for ``steps``, and the spread max|q|/min|q| that they leave.

    Best is the least spread; of positions within a tenth of it, those that leave the shortest run of steps, since
    rounding also adds up along a run (for Polar Express in bf16, (1, 3) has half the error of (1, 2)).

    Args:
        steps: the (a, b, c) of each step.
        count: how many restarts, 0 ≤ count < len(steps).
        rounding: δ, the perturbation of R's eigenvalues; negative (:data:`ROUNDING` has one per precision).

    Raises:
        ValueError: ``count`` is out of range or ``rounding`` is positive.
    """
    if not 0 <= count < len(steps):
        raise ValueError(f"count must be between 0 and {len(steps) - 1} for {len(steps)} steps, got {count}")
    if rounding > 0:
        raise ValueError(f"rounding must be zero or negative, got {rounding}")
    found = [
        (_spread(steps, places, rounding), places) for places in combinations(range(1, len(steps)), count)
    ]
    least, _ = min(found)
    close = [
        (_longest(places, len(steps)), spread, places) for spread, places in found if spread <= 1.1 * least
    ]
    _, spread, places = min(close)
    return places, spread


def _longest(restarts: tuple[int, ...], steps: int) -> int:
    """The most steps between two restarts."""
    return max(stop - start for start, stop in pairwise((0, *restarts, steps)))


@lru_cache
def _fewest(steps: tuple[Triple, ...], precision: str) -> tuple[int, ...]:
    for count in range(len(steps)):
        places, spread = search_restarts(steps, count, ROUNDING[precision])
        if spread <= SPREAD_LIMIT[precision]:
            return places
    return tuple(range(1, len(steps)))


def _spread(steps: tuple[Triple, ...], restarts: tuple[int, ...], rounding: float) -> float:
    """The largest max|q|/min|q| over singular values from 1 to 1e-10, at any step of the simulated recurrence."""
    x = np.logspace(0, -10, 4001)
    r, q, worst = x * x + rounding, np.ones_like(x), 1.0
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for k, (a, b, c) in enumerate(steps):
            if k in restarts:
                x = q * x
                r, q = x * x + rounding, np.ones_like(x)
            p = a + b * r + c * r * r
            q, r = p * q, r * p * p
            size = np.abs(q)
            spread = float(size.max() / size.min())
            worst = max(worst, spread if np.isfinite(spread) else np.inf)
    return worst
