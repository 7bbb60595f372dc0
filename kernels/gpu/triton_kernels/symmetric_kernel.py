"""Device side of :mod:`dmuon.kernels.gpu.triton_kernels.symmetric`. Imports Triton.

One block computes one tile on or below the diagonal of alpha·A Bᵀ + beta·C + diag·I and writes it twice, as it is
and transposed to its mirror.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.triton_kernels.compile import compile_triton


def build(spec: KernelSpec) -> Binary:
    """Compile the kernel for ``spec``, which :meth:`SymmetricFamily.spec` made."""
    options = spec.options
    by_rows = options["by_rows"]
    read, written = options["vector_in"], options["vector_out"]
    signature = {
        **dict.fromkeys(("A", "B"), f"*{options['dtype']}" + ":16" * read),
        **dict.fromkeys(("C", "out"), f"*{options['out_dtype']}" + ":16" * written),
        "m": "i32" + ":8" * (written or (read and not by_rows)),
        "n": "i32" + ":8" * (read and by_rows),
        **dict.fromkeys(("line_a", "line_b", "batch_a", "batch_b"), "i64" + ":8" * read),
        **dict.fromkeys(("line_c", "line_out", "batch_c", "batch_out"), "i64" + ":8" * written),
        **dict.fromkeys(("alpha", "beta", "diag"), "fp32"),
        "group": "i32",
    }
    constexprs = {
        "BY_ROWS": by_rows,
        **{name.upper(): options[name] for name in ("block", "block_k")},
    }
    return compile_triton(
        spec,
        symmetric,
        signature,
        constexprs,
        num_warps=options["warps"],
        num_stages=options["stages"],
        registers=Arch.registers_per_thread,
    )


@triton.jit
def symmetric(
    A,
    B,
    C,
    out,
    m,
    n,
    line_a,
    line_b,
    line_c,
    line_out,
    batch_a,
    batch_b,
    batch_c,
    batch_out,
    alpha,
    beta,
    diag,
    group,
    BY_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    side = tl.cdiv(m, BLOCK)
    tiles = side.to(tl.int64) * (side + 1) // 2
    batch = tl.program_id(0) // tiles
    i, j = lower_tile((tl.program_id(0) - batch * tiles).to(tl.int32), side, group)
    lines, depth = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    rows, columns = i * BLOCK + lines, j * BLOCK + lines

    # Scalars advance, and 32-bit offsets inside a tile stay: pointers of a whole tile would cost registers.
    if BY_ROWS:
        left = A + batch * batch_a + (i * BLOCK).to(tl.int64) * line_a
        right = B + batch * batch_b + (j * BLOCK).to(tl.int64) * line_b
        inner_left = lines[:, None] * line_a.to(tl.int32) + depth[None, :]
        inner_right = lines[None, :] * line_b.to(tl.int32) + depth[:, None]
    else:
        left = A + batch * batch_a + i * BLOCK
        right = B + batch * batch_b + j * BLOCK
        inner_left = lines[:, None] + depth[None, :] * line_a.to(tl.int32)
        inner_right = lines[None, :] + depth[:, None] * line_b.to(tl.int32)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, n, BLOCK_K):
        a = tl.load(left + inner_left, (rows < m)[:, None] & (depth < n - k)[None, :], other=0.0)
        b = tl.load(right + inner_right, (columns < m)[None, :] & (depth < n - k)[:, None], other=0.0)
        total = tl.dot(a, b, total)
        left += BLOCK_K if BY_ROWS else BLOCK_K * line_a
        right += BLOCK_K if BY_ROWS else BLOCK_K * line_b

    total *= alpha
    inside = (rows < m)[:, None] & (columns < m)[None, :]
    if beta != 0:
        offsets = rows.to(tl.int64)[:, None] * line_c + columns[None, :]
        total += beta * tl.load(C + batch * batch_c + offsets, inside, other=0.0)
    on_diagonal = rows[:, None] == columns[None, :]
    tile = (total + tl.where(on_diagonal, diag, 0.0)).to(out.dtype.element_ty)
    target = out + batch * batch_out
    if i == j:
        # The product of rounded operands need not be symmetric: its lower half is the result.
        tile = tl.where(rows[:, None] >= columns[None, :], tile, tl.trans(tile))
    else:
        mirror = columns.to(tl.int64)[:, None] * line_out + rows[None, :]
        tl.store(target + mirror, tl.trans(tile), tl.trans(inside))
    tl.store(target + rows.to(tl.int64)[:, None] * line_out + columns[None, :], tile, inside)


@triton.jit
def lower_tile(index, side, group):
    """Row and column of tile ``index`` among those on and below the diagonal of ``side`` tiles a side.

    Bands of group tile rows, top to bottom, and column by column in a band: blocks that run at the same time
    then read few different rows of tiles. As many tiles lie above tile row r of a triangle as in a triangle of
    r rows, so a tile's band is that of its row in plain row order.
    """
    first = triangle_row(index) // group * group
    height = tl.minimum(group, side - first)
    local = (index - triangle(first)).to(tl.int32)
    beyond = local - first * height
    row = triangle_row(tl.maximum(beyond, 0))
    i = tl.where(beyond < 0, local % height, row)
    j = tl.where(beyond < 0, local // height, (first + beyond - triangle(row)).to(tl.int32))
    return first + i, j


@triton.jit
def triangle_row(index):
    """The row of element ``index`` < 2³¹ of a triangle in row order; the square root is off by one at most."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row -= (triangle(row) > index).to(tl.int32)
    row += (triangle(row + 1) <= index).to(tl.int32)
    return row


@triton.jit
def triangle(rows):
    """Elements of a triangle of ``rows`` rows."""
    return rows.to(tl.int64) * (rows + 1) // 2
