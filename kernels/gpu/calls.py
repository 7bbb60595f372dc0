"""What the host side of a kernel is told about a product: addresses, shapes and strides, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dmuon.kernels.precision import precision_name


@dataclass(frozen=True)
class Matrices:
    """A batch of matrices in memory; strides in elements."""

    address: int
    dtype: str
    batch: int
    rows: int
    columns: int
    batch_stride: int
    row_stride: int
    column_stride: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Matrices:
        """Of a (m, n) or (B, m, n) tensor."""
        batched = tensor if tensor.ndim == 3 else tensor.unsqueeze(0)
        return cls(tensor.data_ptr(), precision_name(tensor.dtype), *batched.shape, *batched.stride())

    @property
    def transposed(self) -> Matrices:
        """The same memory with rows and columns exchanged."""
        return replace(
            self,
            rows=self.columns,
            columns=self.rows,
            row_stride=self.column_stride,
            column_stride=self.row_stride,
        )

    @property
    def item_bytes(self) -> int:
        return {"fp64": 8, "fp32": 4}.get(self.dtype, 2)

    @property
    def row_major(self) -> bool:
        """Whether a row is contiguous."""
        return self.column_stride == 1

    @property
    def column_major(self) -> bool:
        """Whether a column is contiguous."""
        return self.row_stride == 1


@dataclass(frozen=True)
class ProductCall:
    """One call of ``gram`` (``B`` is ``None``), ``symmetric_product`` or ``apply``: see
    :data:`dmuon.kernels.backends.base.Product` for what each computes. ``C`` may be ``out`` itself. ``scratch`` is
    memory for a configuration that needs some."""

    op: str
    A: Matrices
    B: Matrices | None
    C: Matrices | None
    out: Matrices
    alpha: float = 1.0
    beta: float = 0.0
    diag: float = 0.0
    scratch: Matrices | None = None
