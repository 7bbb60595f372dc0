"""Device side of :mod:`dmuon.kernels.gpu.triton_kernels.prepare`. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.triton_kernels.compile import compile_triton

_DTYPES = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}
_TINY = tl.constexpr(1.1754943508222875e-38)
"""The least normal fp32: a divisor no smaller leaves zero a zero, and has a finite reciprocal."""


def build(spec: KernelSpec) -> Binary:
    """Compile the launch that ``spec.options["part"]`` names."""
    options = spec.options
    signature = {"records": "*i64:16", "scalars": "*fp32:16", "partials": "*fp32:16"}
    names = ("nesterov", "average", "aligned", "block", "parts")
    constexprs = {name.upper(): options[name] for name in names}
    constexprs["GRAD"] = _DTYPES[options["grad_dtype"]]
    constexprs["MOMENTUM"] = _DTYPES[options["momentum_dtype"]]
    constexprs["WORKING"] = _DTYPES[options["dtype"]]
    kernel = {"advance": advance, "scale": scale}[options["part"]]
    return compile_triton(spec, kernel, signature, constexprs, num_warps=options["warps"], num_stages=1)


@triton.jit
def _lerp(start, end, weight):
    """As torch.lerp, exact at both ends."""
    difference = end - start
    return tl.where(weight < 0.5, start + weight * difference, end - difference * (1.0 - weight))


@triton.jit
def _update(momentum, gradient, decay, NESTEROV: tl.constexpr, AVERAGE: tl.constexpr, MOMENTUM: tl.constexpr):
    """What is orthogonalised, rounded as the momentum is, in fp32."""
    update = momentum
    if NESTEROV:
        update = _lerp(gradient, momentum, decay) if AVERAGE else gradient + decay * momentum
    return update.to(MOMENTUM).to(tl.float32)


@triton.jit
def _eights(value, ALIGNED: tl.constexpr):
    """``value``; with ALIGNED, in a form that shows the compiler that it is a multiple of 8."""
    return value // 8 * 8 if ALIGNED else value


@triton.jit
def _lines(record, k: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The first element of a record's matrix ``k``, and the elements from one line to the next."""
    first = tl.load(record + k).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first, _eights(tl.load(record + 5 + k), ALIGNED)


@triton.jit
def _piece(piece, pieces, length, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Line, first column, and which of BLOCK elements from there exist, of a matrix's piece."""
    line = piece // pieces
    start = (piece - line * pieces).to(tl.int64) * BLOCK
    count = _eights(tl.minimum(length - start, BLOCK).to(tl.int32), ALIGNED)
    return line.to(tl.int64), start, tl.arange(0, BLOCK) < count


@triton.jit
def advance(
    records,
    scalars,
    partials,
    NESTEROV: tl.constexpr,
    AVERAGE: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENTUM: tl.constexpr,
    WORKING: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Advance the momentum of one of PARTS parts of a matrix, and measure the update there.

    Partials are the largest magnitude, and the sum of squares in units of it, of each part.
    """
    matrix, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    record = records + 8 * matrix.to(tl.int64)
    gradients, gradient_line = _lines(record, 0, GRAD, ALIGNED)
    momenta, momentum_line = _lines(record, 1, MOMENTUM, ALIGNED)
    lines, length = tl.load(record + 3).to(tl.int32), tl.load(record + 4)
    weight, decay = tl.load(scalars), tl.load(scalars + 1)
    pieces = tl.cdiv(length, BLOCK).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), _TINY, tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for piece in range(part, lines * pieces, PARTS):
        line, start, inside = _piece(piece, pieces, length, BLOCK, ALIGNED)
        gradient = tl.load(gradients + (line * gradient_line + start) + lane, inside, other=0.0)
        gradient = gradient.to(MOMENTUM).to(tl.float32)
        place = momenta + (line * momentum_line + start) + lane
        momentum = tl.load(place, inside, other=0.0).to(tl.float32)
        momentum = _lerp(momentum, gradient, weight) if AVERAGE else decay * momentum + gradient
        rounded = momentum.to(MOMENTUM)
        tl.store(place, rounded, inside)
        update = _update(rounded.to(tl.float32), gradient, decay, NESTEROV, AVERAGE, MOMENTUM)
        # Element by element, so that threads wait for each other once, at the end.
        size = tl.maximum(largest, tl.abs(update))
        shrink, scaled = largest / size, update / size
        squares = squares * shrink * shrink + scaled * scaled
        largest = size
    most = tl.max(largest)
    shrink = largest / most
    partial = partials + 2 * tl.program_id(0).to(tl.int64)
    tl.store(partial, most)
    tl.store(partial + 1, tl.sum(squares * shrink * shrink))


@triton.jit
def scale(
    records,
    scalars,
    partials,
    NESTEROV: tl.constexpr,
    AVERAGE: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENTUM: tl.constexpr,
    WORKING: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write one of PARTS parts of the update, divided by the norm that all partials of its matrix make."""
    matrix, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    partial = partials + 2 * (matrix.to(tl.int64) * PARTS + tl.arange(0, PARTS))
    sizes = tl.load(partial)
    largest = tl.max(sizes)
    shrink = sizes / largest
    norm = tl.sqrt(tl.sum(tl.load(partial + 1) * shrink * shrink))
    # Not a maximum, which would pass over NaN.
    norm = tl.where(norm < _TINY, _TINY, norm)
    record = records + 8 * matrix.to(tl.int64)
    gradients, gradient_line = _lines(record, 0, GRAD, ALIGNED)
    momenta, momentum_line = _lines(record, 1, MOMENTUM, ALIGNED)
    results, result_line = _lines(record, 2, WORKING, ALIGNED)
    lines, length = tl.load(record + 3).to(tl.int32), tl.load(record + 4)
    decay = tl.load(scalars + 1)
    pieces = tl.cdiv(length, BLOCK).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    for piece in range(part, lines * pieces, PARTS):
        line, start, inside = _piece(piece, pieces, length, BLOCK, ALIGNED)
        update = tl.load(momenta + (line * momentum_line + start) + lane, inside, other=0.0).to(tl.float32)
        if NESTEROV:
            gradient = tl.load(gradients + (line * gradient_line + start) + lane, inside, other=0.0)
            gradient = gradient.to(MOMENTUM).to(tl.float32)
            update = _update(update, gradient, decay, NESTEROV, AVERAGE, MOMENTUM)
        result = update / largest / norm
        tl.store(results + (line * result_line + start) + lane, result.to(WORKING), inside)
