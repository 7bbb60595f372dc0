"""NorMuon: rows of an orthogonalised update are divided by the root of their second moment (arXiv 2510.05491)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon.batching import Piece

_SMALL = 1e-10
"""Rows that have never been larger, in root mean square, are not brought to the size of the others."""


def normalize_rows(directions: Sequence[Tensor], batch: Sequence[Piece]) -> None:
    """Advance the second moments of ``batch`` and divide the rows of ``directions`` by their roots, in place.

    Each matrix keeps its Frobenius norm, and with it what a learning rate means.

    Args:
        directions: what is orthogonalised of each piece, (count, rows, cols).
        batch: pieces with a second moment each.
    """
    wide = torch.promote_types(directions[0].dtype, torch.float32)
    norms = [torch.linalg.vector_norm(each, dim=-1, keepdim=True, dtype=wide) for each in directions]
    moments = [piece.second_moment() for piece in batch]
    for piece, moment, norm in zip(batch, moments, norms, strict=True):
        moment.lerp_(norm.square() / piece.update.matrix.cols, 1 - piece.update.group["normuon_beta2"])
    every = torch.cat(norms)
    scales = torch.cat(moments).clamp_min_(_SMALL**2).rsqrt_()
    before, after = (torch.linalg.vector_norm(rows, dim=-2, keepdim=True) for rows in (every, every * scales))
    scales *= before / after.clamp_min_(_SMALL)
    counts = [piece.count for piece in batch]
    for direction, scale in zip(directions, torch.split(scales, counts), strict=True):
        direction.mul_(scale)
