"""Device side of :mod:`dmuon.kernels.gpu.triton_kernels.sums`. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.triton_kernels.compile import compile_triton
from dmuon.kernels.gpu.triton_kernels.symmetric_kernel import finish, tile_of


def build(spec: KernelSpec) -> Binary:
    """Compile the kernel for ``spec``, which :meth:`SumsFamily.spec` made."""
    options = spec.options
    written = options["vector_out"]
    signature = {
        "parts": "*fp32:16",
        **dict.fromkeys(("C", "out"), f"*{options['out_dtype']}" + ":16" * written),
        "m": "i32" + ":8" * written,
        **dict.fromkeys(("line_c", "line_out", "batch_c", "batch_out"), "i64" + ":8" * written),
        **dict.fromkeys(("alpha", "beta", "diag"), "fp32"),
        **dict.fromkeys(("group", "whole", "splits"), "i32"),
    }
    constexprs = {name.upper(): options[name] for name in ("tile_side", "piece", "write_lower")}
    return compile_triton(spec, sums, signature, constexprs, num_warps=options["warps"], num_stages=1)


@triton.jit
def sums(
    parts,
    C,
    out,
    m,
    line_c,
    line_out,
    batch_c,
    batch_out,
    alpha,
    beta,
    diag,
    group,
    whole,
    splits,
    TILE_SIDE: tl.constexpr,
    PIECE: tl.constexpr,
    WRITE_LOWER: tl.constexpr,
):
    """Of each tile from the one numbered ``whole`` on, add the ``splits`` parts, first to last, and finish it."""
    PIECES: tl.constexpr = TILE_SIDE // PIECE
    tile, piece = tl.program_id(0) // (PIECES * PIECES), tl.program_id(0) % (PIECES * PIECES)
    batch, i, j = tile_of(whole + tile, m, group, TILE_SIDE)
    down, right = piece // PIECES * PIECE, piece % PIECES * PIECE
    r, c = i * TILE_SIDE + down, j * TILE_SIDE + right
    # Above the diagonal, which a tile on it reaches, every piece is another's mirror.
    if r >= c:
        rows, columns = tl.arange(0, PIECE)[:, None], tl.arange(0, PIECE)[None, :]
        first = parts + tile.to(tl.int64) * splits * (TILE_SIDE * TILE_SIDE)
        first += down * TILE_SIDE + right
        total = tl.zeros((PIECE, PIECE), tl.float32)
        for part in range(splits):
            place = first + part.to(tl.int64) * (TILE_SIDE * TILE_SIDE)
            total += tl.load(place + rows * TILE_SIDE + columns)
        C += batch * batch_c
        out += batch * batch_out
        finish(total, r, c, C, out, m, line_c, line_out, alpha, beta, diag, WRITE_LOWER)
