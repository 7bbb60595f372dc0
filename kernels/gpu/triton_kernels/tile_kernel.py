"""Tiles of operands and their products: what the product kernels share. Device code; imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_product(
    total,
    A,
    B,
    line_a,
    line_b,
    row,
    column,
    m,
    n,
    depth,
    start,
    stop,
    A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PLACE_A: tl.constexpr,
    PLACE_B: tl.constexpr,
):
    """total + the tile at (row, column) of A B for A (m, depth), B (depth, n), by the columns of A from start to stop.

    An operand's rows (A_ROWS, B_ROWS) are contiguous, or else its columns. One with a PLACE is symmetric, by rows,
    and its lower half alone is read: as seen from the tile's rows (for B: columns), these columns of A then lie
    "below" the diagonal, "above" it or "across".
    """
    BLOCK_M: tl.constexpr = total.shape[0]
    BLOCK_N: tl.constexpr = total.shape[1]
    # Few steps go across the diagonal: they need no pipeline, whose buffers would be twice the usual.
    STAGES: tl.constexpr = 1 if PLACE_A == "across" or PLACE_B == "across" else None
    for k in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
        if PLACE_A == "":
            a = tile_at(A, line_a, row, k, m, depth, BLOCK_M, BLOCK_K, A_ROWS)
        else:
            a = lower_tile_at(A, line_a, row, k, m, BLOCK_M, BLOCK_K, PLACE_A)
        if PLACE_B == "":
            b = tile_at(B, line_b, k, column, depth, n, BLOCK_K, BLOCK_N, B_ROWS)
        else:
            b = tl.trans(lower_tile_at(B, line_b, column, k, n, BLOCK_N, BLOCK_K, PLACE_B))
        total = tl.dot(a, b, total)
    return total


@triton.jit
def tile_at(S, line, row, column, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROWS: tl.constexpr):
    """The tile at (row, column) of S (m, n), zeros beyond it."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (row + rows < m) & (column + columns < n)
    # A scalar and 32-bit offsets inside the tile: pointers of a whole tile would cost registers.
    width = line.to(tl.int32)
    if BY_ROWS:
        return tl.load(S + row * line + column + (rows * width + columns), inside, other=0.0)
    return tl.load(S + column * line + row + (rows + columns * width), inside, other=0.0)


@triton.jit
def lower_tile_at(S, line, row, column, m, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PLACE: tl.constexpr):
    """The tile at (row, column) of the symmetric S (m, m), of which the upper half is not there."""
    if PLACE == "below":
        return tile_at(S, line, row, column, m, m, ROWS, COLUMNS, True)
    mirror = tile_at(S, line, row, column, m, m, ROWS, COLUMNS, False)
    if PLACE == "above":
        return mirror
    # Both are read whole; what is not there is not chosen.
    tile = tile_at(S, line, row, column, m, m, ROWS, COLUMNS, True)
    below = row + tl.arange(0, ROWS)[:, None] >= column + tl.arange(0, COLUMNS)[None, :]
    return tl.where(below, tile, mirror)
