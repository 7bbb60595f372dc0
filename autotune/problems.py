"""From shapes to tuning problems."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmuon.kernels.choose import Problem, device_key
from dmuon.kernels.coefficients import CoefficientSet, resolve_coefficients
from dmuon.kernels.precision import precision_name, resolve_precision


def ns_problem(
    m: int,
    n: int,
    batch: int = 1,
    *,
    device: torch.device | str = "cpu",
    precision: str = "auto",
    coefficients: str | CoefficientSet | Sequence[Sequence[float]] = "polar_express",
) -> Problem:
    """The problem that ``gram_ns`` poses for ``batch`` fp32 matrices of m×n, either side first.

    Raises:
        ValueError: a size below 1, an unknown precision or unknown coefficients.
    """
    G = torch.empty(0, device=device)
    dtype = precision_name(resolve_precision(precision, G))
    key = resolve_coefficients(coefficients).key
    return Problem("gram_ns", batch, min(m, n), max(m, n), dtype, device_key(device), key)
