"""The scaled working copy that an iteration starts from: X = G / ‖G‖_F in the working precision.

G is divided by max|G| first, so that a gradient of any size — 1e-30 or 1e18 — gives the same X; an exact zero
stays zero, and NaN or Inf makes its own matrix NaN and no other. Norms are summed per row, then in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_PANEL = 1 << 16
"""Elements below which a temporary is not worth splitting."""

_SAFE_NORMS = (1e-12, 1e18)
"""Between these, the squares of all fp32 entries that count are neither subnormal nor infinite."""


def plain_norm(G: Tensor, dtype: torch.dtype) -> float | None:
    """‖G‖_F if products of G itself, scaled by it, are as good as those of a scaled copy; else ``None``.

    So it is for a lone fp32 matrix on a CPU, where looking at a number costs nothing, whose squares are in range.
    """
    if G.dtype != dtype or not _scales_in_products(G, dtype):
        return None
    norm = float(_frobenius(G))
    return norm if _SAFE_NORMS[0] < norm < _SAFE_NORMS[1] else None


def _scales_in_products(G: Tensor, dtype: torch.dtype) -> bool:
    return G.ndim == 2 and G.device.type == "cpu" and dtype == torch.float32


def scaled_copy(G: Tensor, out: Tensor) -> float:
    """Fill ``out`` (working dtype, G's shape (…, rows, cols)) with G but for a factor, and return the factor that
    gives each matrix of ``out`` norm 1: not 1 where :func:`plain_norm` finds one, which spares four passes."""
    if G.dtype.itemsize < out.dtype.itemsize and _scales_in_products(G, out.dtype):
        norm = plain_norm(out.copy_(G), out.dtype)
        if norm is not None:
            return 1 / norm
    normalized_copy(G, out)
    return 1.0


def normalized_copy(G: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` (working dtype, G's shape (…, rows, cols)) with G / ‖G‖_F, matrix by matrix.

    G is only read. Temporaries stay below the working m×m matrices of the iteration, except for tiny inputs.
    """
    # Two plain reductions: measured on a CPU, fifty times as fast as an infinity norm.
    largest = torch.maximum(G.amax((-2, -1), keepdim=True), -G.amin((-2, -1), keepdim=True))
    _lift_zero(largest)
    if out.dtype in (torch.float32, torch.float64) and torch.promote_types(G.dtype, out.dtype) == out.dtype:
        if G.dtype == out.dtype:
            torch.div(G, largest, out=out)
        else:
            out.copy_(G).div_(largest)
        return out.div_(_lift_zero(_frobenius(out).to(out.dtype)))
    # Narrowing: scale in a dtype as wide as G, panel by panel, and round once.
    wide = torch.promote_types(G.dtype, torch.float32)
    largest = largest.to(wide)
    panels = _panels(G, wide, out.dtype)
    if len(panels) == 1:
        scaled = G.to(wide) / largest
        return out.copy_(scaled.div_(_lift_zero(_frobenius(scaled).to(wide))))
    norms = [_frobenius(panel.to(wide) / largest) for panel in panels]
    norm = _lift_zero(torch.linalg.vector_norm(torch.cat(norms, -1), dim=-1, keepdim=True).to(wide))
    for target, source in zip(_panels(out, wide, out.dtype), panels, strict=True):
        target.copy_((source.to(wide) / largest).div_(norm))
    return out


def _lift_zero(scale: Tensor) -> Tensor:
    """Make a divisor of 0 positive, in place: 0 / tiny is 0. Lifting subnormals as well does no harm, since what
    a first division leaves of the scale, the second takes away."""
    return scale.clamp_(min=torch.finfo(scale.dtype).tiny)


def _frobenius(matrix: Tensor) -> Tensor:
    """‖·‖_F of each matrix, (…, 1, 1): rows in their own dtype, then together in fp64."""
    # Along the dimension that is contiguous: across it, a CPU takes fifty times as long.
    along, across = (-1, -2) if matrix.stride(-1) <= matrix.stride(-2) else (-2, -1)
    rows = torch.linalg.vector_norm(matrix, dim=along, keepdim=True)
    wide = rows.dtype if rows.device.type == "mps" else torch.float64
    norms: Tensor = torch.linalg.vector_norm(rows, dim=across, keepdim=True, dtype=wide)
    return norms


def _panels(matrix: Tensor, wide: torch.dtype, working: torch.dtype) -> tuple[Tensor, ...]:
    """Cut along the longer side, so that two ``wide`` copies of a panel take at most four working m×m matrices."""
    rows, columns = matrix.shape[-2:]
    short, long = min(rows, columns), max(rows, columns)
    batch = matrix.numel() // (rows * columns)
    width = max(2 * short * working.itemsize // wide.itemsize, SMALLEST_PANEL // (short * batch), 1)
    if width >= long:
        return (matrix,)
    return torch.split(matrix, width, dim=-1 if columns >= rows else -2)
