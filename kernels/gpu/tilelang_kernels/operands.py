"""What the host sides of the TileLang kernels share: layouts, alignment, and arguments by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmuon.kernels.gpu.binary import Binary, Launch, TensorMap, Unsupported, pointer
from dmuon.kernels.gpu.calls import Matrices

HALF = ("fp16", "bf16")
"""Precisions of operands."""

ITEM_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
"""Of the dtypes that kernels read and write."""

LINE_BYTES = 16
"""Copies are this wide: every line of every matrix must start at a multiple."""


def complaint(matrices: Matrices) -> str | None:
    """Why rows cannot be copied as they are; ``None`` if they can."""
    if matrices.columns > 1 and matrices.column_stride != 1:
        return f"must have contiguous rows, got strides {matrices.row_stride}, {matrices.column_stride}"
    places = {"address": matrices.address}
    if matrices.rows > 1:
        places["row stride in bytes"] = matrices.row_stride * matrices.item_bytes
    if matrices.batch > 1:
        places["batch stride in bytes"] = matrices.batch_stride * matrices.item_bytes
    for name, value in places.items():
        if value <= 0 or value % LINE_BYTES:
            return f"must have its {name} a multiple of {LINE_BYTES}, got {value}"
    return None


def by_lines(name: str, matrices: Matrices) -> tuple[Matrices, bool]:
    """The matrices with contiguous rows, and whether they are transposed for that.

    Raises:
        Unsupported: neither rows nor columns can be copied; the message says why.
    """
    reason = complaint(matrices)
    if reason is None:
        return matrices, False
    turned = matrices.transposed
    if complaint(turned) is None:
        return turned, True
    raise Unsupported(f"tilelang: {name} {reason}")


def line_bytes(matrices: Matrices) -> int:
    """From one row to the next; of a lone one, which never uses it, something that is valid."""
    if matrices.rows > 1:
        return matrices.row_stride * matrices.item_bytes
    return -(-matrices.columns * matrices.item_bytes // LINE_BYTES) * LINE_BYTES


def batch_bytes(matrices: Matrices) -> int:
    """From one matrix to the next; of a lone one, something that is valid."""
    return matrices.batch_stride * matrices.item_bytes if matrices.batch > 1 else line_bytes(matrices)


def launch_by_name(
    binary: Binary, blocks: int, matrices: Mapping[str, Matrices], scalars: Mapping[str, bytes]
) -> Launch:
    """A launch of ``blocks`` thread blocks, with arguments in the order of the binary's ``extra["params"]``.

    Matrices are passed as their address, or as a tensor map where the kernel has a parameter ``NAME_desc``. What
    box and swizzle that has is TileLang's choice, kept in ``extra["maps"]``.
    """
    maps = binary.extra["maps"]
    args = [
        _tensor_map(matrices[name.removesuffix("_desc")], **maps[name])
        if name in maps
        else pointer(matrices[name].address)
        if name in matrices
        else scalars[name]
        for name in binary.extra["params"]
    ]
    return Launch((blocks, 1, 1), tuple(args))


def _tensor_map(matrices: Matrices, box: list[int], swizzle: int, **_: Any) -> TensorMap:
    shape = (matrices.columns, matrices.rows, matrices.batch)
    strides = (line_bytes(matrices), batch_bytes(matrices))
    return TensorMap(matrices.address, matrices.dtype, shape, strides, tuple(box), swizzle)
