"""Device side of :mod:`dmuon.kernels.gpu.triton_kernels.move`. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.triton_kernels.compile import compile_triton
from dmuon.kernels.gpu.triton_kernels.elementwise_kernel import DTYPES, address_of, piece_of, scalar_of


def build(spec: KernelSpec) -> Binary:
    """Compile the kernel for ``spec``, which :meth:`MoveFamily.specs` made."""
    options = spec.options
    aligned = options["aligned"]
    signature = {
        "table": "*i64",
        "directions": f"*{options['dtype']}" + ":16" * aligned,
        "lines": "i32",
        **dict.fromkeys(("length", "line", "batch"), "i64" + ":8" * aligned),
        "parts": "i32",
    }
    constexprs = {"WEIGHT": DTYPES[options["weight_dtype"]], "ALIGNED": aligned, "BLOCK": options["elements"]}
    return compile_triton(spec, move, signature, constexprs, num_warps=options["warps"], num_stages=1)


@triton.jit
def move(
    table,
    directions,
    lines,
    length,
    line,
    batch,
    parts,
    WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one part of a matrix."""
    matrix, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    weights = address_of(table, matrix, 2, WEIGHT, ALIGNED)
    step, keep = scalar_of(table, matrix, 2), scalar_of(table, matrix, 3)
    directions += matrix.to(tl.int64) * batch
    lane = tl.arange(0, BLOCK)
    for piece in range(part, lines * tl.cdiv(length, BLOCK).to(tl.int32), parts):
        row, start, inside = piece_of(piece, length, BLOCK, ALIGNED)
        direction = tl.load(directions + (row * line + start) + lane, inside, other=0.0).to(tl.float32)
        place = weights + (row * length + start) + lane
        weight = keep * tl.load(place, inside, other=0.0).to(tl.float32) + step * direction
        tl.store(place, weight.to(WEIGHT), inside)
