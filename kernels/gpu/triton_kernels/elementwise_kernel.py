"""What the device sides of the elementwise kernels of a step share. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

DTYPES = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}


@triton.jit
def address_of(table, matrix, FIELD: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a matrix's gradient (FIELD 0), momentum (1) or weight (2) is."""
    first = tl.load(table + 5 * matrix.to(tl.int64) + FIELD).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(first, 16) if ALIGNED else first


@triton.jit
def scalar_of(table, matrix, K: tl.constexpr):
    """A matrix's 1 − μ (K 0), μ (1), α (2) or β (3)."""
    return tl.load((table + 5 * matrix.to(tl.int64) + 3).to(tl.pointer_type(tl.float32)) + K)


@triton.jit
def piece_of(piece, length, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Line and first column of a matrix's piece, and which of BLOCK elements from there exist."""
    pieces = tl.cdiv(length, BLOCK).to(tl.int32)
    line = piece // pieces
    start = (piece - line * pieces).to(tl.int64) * BLOCK
    count = tl.minimum(length - start, BLOCK).to(tl.int32)
    if ALIGNED:
        count = count // 8 * 8  # shows the compiler that it is a multiple of 8
    return line.to(tl.int64), start, tl.arange(0, BLOCK) < count
