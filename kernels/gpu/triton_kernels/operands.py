"""What the host sides of the Triton kernels share: operands' layouts and alignment, checks, limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Unsupported, pointer
from dmuon.kernels.gpu.calls import Matrices, ProductCall

HIDDEN_ARGS = (pointer(0), pointer(0))
"""What a launch passes after a kernel's own arguments: Triton's global and profiling scratch, which none uses."""

HALF = ("fp16", "bf16")
"""Precisions of operands."""

_LINE_ITEMS = 1 << 23
"""Elements between lines, at most: offsets inside a tile of 256 lines are 32-bit."""


def contiguous_rows(matrices: Matrices) -> bool:
    """Whether a row is contiguous; if not, a column is.

    Raises:
        Unsupported: neither is.
    """
    if matrices.column_stride == 1 or matrices.columns == 1:
        return True
    if matrices.row_stride == 1 or matrices.rows == 1:
        return False
    strides = (matrices.row_stride, matrices.column_stride)
    raise Unsupported(f"triton: rows or columns must be contiguous, got strides {strides}")


def line_stride(matrices: Matrices) -> int:
    """Elements from one contiguous row (column) to the next; 0 where there is one only.

    Raises:
        Unsupported: too many for the kernels' offsets, or nothing is contiguous.
    """
    rows = contiguous_rows(matrices)
    if (matrices.rows if rows else matrices.columns) == 1:
        return 0
    stride = matrices.row_stride if rows else matrices.column_stride
    if not 0 <= stride <= _LINE_ITEMS:
        raise Unsupported(f"triton: lines must be at most {_LINE_ITEMS} elements apart, got {stride}")
    return stride


def batch_stride(matrices: Matrices) -> int:
    """Elements from one matrix to the next; 0 where there is one only."""
    return matrices.batch_stride if matrices.batch > 1 else 0


def vectors(matrices: Matrices) -> bool:
    """Whether 16-byte accesses along contiguous lines touch whole lines and nothing else."""
    length = matrices.columns if contiguous_rows(matrices) else matrices.rows
    return (
        matrices.address % 16 == 0
        and length % 8 == 0
        and line_stride(matrices) % 8 == 0
        and batch_stride(matrices) % 8 == 0
    )


def check_operands(call: ProductCall) -> None:
    """Raise Unsupported unless dtypes and layouts of all operands are served."""
    inputs = [matrices.dtype for matrices in (call.A, call.B) if matrices is not None]
    if call.A.dtype not in HALF or len(set(inputs)) > 1:
        raise Unsupported(f"triton: operands must all be fp16 or all bf16, got {' and '.join(inputs)}")
    if call.out.dtype not in (*HALF, "fp32"):
        raise Unsupported(f"triton: the result must be fp16, bf16 or fp32, got {call.out.dtype}")
    if call.C is not None and call.C.dtype != call.out.dtype:
        raise Unsupported(f"triton: C must have the result's dtype {call.out.dtype}, got {call.C.dtype}")
    for matrices in (call.A, call.B, call.C, call.out):
        if matrices is not None:
            line_stride(matrices)


def check_config(
    kernel: str,
    ops: tuple[str, ...],
    fields: dict[str, tuple[int, ...]],
    optional: dict[str, tuple[Any, ...]],
    op: str,
    config: Mapping[str, Any],
) -> None:
    """Raise ValueError unless ``config`` has all ``fields`` and any of the ``optional`` ones, each with one of its
    values."""
    if op not in ops:
        raise ValueError(f"triton's {kernel} kernel computes {' and '.join(ops)}, got op {op!r}")
    if set(config) - set(optional) != set(fields):
        raise ValueError(
            f"a configuration of triton's {kernel} kernel has {list(fields)}, got {list(config)}"
        )
    for name, value in config.items():
        values = (fields | optional)[name]
        if type(value) is not type(values[0]) or value not in values:
            raise ValueError(f"{name} must be one of {', '.join(map(str, values))}, got {value!r}")


def check_shared(needed: int, config: Mapping[str, Any], arch: Arch) -> None:
    """Raise Unsupported unless a block may have ``needed`` bytes of shared memory."""
    if needed > arch.shared_bytes:
        raise Unsupported(
            f"triton: {dict(config)} needs {needed} bytes of shared memory, {arch.name} has {arch.shared_bytes}"
        )


def elementwise(block_m: int, block_n: int, block_k: int, warps: int) -> bool:
    """Whether a tile is small enough to be read and written element by element without spilling registers."""
    return max(block_m, block_n) <= 64 and (block_m + block_n) * block_k <= 1024 * warps


def check_elementwise(operands: Iterable[Matrices], fits: bool, config: Mapping[str, Any]) -> None:
    """Raise Unsupported unless all lines take 16-byte accesses, or a tile is small enough to do without."""
    if not fits and not all(vectors(operand) for operand in operands):
        raise Unsupported(
            f"triton: tiles as large as those of {dict(config)} need addresses and strides that are multiples of "
            "16 bytes, and lines whose lengths are multiples of 8 elements"
        )


def shared_bytes(arch: Arch, stages: int, stage_bytes: int, result_bytes: int) -> int:
    """Shared memory of a product's block: operand tiles of each stage, and later the result as its threads
    exchange it. On Hopper and Blackwell datacenter GPUs the tiles being multiplied stay there beside those being
    copied; elsewhere they have moved to registers."""
    keeps = arch.capability[0] in (9, 10)
    buffers = stages if keeps else max(stages - 1, 1)
    return max(buffers * stage_bytes, result_bytes) + _BARRIER_BYTES


_BARRIER_BYTES = 64
"""Room for what Blackwell's tensor cores signal on."""


def check_lower(operands: Iterable[Matrices]) -> None:
    """Raise Unsupported unless all rows are contiguous: read along columns, a lower half would be an upper one."""
    if not all(contiguous_rows(operand) for operand in operands):
        raise Unsupported("triton: a symmetric operand that has its lower half alone needs contiguous rows")
