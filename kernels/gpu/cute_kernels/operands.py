"""What the host sides of the CuTe DSL kernels share: operands' layouts and alignment, checks, the order of tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Unsupported
from dmuon.kernels.gpu.calls import Matrices, ProductCall

OPS = ("gram", "symmetric_product")

HALF = ("bf16", "fp16")
"""Precisions of operands."""

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Of the dtypes that kernels read and write."""

BAND = 8
"""Tile rows that are walked together, column by column: about the root of the number of multiprocessors."""

Complaint = Callable[[Matrices, bool], "str | None"]
"""Why a kernel cannot move matrices by rows (``False``) or columns; ``None`` if it can."""


def distances(matrices: Matrices, by_columns: bool) -> dict[str, int]:
    """Bytes, by name, that have to be multiples of 16 for copies so wide of rows (columns)."""
    lines, kind, count = matrices.row_stride, "row", matrices.rows
    if by_columns:
        lines, kind, count = matrices.column_stride, "column", matrices.columns
    found = {"first element": matrices.address}
    if count > 1:
        found[f"{kind} stride"] = lines * matrices.item_bytes
    if matrices.batch > 1:
        found["batch stride"] = matrices.batch_stride * matrices.item_bytes
    return found


def complaint(matrices: Matrices, by_columns: bool) -> str | None:
    """Why rows (columns) cannot be moved 16 bytes at a time; ``None`` if they can."""
    along, length = matrices.column_stride, matrices.columns
    if by_columns:
        along, length = matrices.row_stride, matrices.rows
    if length > 1 and along != 1:
        strides = f"{matrices.row_stride}, {matrices.column_stride}"
        return f"must be contiguous along a row or a column, got strides {strides}"
    for name, value in distances(matrices, by_columns).items():
        if value % 16:
            return f"must have its {name} at a multiple of 16 bytes, got {value}"
    return None


def move_by_columns(matrices: Matrices, complaint: Complaint) -> bool:
    """Whether to move the matrices by columns: because rows cannot be, and columns can or are contiguous at least."""
    contiguous = matrices.column_major and not matrices.row_major
    return complaint(matrices, False) is not None and (contiguous or complaint(matrices, True) is None)


def check_operands(call: ProductCall, complaint: Complaint) -> None:
    """Raise Unsupported unless dtypes and layouts of all operands are served."""
    if call.A.dtype not in HALF or call.out.dtype not in ITEM_BYTES:
        raise Unsupported(
            f"needs fp16 or bf16 operands, got {call.A.dtype} with a result in {call.out.dtype}"
        )
    if call.B is not None and call.B.dtype != call.A.dtype:
        raise Unsupported(f"A and B must have one dtype, got {call.A.dtype} and {call.B.dtype}")
    if call.C is not None and call.C.dtype != call.out.dtype:
        raise Unsupported(f"C and the result must have one dtype, got {call.C.dtype} and {call.out.dtype}")
    for name, matrices in {"A": call.A, "B": call.B, "C": call.C, "out": call.out}.items():
        if matrices is not None:
            reason = complaint(matrices, move_by_columns(matrices, complaint))
            if reason:
                raise Unsupported(f"{name} {reason}")


def check_shared(needed: int, config: Mapping[str, Any], call: ProductCall, arch: Arch) -> None:
    """Raise Unsupported unless a block may have ``needed`` bytes of shared memory."""
    if needed > arch.shared_bytes:
        raise Unsupported(
            f"{dict(config)} with a result in {call.out.dtype} needs {needed} bytes of shared "
            f"memory, {arch.name} has {arch.shared_bytes}"
        )
