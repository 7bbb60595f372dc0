"""quack's symmetric GEMM for Hopper and Blackwell, where the package ``quack-kernels`` is installed.

It computes tiles of 256 rows, so it saves nothing on small matrices.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels.backends.base import Product, add_diagonal
from dmuon.kernels.gpu.arch import Arch, arch_of
from dmuon.kernels.gpu.binary import Unsupported

_ARCHS = ("sm_90a", "sm_100a", "sm_103a")
_TILE = 256


class QuackBackend:
    """``gram`` and ``symmetric_product`` through ``quack.gemm_interface.gemm_symmetric``; nothing to configure."""

    name = "quack"
    requires = ("torch", "quack-kernels")
    sources = ("backends/quack_backend.py",)

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"it needs a CUDA GPU, not {device.type}"
        arch = arch_of(device)
        if arch is None or arch.name not in _ARCHS:
            return f"it needs one of {', '.join(_ARCHS)}"
        return None if importlib.util.find_spec("quack") else "quack-kernels is not installed"

    def configs(self, op: str, m: int, n: int, dtype: str, arch: Arch | None = None) -> list[dict[str, Any]]:
        symmetric = op in ("gram", "symmetric_product") and dtype in ("bf16", "fp16")
        served = arch is not None and arch.name in _ARCHS and importlib.util.find_spec("quack") is not None
        return [{}] if symmetric and served and m > _TILE else []

    def check(self, op: str, config: Mapping[str, Any]) -> None:
        if op not in ("gram", "symmetric_product"):
            raise ValueError(f"the quack backend has no {op}: use torch")
        if config:
            raise ValueError(f"the quack backend has no configuration, got {dict(config)}")

    def build(self, op: str, config: Mapping[str, Any]) -> Product:
        self.check(op, config)
        return _gram if op == "gram" else _product


def _gram(X: Tensor, out: Tensor, **rest: Any) -> Tensor:
    return _product(X, X.mT, out, **rest)


def _product(
    A: Tensor,
    B: Tensor,
    out: Tensor,
    *,
    alpha: float = 1,
    beta: float = 0,
    C: Tensor | None = None,
    diag: float = 0,
) -> Tensor:
    if A.dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(f"quack multiplies bf16 and fp16 here, not {A.dtype}")
    run = _gemm_symmetric()
    run(A, B, C=C if beta else None, out=out, alpha=alpha, beta=beta if C is not None else 1.0)
    return add_diagonal(out, diag)


def _gemm_symmetric() -> partial[Any]:
    """Imported when it is first needed: its packages are large, and their releases move."""
    try:
        from quack.gemm_interface import gemm_symmetric
    except Exception as error:
        raise Unsupported(f"quack does not import: {type(error).__name__}: {error}") from error
    return partial(gemm_symmetric, dynamic_scheduler=False)
