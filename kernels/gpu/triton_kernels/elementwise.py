"""What the host sides of the elementwise kernels of a step share: the table of matrices, and how blocks divide them.

Equal matrices move together. The results of Newton–Schulz lie in one tensor; gradients, momenta and weights are
wherever their owners keep them, each contiguous, and a *table* in device memory says where. What differs between
matrices and from step to step is there too, so that a captured graph follows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon.kernels.gpu.binary import Launch, Unsupported, i32, i64, pointer
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.triton_kernels.operands import HIDDEN_ARGS

FIELDS = 5
"""int64 words of a matrix in the table: the addresses of its gradient, momentum and weight, then 1 − μ and μ of its
momentum as two fp32, then α and β of W ← βW + αO as two fp32."""

MOST_PARTS = 1024
"""Blocks that one matrix is divided among, at most."""

CONFIG = {"elements": 1024, "warps": 4}
"""``elements`` that a block handles at a time, and its ``warps``."""

EXACT_DTYPES, WEIGHT_DTYPES = ("fp32", "bf16"), ("fp32", "bf16", "fp16")


def fill_table(
    addresses: Sequence[tuple[int, int, int]],
    scalars: Sequence[tuple[float, float, float, float]],
    *,
    pinned: bool = False,
) -> Tensor:
    """The table, int64 (count, :data:`FIELDS`), on the host."""
    table = torch.empty(len(addresses), FIELDS, dtype=torch.int64, pin_memory=pinned)
    table[:, :3] = torch.tensor(addresses, dtype=torch.int64)
    scalars_of(table).copy_(torch.tensor(scalars, dtype=torch.float32))
    return table


def scalars_of(table: Tensor) -> Tensor:
    """A view of the scalars of ``table``, fp32 (count, 4): 1 − μ, μ, α and β."""
    return table.view(torch.float32)[:, 6:]


def lines_of(matrices: Matrices) -> tuple[int, int, int]:
    """Number and length of the lines that each matrix consists of, and elements from one to the next.

    Raises:
        Unsupported: rows are not contiguous.
    """
    if not matrices.row_major and matrices.columns > 1:
        raise Unsupported(f"triton: rows must be contiguous, got column stride {matrices.column_stride}")
    if matrices.rows == 1 or matrices.row_stride == matrices.columns:
        return 1, matrices.rows * matrices.columns, 0
    return matrices.rows, matrices.columns, matrices.row_stride


def wide(matrices: Matrices) -> bool:
    """Whether every line starts at a multiple of 16 bytes and is a multiple of 8 elements long."""
    _, length, stride = lines_of(matrices)
    return matrices.address % 16 == 0 and not (length % 8 or stride % 8 or matrices.batch_stride % 8)


def parts_of(matrices: Matrices, elements: int) -> int:
    """How many blocks share each matrix: some thousands in all, none always idle.

    Raises:
        Unsupported: a grid does not hold them.
    """
    lines, length, _ = lines_of(matrices)
    parts = min(lines * -(-length // elements), -(-4096 // matrices.batch), MOST_PARTS)
    if matrices.batch * parts >= 1 << 31:
        raise Unsupported(f"triton: {matrices.batch * parts} blocks are more than a grid holds")
    return parts


def launch_over(matrices: Matrices, elements: int, *addresses: int) -> Launch:
    """The launch of a kernel that takes ``addresses``, then how ``matrices`` lie and how many blocks share each."""
    lines, length, stride = lines_of(matrices)
    parts = parts_of(matrices, elements)
    sizes = (i32(lines), i64(length), i64(stride), i64(matrices.batch_stride), i32(parts))
    return Launch((matrices.batch * parts, 1, 1), (*map(pointer, addresses), *sizes, *HIDDEN_ARGS))
