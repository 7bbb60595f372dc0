"""The scaled working copy that an iteration starts from: X = G / ‖G‖_F in the working precision.

G is divided by max|G| first, so that a gradient of any size — 1e-30 or 1e18 — gives the same X; an exact zero
stays zero, and NaN or Inf makes its own matrix NaN and no other. Norms are summed per row, then in fp64.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_SMALLEST_PANEL = 1 << 16
"""Elements below which a temporary is not worth splitting."""


def normalized_copy(G: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` (working dtype, G's shape (…, rows, cols)) with G / ‖G‖_F, matrix by matrix.

    G is only read. Temporaries stay below the working m×m matrices of the iteration, except for tiny inputs.
    """
    # Two plain reductions: measured on a CPU, fifty times as fast as an infinity norm.
    largest = torch.maximum(G.amax((-2, -1), keepdim=True), -G.amin((-2, -1), keepdim=True))
    largest = _nonzero(largest)
    if out.dtype in (torch.float32, torch.float64) and torch.promote_types(G.dtype, out.dtype) == out.dtype:
        if G.dtype == out.dtype:
            torch.div(G, largest, out=out)
        else:
            out.copy_(G).div_(largest)
        return out.div_(_frobenius([out], out.dtype))
    # Narrowing: scale in a dtype as wide as G, panel by panel, and round once.
    wide = torch.promote_types(G.dtype, torch.float32)
    largest = largest.to(wide)
    norm = _frobenius((panel.to(wide) / largest for panel in _panels(G, wide, out.dtype)), wide)
    for target, source in zip(_panels(out, wide, out.dtype), _panels(G, wide, out.dtype), strict=True):
        target.copy_(
            source.to(wide).div_(largest).div_(norm) if source.dtype != wide else source / largest / norm
        )
    return out


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _frobenius(panels: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """‖·‖_F over panels of the same matrices: rows in their dtype, then rows and panels together in fp64."""
    squares: Tensor | None = None
    for panel in panels:
        # Along the dimension that is contiguous: across it, a CPU takes fifty times as long.
        along, across = (-1, -2) if panel.stride(-1) <= panel.stride(-2) else (-2, -1)
        rows = torch.linalg.vector_norm(panel, dim=along, keepdim=True)
        wide = rows if rows.device.type == "mps" else rows.double()
        part = wide.square().sum(dim=across, keepdim=True)
        squares = part if squares is None else squares + part
    assert squares is not None
    return _nonzero(squares.sqrt()).to(dtype)


def _panels(matrix: Tensor, wide: torch.dtype, working: torch.dtype) -> list[Tensor]:
    """Cut along the longer side, so that a panel's ``wide`` copy is at most one working m×m matrix."""
    rows, columns = matrix.shape[-2:]
    short, long = min(rows, columns), max(rows, columns)
    batch = max(1, matrix[..., 0, 0].numel())
    ratio = wide.itemsize // working.itemsize
    width = max(short // max(1, ratio), _SMALLEST_PANEL // (short * batch), 1)
    return list(torch.split(matrix, min(width, long), dim=-1 if columns >= rows else -2))
