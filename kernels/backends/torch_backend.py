"""The reference backend: whole products through torch.matmul, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels.backends.base import Product, add_diagonal, matmul
from dmuon.kernels.gpu.arch import Arch


class TorchBackend:
    """Full products, the yardstick of the others. It has nothing to configure."""

    name = "torch"
    requires = ("torch",)
    sources: tuple[str, ...] = ()

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def configs(self, op: str, m: int, n: int, dtype: str, arch: Arch | None = None) -> list[dict[str, Any]]:
        return [] if op == "gram_ns" else [{}]

    def check(self, op: str, config: Mapping[str, Any]) -> None:
        if op not in _PRODUCTS:
            raise ValueError(f"the torch backend has {', '.join(_PRODUCTS)}, not {op}")
        if config:
            raise ValueError(f"the torch backend has no configuration, got {dict(config)}")

    def build(self, op: str, config: Mapping[str, Any]) -> Product:
        self.check(op, config)
        return _PRODUCTS[op]


def gram(
    X: Tensor, out: Tensor, *, alpha: float = 1, beta: float = 0, C: Tensor | None = None, diag: float = 0
) -> Tensor:
    return add_diagonal(matmul(X, X.mT, out, alpha, beta, C), diag)


def symmetric_product(
    A: Tensor,
    B: Tensor,
    out: Tensor,
    *,
    alpha: float = 1,
    beta: float = 0,
    C: Tensor | None = None,
    diag: float = 0,
) -> Tensor:
    return add_diagonal(matmul(A, B, out, alpha, beta, C), diag)


def apply(
    Q: Tensor, X: Tensor, out: Tensor, *, alpha: float = 1, beta: float = 0, C: Tensor | None = None
) -> Tensor:
    return matmul(Q, X, out, alpha, beta, C)


_PRODUCTS: dict[str, Product] = {"gram": gram, "symmetric_product": symmetric_product, "apply": apply}
