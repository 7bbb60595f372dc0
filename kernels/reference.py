"""What an iteration must equal: the exact polynomial through an SVD in fp64, and how far each precision may be off."""

from __future__ import annotations

import torch
from torch import Tensor

from dmuon.kernels.coefficients import CoefficientSet

_TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-3, torch.float16: 6e-2, torch.bfloat16: 3e-1}


def tolerance(dtype: torch.dtype) -> float:
    """The relative Frobenius error that an iteration in ``dtype`` may have on matrices of decaying spectrum.

    Small singular values lose most: the polynomial amplifies them, and the rounding of R with them, up to
    800-fold. Well-conditioned input is two orders of magnitude more exact. docs/kernels.md has the figures.
    """
    return _TOLERANCE[dtype]


def polynomial_polar(G: Tensor, coefficients: CoefficientSet) -> Tensor:
    """U p(S) Vᵀ in fp64, for G = U S Vᵀ of shape (…, m, n) and p the composed step polynomials on S / ‖S‖₂."""
    U, S, Vh = torch.linalg.svd(_scaled(G), full_matrices=False)
    x = S / _nonzero(torch.linalg.vector_norm(S, dim=-1, keepdim=True))
    for a, b, c in coefficients.steps:
        square = x * x
        x = x * (a + square * (b + square * c))
    result: Tensor = (U * x.unsqueeze(-2)) @ Vh
    return result


def exact_polar(G: Tensor) -> Tensor:
    """The orthogonal polar factor U Vᵀ of G (…, m, n), in fp64 inside and G's dtype outside.

    A *different* update from Newton–Schulz, whose polynomial only approaches it: offered by name, never chosen
    in its place. Directions that G lacks (zero singular values) stay zero.
    """
    U, S, Vh = torch.linalg.svd(_scaled(G), full_matrices=False)
    floor = S.amax(dim=-1, keepdim=True) * max(G.shape[-2:]) * torch.finfo(torch.float64).eps
    result: Tensor = ((U * (floor < S).unsqueeze(-2)) @ Vh).to(G.dtype)
    return result


def relative_error(result: Tensor, exact: Tensor) -> Tensor:
    """‖result − exact‖_F / ‖exact‖_F per matrix, in fp64; the absolute norm where ``exact`` is zero."""
    norm = torch.linalg.matrix_norm(exact)
    error: Tensor = torch.linalg.matrix_norm(result.double() - exact) / _nonzero(norm)
    return error


def _scaled(G: Tensor) -> Tensor:
    wide = G.double()
    return wide / _nonzero(wide.abs().amax(dim=(-2, -1), keepdim=True))


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)
