"""Device side of :mod:`dmuon.kernels.gpu.triton_kernels.prepare`. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.triton_kernels.compile import compile_triton
from dmuon.kernels.gpu.triton_kernels.elementwise import MOST_PARTS
from dmuon.kernels.gpu.triton_kernels.elementwise_kernel import DTYPES, address_of, piece_of, scalar_of

_TINY = tl.constexpr(1.1754943508222875e-38)
"""The least normal fp32: a divisor no smaller leaves zero a zero, and has a finite reciprocal."""


def build(spec: KernelSpec) -> Binary:
    """Compile the launch that ``spec.options["part"]`` names."""
    options = spec.options
    aligned = ":8" * options["aligned"]
    signature = {
        "table": "*i64",
        "partials": "*fp32:16",
        "results": f"*{options['dtype']}" + ":16" * options["aligned"],
        "lines": "i32",
        **dict.fromkeys(("length", "line", "batch"), "i64" + aligned),
        "parts": "i32",
    }
    constexprs = {name.upper(): options[name] for name in ("nesterov", "aligned")}
    constexprs["BLOCK"] = options["elements"]
    constexprs["GRAD"] = DTYPES[options["grad_dtype"]]
    constexprs["MOMENTUM"] = DTYPES[options["momentum_dtype"]]
    constexprs["MOST"] = MOST_PARTS
    kernel = {"advance": advance, "scale": scale}[options["part"]]
    return compile_triton(spec, kernel, signature, constexprs, num_warps=options["warps"], num_stages=1)


@triton.jit
def _lerp(start, end, weight):
    """As torch.lerp, exact at both ends."""
    difference = end - start
    return tl.where(weight < 0.5, start + weight * difference, end - difference * (1.0 - weight))


@triton.jit
def _update(momentum, gradient, decay, NESTEROV: tl.constexpr, MOMENTUM: tl.constexpr):
    """What is orthogonalised, rounded as the momentum is, in fp32."""
    update = momentum
    if NESTEROV:
        update = _lerp(gradient, momentum, decay)
    return update.to(MOMENTUM).to(tl.float32)


@triton.jit
def advance(
    table,
    partials,
    results,
    lines,
    length,
    line,
    batch,
    parts,
    NESTEROV: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """Advance the momentum of one part of a matrix, and measure the update there.

    Partials are the largest magnitude, and the sum of squares in units of it, of each part.
    """
    matrix, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    gradients = address_of(table, matrix, 0, GRAD, ALIGNED)
    momenta = address_of(table, matrix, 1, MOMENTUM, ALIGNED)
    weight, decay = scalar_of(table, matrix, 0), scalar_of(table, matrix, 1)
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), _TINY, tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for piece in range(part, lines * tl.cdiv(length, BLOCK).to(tl.int32), parts):
        row, start, inside = piece_of(piece, length, BLOCK, ALIGNED)
        first = row * length + start
        gradient = tl.load(gradients + first + lane, inside, other=0.0)
        gradient = gradient.to(MOMENTUM).to(tl.float32)
        place = momenta + first + lane
        momentum = tl.load(place, inside, other=0.0).to(tl.float32)
        rounded = _lerp(momentum, gradient, weight).to(MOMENTUM)
        tl.store(place, rounded, inside)
        update = _update(rounded.to(tl.float32), gradient, decay, NESTEROV, MOMENTUM)
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
    table,
    partials,
    results,
    lines,
    length,
    line,
    batch,
    parts,
    NESTEROV: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """Write one part of the update, divided by the norm that all partials of its matrix make."""
    matrix, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    every = tl.arange(0, MOST)
    partial = partials + 2 * (matrix.to(tl.int64) * parts + every)
    sizes = tl.load(partial, every < parts, other=_TINY)
    largest = tl.max(sizes)
    shrink = sizes / largest
    norm = tl.sqrt(tl.sum(tl.load(partial + 1, every < parts, other=0.0) * shrink * shrink))
    # Not a maximum, which would pass over NaN.
    norm = tl.where(norm < _TINY, _TINY, norm)
    gradients = address_of(table, matrix, 0, GRAD, ALIGNED)
    momenta = address_of(table, matrix, 1, MOMENTUM, ALIGNED)
    decay = scalar_of(table, matrix, 1)
    results += matrix.to(tl.int64) * batch
    lane = tl.arange(0, BLOCK)
    for piece in range(part, lines * tl.cdiv(length, BLOCK).to(tl.int32), parts):
        row, start, inside = piece_of(piece, length, BLOCK, ALIGNED)
        first = row * length + start
        update = tl.load(momenta + first + lane, inside, other=0.0).to(tl.float32)
        if NESTEROV:
            gradient = tl.load(gradients + first + lane, inside, other=0.0)
            update = _update(update, gradient.to(MOMENTUM).to(tl.float32), decay, NESTEROV, MOMENTUM)
        result = update / largest / norm
        tl.store(results + (row * line + start) + lane, result.to(results.dtype.element_ty), inside)
