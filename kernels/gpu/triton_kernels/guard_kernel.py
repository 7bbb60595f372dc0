"""Device side of :mod:`dmuon.kernels.gpu.triton_kernels.guard`. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.triton_kernels.compile import compile_triton

_DTYPES = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}


def build(spec: KernelSpec) -> Binary:
    """Compile the launch that ``spec.options["part"]`` names."""
    options = spec.options
    signature = {"records": "*i64:16", "found": "*i32:16"}
    constexprs = {name.upper(): options[name] for name in ("aligned", "block", "parts")}
    constexprs["DTYPE"] = _DTYPES[options["dtype"]]
    kernel = {"look": look, "skip": skip}[options["part"]]
    if kernel is skip:
        signature["skipped"] = "*i32:16"
    return compile_triton(spec, kernel, signature, constexprs, num_warps=options["warps"], num_stages=1)


@triton.jit
def _eights(value, ALIGNED: tl.constexpr):
    """``value``; with ALIGNED, in a form that shows the compiler that it is a multiple of 8."""
    return value // 8 * 8 if ALIGNED else value


@triton.jit
def _matrix(records, index, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """First element, number and length of the lines, and elements from one line to the next."""
    record = records + 4 * index.to(tl.int64)
    first = tl.load(record).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    lines, length = tl.load(record + 1).to(tl.int32), tl.load(record + 2)
    return first, lines, length, _eights(tl.load(record + 3), ALIGNED)


@triton.jit
def _piece(first, stride, piece, pieces, length, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Addresses of BLOCK elements of a matrix's piece, and which of them exist."""
    line = piece // pieces
    start = (piece - line * pieces).to(tl.int64) * BLOCK
    count = _eights(tl.minimum(length - start, BLOCK).to(tl.int32), ALIGNED)
    lane = tl.arange(0, BLOCK)
    return first + (line.to(tl.int64) * stride + start) + lane, lane < count


@triton.jit
def look(
    records,
    found,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Note for one of PARTS parts of a matrix whether any element is NaN or infinite."""
    matrix, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    first, lines, length, stride = _matrix(records, matrix, DTYPE, ALIGNED)
    pieces = tl.cdiv(length, BLOCK).to(tl.int32)
    bad = tl.zeros((BLOCK,), tl.int1)
    for piece in range(part, lines * pieces, PARTS):
        addresses, inside = _piece(first, stride, piece, pieces, length, BLOCK, ALIGNED)
        value = tl.load(addresses, inside, other=0.0).to(tl.float32)
        bad |= ~(tl.abs(value) < float("inf"))
    tl.store(found + tl.program_id(0).to(tl.int64), tl.max(bad.to(tl.int32)))


@triton.jit
def skip(
    records,
    found,
    skipped,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Zero one of PARTS parts of a matrix if any part was found bad; the first one counts it."""
    matrix, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    if tl.max(tl.load(found + matrix.to(tl.int64) * PARTS + tl.arange(0, PARTS))) > 0:
        first, lines, length, stride = _matrix(records, matrix, DTYPE, ALIGNED)
        pieces = tl.cdiv(length, BLOCK).to(tl.int32)
        for piece in range(part, lines * pieces, PARTS):
            addresses, inside = _piece(first, stride, piece, pieces, length, BLOCK, ALIGNED)
            tl.store(addresses, tl.zeros((BLOCK,), DTYPE), inside)
        if part == 0:
            tl.store(skipped + matrix, tl.load(skipped + matrix) + 1)
