"""Device side of :mod:`dmuon.kernels.gpu.triton_kernels.symmetric`. Imports Triton.

One block computes one tile on or below the diagonal of alpha·A Bᵀ + beta·C + diag·I and writes it twice, as it is
and transposed to its mirror (or once, if only the lower half is wanted). Tiles of an incomplete last wave may be
divided: then a block multiplies part of the inner dimension and leaves an fp32 tile, for
:mod:`dmuon.kernels.gpu.triton_kernels.sums_kernel` to add up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.triton_kernels.compile import compile_triton
from dmuon.kernels.gpu.triton_kernels.tile_kernel import add_product


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
        "parts": "*fp32:16",
        **dict.fromkeys(("whole", "splits"), "i32"),
        "chunk": "i32:16",
    }
    names = ("by_rows", "block", "block_k", "read_lower", "write_lower", "split")
    constexprs = {name.upper(): options[name] for name in names}
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
    parts,
    whole,
    splits,
    chunk,
    BY_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    READ_LOWER: tl.constexpr,
    WRITE_LOWER: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """With SPLIT, of each tile from the one numbered ``whole`` on, ``splits`` blocks take ``chunk`` columns of A."""
    index, start, stop = tl.program_id(0), 0, n
    part = tl.maximum(index - whole, 0)
    if SPLIT:
        start = part % splits * chunk
        stop = tl.where(index < whole, n, tl.minimum(start + chunk, n))
        index = tl.minimum(index, whole) + part // splits
    batch, i, j = tile_of(index, m, group, BLOCK)
    r, c = i * BLOCK, j * BLOCK
    A += batch * batch_a
    B += batch * batch_b
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    if READ_LOWER:
        end_r, end_c = r + BLOCK, c + BLOCK
        total = add_lower(total, A, B, line_a, line_b, r, c, m, 0, c, BLOCK_K, "below", "below")
        total = add_lower(
            total, A, B, line_a, line_b, r, c, m, c, tl.minimum(end_c, m), BLOCK_K, "across", "across"
        )
        total = add_lower(total, A, B, line_a, line_b, r, c, m, end_c, r, BLOCK_K, "below", "above")
        if i != j:
            total = add_lower(
                total, A, B, line_a, line_b, r, c, m, r, tl.minimum(end_r, m), BLOCK_K, "across", "above"
            )
        total = add_lower(total, A, B, line_a, line_b, r, c, m, end_r, m, BLOCK_K, "above", "above")
    else:
        total = add_product(
            total, A, B, line_a, line_b, r, c, m, m, n, start, stop, BY_ROWS, not BY_ROWS, BLOCK_K, "", ""
        )

    C += batch * batch_c
    out += batch * batch_out
    if not SPLIT or tl.program_id(0) < whole:
        finish(total, r, c, C, out, m, line_c, line_out, alpha, beta, diag, WRITE_LOWER)
    else:
        at = tl.arange(0, BLOCK)
        tl.store(parts + part.to(tl.int64) * (BLOCK * BLOCK) + (at[:, None] * BLOCK + at[None, :]), total)


@triton.jit
def finish(total, r, c, C, out, m, line_c, line_out, alpha, beta, diag, WRITE_LOWER: tl.constexpr):
    """Write alpha·total + beta·C + diag·I, the tile at (r, c), and its mirror unless the lower half is all."""
    rows, columns = r + tl.arange(0, total.shape[0]), c + tl.arange(0, total.shape[0])
    total *= alpha
    inside = (rows < m)[:, None] & (columns < m)[None, :]
    if beta != 0:
        offsets = rows.to(tl.int64)[:, None] * line_c + columns[None, :]
        total += beta * tl.load(C + offsets, inside, other=0.0)
    on_diagonal = rows[:, None] == columns[None, :]
    tile = (total + tl.where(on_diagonal, diag, 0.0)).to(out.dtype.element_ty)
    if r == c:
        # The product of rounded operands need not be symmetric: its lower half is the result.
        tile = tl.where(rows[:, None] >= columns[None, :], tile, tl.trans(tile))
    elif not WRITE_LOWER:
        mirror = columns.to(tl.int64)[:, None] * line_out + rows[None, :]
        tl.store(out + mirror, tl.trans(tile), tl.trans(inside))
    tl.store(out + rows.to(tl.int64)[:, None] * line_out + columns[None, :], tile, inside)


@triton.jit
def add_lower(
    total,
    A,
    B,
    line_a,
    line_b,
    r,
    c,
    m,
    start,
    stop,
    BLOCK_K: tl.constexpr,
    PLACE_A: tl.constexpr,
    PLACE_B: tl.constexpr,
):
    """total + some columns' part of A B, both of which are symmetric and read from their lower halves."""
    return add_product(
        total, A, B, line_a, line_b, r, c, m, m, m, start, stop, True, True, BLOCK_K, PLACE_A, PLACE_B
    )


@triton.jit
def tile_of(index, m, group, BLOCK: tl.constexpr):
    """Batch, row and column of tile ``index`` among those on and below the diagonals of a batch of (m, m) results."""
    side = tl.cdiv(m, BLOCK)
    tiles = side.to(tl.int64) * (side + 1) // 2
    batch = index // tiles
    i, j = place_of((index - batch * tiles).to(tl.int32), side, group)
    return batch, i, j


@triton.jit
def place_of(index, side, group):
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
