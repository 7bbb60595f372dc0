"""Device side: the order of the tiles of lower triangles, and where tiles lie in global and shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync


@cute.jit
def tile_at(tile: Int32, tile_rows: Int32, tiles_each: Int32, band: Int32):
    """Row, column and matrix of the ``tile``-th tile of a batch of triangles.

    A triangle is walked in bands of ``band`` tile rows, a band column by column. Tiles of one moment thus share
    ``band`` rows and few columns of operands, which the L2 cache holds.
    """
    matrix = tile // tiles_each
    rest = tile - matrix * tiles_each
    first = triangle_row(rest) // band * band
    rest -= Int32(triangle(first))
    height = cutlass.min(band, tile_rows - first)
    j = rest // height
    i = first + rest - j * height
    if rest >= first * height:
        # The triangle at the end of a band: row by row from the far corner is column by column.
        rest = Int32(triangle(height)) - 1 - (rest - first * height)
        row = triangle_row(rest)
        i = first + height - 1 - rest + Int32(triangle(row))
        j = first + height - 1 - row
    return i, j, matrix


@cute.jit
def triangle_row(tile: Int32):
    """The row of the ``tile``-th tile of a triangle walked row by row, for any tile below 2**31."""
    row = Int32(cute.math.sqrt(2.0 * Float32(tile)))
    # sqrt(2 t) is off by at most one: it neglects 1/2, and rounds.
    if triangle(row) > Int64(tile):
        row -= 1
    if triangle(row + 1) <= Int64(tile):
        row += 1
    return row


@cute.jit
def triangle(rows: Int32):
    """Tiles of a triangle of ``rows`` rows, in 64 bits."""
    return Int64(rows) * (Int64(rows) + 1) // 2


def partition(atom, shared, tiles):
    """Shared and global sides of TMA copies: the first two modes become the copied one, the others count copies."""
    one = cute.make_layout(1)
    return cpasync.tma_partition(atom, 0, one, cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2))


def coordinates(column_major):
    """What TMA is told for element (row, column, matrix). The descriptors know the true shapes and clip."""
    huge = (1 << 30,) * 3
    e0, e1, e2 = (cute.E(axis) for axis in range(3))
    layout = cute.make_layout(huge, stride=(e0, e1, e2) if column_major else (e1, e0, e2))
    return cute.make_tensor(cute.make_identity_tensor(huge).iterator, layout)
