"""What a backend is, and the one matrix product that every torch-based backend builds on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from dmuon.kernels.gpu.arch import Arch

Product = Callable[..., Tensor]
"""A ready product, writing into ``out`` and returning it. All operands are (m, n) or (B, m, n), any strides.

* ``gram(X, out, *, alpha=1, beta=0, C=None, diag=0)``: alpha·X Xᵀ + beta·C + diag·I.
* ``symmetric_product(A, B, out, *, alpha=1, beta=0, C=None, diag=0)``: alpha·A B + beta·C + diag·I, for A, B and
  C symmetric and A, B commuting: the result is symmetric, so half of it determines the rest.
* ``apply(Q, X, out, *, alpha=1, beta=0, C=None)``: alpha·Q X + beta·C.

``C`` may be ``out``; no other operand may overlap it.
"""


class Backend(Protocol):
    """A way to compute the three products."""

    @property
    def name(self) -> str: ...

    @property
    def requires(self) -> tuple[str, ...]:
        """The distributions whose versions its timings depend on."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Its source files, relative to the kernels folder."""

    def unavailable(self, device: torch.device) -> str | None:
        """Why it cannot run on ``device``, in words; ``None`` if it can."""

    def configs(self, op: str, m: int, n: int, dtype: str, arch: Arch | None = None) -> list[dict[str, Any]]:
        """The configurations worth timing for (m, n) operands, pruned of those that cannot win or run.

        ``arch`` is that of the CUDA device, ``None`` for any other. ``op`` may also be ``"gram_ns"``: then they
        are of kernels that run the whole iteration, if the backend has any. One with ``"lower"`` is for products that
        hand each other lower halves: see :class:`~dmuon.kernels.choose.NSChoice`.
        """

    def check(self, op: str, config: Mapping[str, Any]) -> None:
        """Raise ValueError unless ``config`` is one that :meth:`build` understands for ``op``."""

    def build(self, op: str, config: Mapping[str, Any]) -> Product:
        """The product ``op`` under ``config``.

        Calling it raises :class:`~dmuon.kernels.gpu.binary.Unsupported`, before anything is written, if it
        cannot serve the operands.
        """


def matmul(A: Tensor, B: Tensor, out: Tensor, alpha: float, beta: float, C: Tensor | None) -> Tensor:
    """out = alpha·A B + beta·C for 2-D or 3-D operands, accumulated in fp32 or wider; ``C`` may be ``out``."""
    if A.dtype == torch.float16 and A.device.type == "cpu":
        return _emulate_half(A, B, out, alpha, beta, C)
    if out.stride(-2) == 1 < out.stride(-1):
        # Column-major: torch would compute into a copy in half precision. Its transpose is row-major.
        matmul(B.mT, A.mT, out.mT, alpha, beta, None if C is None else C.mT)
        return out
    if C is None:
        if alpha == 1:
            return torch.mm(A, B, out=out) if A.ndim == 2 else torch.bmm(A, B, out=out)
        C, beta = out, 0.0
    if C.data_ptr() == out.data_ptr():
        # With `out=` torch would copy C aside first, even onto itself.
        in_place = out.addmm_ if A.ndim == 2 else out.baddbmm_
        return in_place(A, B, beta=beta, alpha=alpha)
    fused = torch.addmm if A.ndim == 2 else torch.baddbmm
    return fused(C, A, B, beta=beta, alpha=alpha, out=out)


_EMULATED_PANEL = 1 << 15
"""Elements of an fp32 panel."""


def _emulate_half(A: Tensor, B: Tensor, out: Tensor, alpha: float, beta: float, C: Tensor | None) -> Tensor:
    """fp16 on a CPU as tensor cores do it — fp32 sums, rounded once — since no CPU kernel is both fast and so exact.

    It serves to check a GPU's numerics, not to be fast: it walks in panels, so that the fp32 copies stay small.
    """
    rows, depth, columns = A.shape[-2], A.shape[-1], B.shape[-1]
    batch = out.numel() // (rows * columns)
    width = min(max(_EMULATED_PANEL // (rows * batch), 64), 256)
    for start in range(0, columns, width):
        part = slice(start, min(start + width, columns))
        total = torch.zeros(*out.shape[:-1], part.stop - start, dtype=torch.float32)
        add = total.addmm_ if A.ndim == 2 else total.baddbmm_
        for k in range(0, depth, width):
            add(A[..., k : k + width].float(), B[..., k : k + width, part].float(), alpha=alpha)
        if C is not None:
            total.add_(C[..., part], alpha=beta)
        out[..., part].copy_(total)
    return out


def add_diagonal(out: Tensor, value: float) -> Tensor:
    """out + value·I, in place."""
    if value:
        out.diagonal(dim1=-2, dim2=-1).add_(value)
    return out
