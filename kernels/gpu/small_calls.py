"""What the host side of a whole-iteration kernel is told: many small matrices, orthogonalised in one launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from dmuon.kernels.coefficients import Triple
from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.precision import precision_name


@dataclass(frozen=True)
class Ragged:
    """Matrices of one number of rows and different numbers of columns, listed in device memory.

    ``table`` is the address of an int64 array (batch, 3): of each matrix its address, its columns, and the
    elements from one line to the next. Lines are rows, or columns with ``row_major=False``; each is contiguous.

    Args:
        table: address of the array.
        dtype: of the matrices.
        batch: how many.
        rows: of each.
        row_major: whether rows are contiguous; else columns are.
        aligned: whether every line of every matrix starts at a multiple of 16 bytes and has a length that is one.
    """

    table: int
    dtype: str
    batch: int
    rows: int
    row_major: bool
    aligned: bool

    @classmethod
    def of(cls, tensors: Sequence[Tensor], table: Tensor) -> Ragged:
        """Of (m, n_i) ``tensors``, and fill ``table``, int64 (batch, 3) on their device.

        The launch takes them in this order: put the widest first, so that it does not end on a lone long one.

        Raises:
            ValueError: they differ in rows, dtype or layout, or neither their rows nor their columns are
                contiguous.
        """
        first = tensors[0]
        row_major = all(_contiguous(tensor, -1) for tensor in tensors)
        if not row_major and not all(_contiguous(tensor, -2) for tensor in tensors):
            raise ValueError("the matrices of a ragged batch must all be row-major or all be column-major")
        if any(tensor.dtype != first.dtype or tensor.shape[0] != first.shape[0] for tensor in tensors):
            kinds = sorted({f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors})
            raise ValueError(
                f"the matrices of a ragged batch must agree in rows and dtype, got {', '.join(kinds)}"
            )
        line = 0 if row_major else 1
        records = [(tensor.data_ptr(), tensor.shape[1], tensor.stride(line)) for tensor in tensors]
        table.copy_(torch.tensor(records, dtype=torch.int64))
        size = first.element_size()
        aligned = all(
            address % 16 == 0 and stride * size % 16 == 0 and tensor.shape[1 - line] * size % 16 == 0
            for (address, _, stride), tensor in zip(records, tensors, strict=True)
        )
        return cls(
            table.data_ptr(), precision_name(first.dtype), len(tensors), first.shape[0], row_major, aligned
        )


def _contiguous(tensor: Tensor, dim: int) -> bool:
    return tensor.stride(dim) == 1 or tensor.shape[dim] == 1


@dataclass(frozen=True)
class SmallCall:
    """One whole Newton–Schulz iteration over a batch of small matrices, each (m, n) with m ≤ n.

    Each matrix becomes what :func:`dmuon.kernels.run.run_ns` makes of it, with X, R, P and Q rounded to the
    working precision where it rounds them. ``out`` may be ``X`` itself. Tall matrices come transposed: as
    column-major ones.

    Args:
        X: input. With ``normalize`` any fp32, fp16 or bf16 matrices; without, in the working precision and
            already scaled to a Frobenius norm of at most 1.
        out: result, of X's kind (uniform or ragged) and shapes, in fp32, fp16 or bf16, row- or column-major.
        dtype: working precision, ``"fp16"`` or ``"bf16"``.
        steps: (a, b, c) of each step.
        restarts: 0-based steps run right after a restart, increasing.
        normalize: divide each matrix by its norm first (:mod:`dmuon.kernels.normalize`).
    """

    X: Matrices | Ragged
    out: Matrices | Ragged
    dtype: str
    steps: tuple[Triple, ...]
    restarts: tuple[int, ...] = ()
    normalize: bool = False

    @property
    def segments(self) -> tuple[int, ...]:
        """How many steps run between restarts."""
        cuts = (0, *self.restarts, len(self.steps))
        return tuple(stop - start for start, stop in pairwise(cuts))


class SmallFamily(Protocol):
    """One whole-iteration kernel in all its configurations; its module imports no DSL."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Its source files, host and device, relative to the kernels folder."""

    def configs(self, m: int, n: int, dtype: str, arch: Arch) -> list[dict[str, Any]]:
        """The configurations worth timing on (m, n) matrices; empty if it cannot serve."""

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise ValueError, naming field and value, unless ``config`` is one it understands."""

    def spec(self, call: SmallCall, config: Mapping[str, Any], arch: Arch) -> KernelSpec:
        """What to compile for ``call``: a function of dtypes, layouts, m's padding, segments and config.

        Raises:
            Unsupported: arch, dtype, layout or m cannot be served; the message says which and why.
        """

    def launch(self, call: SmallCall, config: Mapping[str, Any], binary: Binary) -> Launch:
        """The launch that performs ``call``."""
