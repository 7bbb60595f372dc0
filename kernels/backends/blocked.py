"""Symmetric products by lower blocks: about half the arithmetic, in plain torch, on any device.

Only blocks on and below the diagonal are multiplied; the rest is mirrored. Two ways to cut: ``panel`` multiplies
one row panel of ``block`` rows at a time, up to and including its diagonal block — few, wide products;
``halves`` splits in two recursively down to ``block`` — the largest products, which a CPU's fp32 likes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels.backends.base import Product, add_diagonal, matmul
from dmuon.kernels.gpu.arch import Arch

SPLITS = ("panel", "halves")
BLOCKS = (128, 192, 256, 512)


class BlockedBackend:
    """Lower blocks and their mirror for ``gram`` and ``symmetric_product``; it has no ``apply``."""

    name = "blocked"
    requires = ("torch",)
    sources = ("backends/blocked.py",)

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def configs(self, op: str, m: int, n: int, dtype: str, arch: Arch | None = None) -> list[dict[str, Any]]:
        if op not in _PRODUCTS:
            return []
        # At least two blocks, or nothing is saved; at most eight, or the products get too thin to win.
        blocks = [block for block in BLOCKS if 2 * block <= m <= 8 * block]
        return [{"block": block, "split": split} for block in blocks for split in SPLITS]

    def check(self, op: str, config: Mapping[str, Any]) -> None:
        if op not in _PRODUCTS:
            raise ValueError(f"the blocked backend has no {op}: use torch")
        block, split = config.get("block"), config.get("split")
        if set(config) != {"block", "split"} or type(block) is not int or block < 1 or split not in SPLITS:
            raise ValueError(f"blocked takes block >= 1 and split in {SPLITS}, got {dict(config)}")

    def build(self, op: str, config: Mapping[str, Any]) -> Product:
        self.check(op, config)
        return partial(_PRODUCTS[op], block=config["block"], split=config["split"])


def gram(
    X: Tensor,
    out: Tensor,
    *,
    alpha: float = 1,
    beta: float = 0,
    C: Tensor | None = None,
    diag: float = 0,
    block: int,
    split: str,
) -> Tensor:
    return add_diagonal(_LOWER[split](X, X.mT, out, alpha, beta, C, block), diag)


def symmetric_product(
    A: Tensor,
    B: Tensor,
    out: Tensor,
    *,
    alpha: float = 1,
    beta: float = 0,
    C: Tensor | None = None,
    diag: float = 0,
    block: int,
    split: str,
) -> Tensor:
    return add_diagonal(_LOWER[split](A, B, out, alpha, beta, C, block), diag)


_PRODUCTS: dict[str, Product] = {"gram": gram, "symmetric_product": symmetric_product}


def _lower_panels(
    A: Tensor, B: Tensor, out: Tensor, alpha: float, beta: float, C: Tensor | None, block: int
) -> Tensor:
    """out = alpha·A B + beta·C, known to be symmetric, by row panels."""
    m = A.shape[-2]
    for start in range(0, m, block):
        stop = min(start + block, m)
        added = None if C is None else C[..., start:stop, :stop]
        matmul(A[..., start:stop, :], B[..., :stop], out[..., start:stop, :stop], alpha, beta, added)
        out[..., :start, start:stop].copy_(out[..., start:stop, :start].mT)
    return out


def _lower_halves(
    A: Tensor, B: Tensor, out: Tensor, alpha: float, beta: float, C: Tensor | None, block: int
) -> Tensor:
    """out = alpha·A B + beta·C, known to be symmetric, by recursive halving."""

    def multiply(rows: slice, columns: slice) -> None:
        added = None if C is None else C[..., rows, columns]
        matmul(A[..., rows, :], B[..., columns], out[..., rows, columns], alpha, beta, added)

    def fill(start: int, stop: int) -> None:
        if stop - start <= block:
            multiply(slice(start, stop), slice(start, stop))
            return
        middle = (start + stop) // 2
        fill(start, middle)
        fill(middle, stop)
        multiply(slice(middle, stop), slice(start, middle))
        out[..., start:middle, middle:stop].copy_(out[..., middle:stop, start:middle].mT)

    fill(0, A.shape[-2])
    return out


_LOWER = {"panel": _lower_panels, "halves": _lower_halves}
