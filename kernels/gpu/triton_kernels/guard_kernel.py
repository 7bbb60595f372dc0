"""Device side of :mod:`dmuon.kernels.gpu.triton_kernels.guard`. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.triton_kernels.compile import compile_triton
from dmuon.kernels.gpu.triton_kernels.elementwise import MOST_PARTS
from dmuon.kernels.gpu.triton_kernels.elementwise_kernel import piece_of


def build(spec: KernelSpec) -> Binary:
    """Compile the launch that ``spec.options["part"]`` names."""
    options = spec.options
    if options["part"] == "count":
        signature = {"found": "*i32:16", "counter": "*i32", "parts": "i32"}
        return compile_triton(spec, count, signature, {"MOST": MOST_PARTS}, num_warps=1, num_stages=1)
    aligned = options["aligned"]
    signature = {
        "values": f"*{options['dtype']}" + ":16" * aligned,
        "found": "*i32:16",
        "lines": "i32",
        **dict.fromkeys(("length", "line", "batch"), "i64" + ":8" * aligned),
        "parts": "i32",
    }
    constexprs = {"ALIGNED": aligned, "BLOCK": options["elements"]}
    return compile_triton(spec, look, signature, constexprs, num_warps=options["warps"], num_stages=1)


@triton.jit
def look(values, found, lines, length, line, batch, parts, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Note for one part of a matrix whether any element is NaN or infinite."""
    matrix, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    values += matrix.to(tl.int64) * batch
    lane = tl.arange(0, BLOCK)
    bad = tl.zeros((BLOCK,), tl.int1)
    for piece in range(part, lines * tl.cdiv(length, BLOCK).to(tl.int32), parts):
        row, start, inside = piece_of(piece, length, BLOCK, ALIGNED)
        value = tl.load(values + (row * line + start) + lane, inside, other=0.0).to(tl.float32)
        bad |= ~(tl.abs(value) < float("inf"))
    tl.store(found + tl.program_id(0).to(tl.int64), tl.max(bad.to(tl.int32)))


@triton.jit
def count(found, counter, parts, MOST: tl.constexpr):
    """Count a matrix if any of its parts was found bad."""
    every = tl.arange(0, MOST)
    bad = tl.load(found + tl.program_id(0).to(tl.int64) * parts + every, every < parts, other=0)
    if tl.max(bad) > 0:
        tl.atomic_add(counter, 1)
