"""The three products on their own: gram, symmetric_product and apply, for (…, m, n) tensors on any backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels.backends import BACKENDS
from dmuon.kernels.overlap import overlap, same_memory
from dmuon.kernels.precision import precision_name


@torch.no_grad()
def gram(
    X: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    C: Tensor | None = None,
    diag: float = 0.0,
    out: Tensor | None = None,
    backend: str = "torch",
    config: Mapping[str, Any] | None = None,
) -> Tensor:
    """alpha·X Xᵀ + beta·C + diag·I for X (m, n) or (B, m, n), as (m, m) or (B, m, m).

    ``C`` must be symmetric and may be ``out``. ``backend`` is a name of ``dmuon.kernels.backends.BACKENDS``,
    and ``config`` one of its configurations: ``BACKENDS[name].configs("gram", m, n, "bf16", arch_of(X.device))``
    lists some, with ``arch_of`` from ``dmuon.kernels.gpu.arch``. One with ``"lower"`` is for chains of products: with
    ``"write"`` or ``"both"`` the upper half of the result is not written, with ``"read"`` or ``"both"`` that of the
    operands not read.

    Raises:
        TypeError: an operand is no tensor or has an unsupported dtype.
        ValueError: shapes, dtypes or devices do not match, ``out`` overlaps what is read, or the backend or
            configuration is unknown.
    """
    return _run("gram", (X,), alpha, beta, C, out, backend, config, {"diag": diag})


@torch.no_grad()
def symmetric_product(
    A: Tensor,
    B: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    C: Tensor | None = None,
    diag: float = 0.0,
    out: Tensor | None = None,
    backend: str = "torch",
    config: Mapping[str, Any] | None = None,
) -> Tensor:
    """alpha·A B + beta·C + diag·I for symmetric A, B, C (m, m) or (B, m, m), where A B is symmetric too.

    That A B is symmetric — A and B commute, or B is a product such as R A — is the caller's word: a backend
    may compute one triangle and mirror it. Otherwise as :func:`gram`.
    """
    return _run("symmetric_product", (A, B), alpha, beta, C, out, backend, config, {"diag": diag})


@torch.no_grad()
def apply(
    Q: Tensor,
    X: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    C: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "torch",
    config: Mapping[str, Any] | None = None,
) -> Tensor:
    """alpha·Q X + beta·C for Q (m, m) and X, C (m, n), all with the same batch in front or none.

    With C = W, beta = 1 − lr·weight_decay and alpha = −lr·scale it is Muon's weight update. Otherwise as
    :func:`gram`.
    """
    return _run("apply", (Q, X), alpha, beta, C, out, backend, config, {})


def _run(
    op: str,
    operands: tuple[Tensor, ...],
    alpha: float,
    beta: float,
    C: Tensor | None,
    out: Tensor | None,
    backend: str,
    config: Mapping[str, Any] | None,
    extra: dict[str, float],
) -> Tensor:
    for tensor in (*operands, C, out):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{op} takes tensors, got {type(tensor).__name__}")
    first = operands[0]
    precision_name(first.dtype)
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    reason = BACKENDS[backend].unavailable(first.device)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot run on {first.device}: {reason}")
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"config must be a mapping, got {type(config).__name__}")
    if first.ndim not in (2, 3) or first.numel() == 0:
        raise ValueError(f"{op} takes non-empty (m, n) or (B, m, n) operands, got {tuple(first.shape)}")
    square = (*first.shape[:-1], first.shape[-2])
    if op != "gram" and (first.shape != square or operands[1].shape[:-1] != first.shape[:-1]):
        shapes = [tuple(operand.shape) for operand in operands]
        raise ValueError(f"{op} takes a square first operand and a second of as many rows, got {shapes}")
    if op == "symmetric_product" and operands[1].shape != square:
        raise ValueError(f"symmetric_product takes two square operands, got {tuple(operands[1].shape)}")
    shape = operands[1].shape if op == "apply" else square
    result = torch.empty(shape, dtype=first.dtype, device=first.device) if out is None else out
    for name, tensor in (("C", C), ("out", result)):
        if tensor is not None and tensor.shape != torch.Size(shape):
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    for tensor in (*operands, result, *(() if C is None else (C,))):
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"{op} takes operands of one dtype and device, got {tensor.dtype} on {tensor.device}"
            )
    if C is None and beta:
        raise ValueError(f"beta is {beta}, but there is no C to scale")
    if any(overlap(result, operand) for operand in operands):
        raise ValueError(f"out overlaps an operand that {op} reads while it writes; pass separate memory")
    if C is not None and overlap(result, C) and not same_memory(result, C):
        raise ValueError("out overlaps C in memory; pass C itself or separate memory")
    product = BACKENDS[backend].build(op, config or {})
    return product(*operands, result, alpha=alpha, beta=beta, C=C, **extra)
