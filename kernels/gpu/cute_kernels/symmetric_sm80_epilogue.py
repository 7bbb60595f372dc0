"""Device side: how a block finishes and stores its tile, staged in shared memory where its operands were.

A staged tile has its vectors of 16 bytes permuted within 128, row by row, so that no access below has bank
conflicts: threads write what mma.sync gave them, two neighbours in a row at a time; rows leave as vectors; and so
do columns, which ldmatrix transposes on the way if elements have 16 bits.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from dmuon.kernels.gpu.cute_kernels.symmetric_sm80 import Plan

TOGETHER = 4
"""Vectors that a thread loads before it stores them."""


@cute.jit
def copy_async(into: Int32, source: Int64, size: Int32):
    """Start copying ``size`` bytes, at most 16, to shared memory; what is missing of 16 becomes zero.

    The L2 cache fetches all 128 bytes of the line: their neighbours are next.
    """
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[into, source, size],
    )


class Epilogue:
    """Everything after the main loop. Tiles are named by their first row i and column j.

    Args:
        plan: what is fixed.
        dtype: of C and the result.
    """

    def __init__(self, plan: Plan, dtype) -> None:
        self.plan, self.dtype = plan, dtype
        self.size, self.vector = dtype.width // 8, plan.vector
        self.vectors = plan.tile // plan.vector
        self.vectors_each = plan.tile * self.vectors // plan.threads
        self.together = min(TOGETHER, self.vectors_each)

    def address(self, matrix, line_stride, row, column):
        """Of element (row, column) of a matrix in global memory."""
        return matrix + self.size * (Int64(row) * Int64(line_stride) + column)

    def staged(self, base, row, column, count):
        """``count`` elements of a row of the staged tile; ``column`` is a multiple of ``count``."""
        # With 16 bits distinct for 8 rows from a multiple of 8 on, and for rows 2q and 2q + 1 of 4 such groups. With
        # 32 bits, bits 1 and 2 distinct for 4 rows from a multiple of 4 on; all distinct for every 4th of 32 rows.
        turn = row ^ ((row >> 2) & 6) if self.size == 2 else (row >> 2) ^ ((row << 1) & 6)
        vector = (column // self.vector) ^ (turn & 7)
        place = row * self.plan.pitch + vector * self.vector + column % self.vector
        place = cute.assume(place, divby=count)
        return cute.make_tensor(cute.recast_ptr(base, dtype=self.dtype) + place, cute.make_layout(count))

    @cute.jit
    def add_c(self, sums, places, base, matrix, line_stride, i, j, rows, beta):
        """sums += beta * C, which passes through the place of the staged tile: a thread reads where it will write."""
        for n in cutlass.range(self.vectors_each, unroll=4):
            row, column = self.row_vector(n)
            size = self.size * cutlass.max(cutlass.min(rows - j - column, self.vector), 0)
            copy_async(
                self.staged(base, row, column, self.vector).iterator.toint(),
                self.address(matrix, line_stride, i + row, j + column),
                size if i + row < rows else Int32(0),
            )
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        pair = cute.make_rmem_tensor(cute.make_layout(2), self.dtype)
        for n in cutlass.range(cute.size(sums) // 2, unroll_full=True):
            row, column = places[2 * n]
            cute.autovec_copy(self.staged(base, row, column, 2), pair)
            for e in range_constexpr(2):
                sums[2 * n + e] += beta * pair[e].to(Float32)

    @cute.jit
    def add_diagonal(self, sums, places, diag):
        """sums += diag * I."""
        for n in cutlass.range(cute.size(sums), unroll_full=True):
            row, column = places[n]
            if row == column:
                sums[n] += diag

    @cute.jit
    def stage(self, sums, places, base):
        """Round and stage a tile."""
        pair = cute.make_rmem_tensor(cute.make_layout(2), self.dtype)
        for n in cutlass.range(cute.size(sums) // 2, unroll_full=True):
            row, column = places[2 * n]
            for e in range_constexpr(2):
                pair[e] = sums[2 * n + e].to(self.dtype)
            cute.autovec_copy(pair, self.staged(base, row, column, 2))

    @cute.jit
    def store_rows(self, base, out, line_stride, i, j, rows):
        """Store a staged tile below the diagonal, where all of its columns lie inside the matrix."""
        values = self.registers()
        for n in cutlass.range(self.vectors_each // self.together, unroll=1):
            for g in range_constexpr(self.together):
                row, column = self.row_vector(n * self.together + g)
                cute.autovec_copy(self.staged(base, row, column, self.vector), values[None, g])
            for g in range_constexpr(self.together):
                row, column = self.row_vector(n * self.together + g)
                to = self.global_vector(out, line_stride, i + row, j + column)
                if i + row < rows:
                    cute.autovec_copy(values[None, g], to)

    @cute.jit
    def store_columns(self, base, out, line_stride, i, j, rows):
        """Store the transpose of a staged tile; of one on the diagonal the lower half, and its transpose."""
        values, lower = self.registers(), self.registers()
        for n in cutlass.range(self.vectors_each // self.together, unroll=1):
            for g in range_constexpr(self.together):
                row, column = self.column_vector(n * self.together + g)
                self.load_column(base, row, column, values[None, g])
            if i == j:
                for g in range_constexpr(self.together):
                    row, column = self.column_vector(n * self.together + g)
                    cute.autovec_copy(self.staged(base, column, row, self.vector), lower[None, g])
                    for e in range_constexpr(self.vector):
                        if row + e <= column:
                            values[e, g] = lower[e, g]
            for g in range_constexpr(self.together):
                row, column = self.column_vector(n * self.together + g)
                self.store(values[None, g], out, line_stride, j + column, i + row, rows)

    def registers(self):
        """For the vectors that are loaded together."""
        return cute.make_rmem_tensor(cute.make_layout((self.vector, self.together)), self.dtype)

    def row_vector(self, n):
        """Row and column of the first element of the ``n``-th vector of a row that a thread takes."""
        index = cute.arch.thread_idx()[0] + n * self.plan.threads
        return index // self.vectors, index % self.vectors * self.vector

    def column_vector(self, n):
        """The same of a column. A warp takes 32 rows of 8 columns (16 bits) or of 4 columns (32 bits) at a time."""
        thread, height, along = cute.arch.thread_idx()[0], 32 // self.vector, self.plan.tile // 32
        lane, index = thread % 32, thread // 32 + n * (self.plan.threads // 32)
        row = index % along * 32 + lane % height * self.vector
        return row, index // along * self.vector + lane // height

    @cute.jit
    def load_column(self, base, row, column, values):
        """Load a vector of a column, rows ``row`` and on. All threads of a warp take part in it."""
        if const_expr(self.size == 2):
            # A thread gets rows 2p and 2p + 1 of each of 4 matrices, p = lane % 4, so those shall be 8p + 2q and
            # 8p + 2q + 1 for matrix q. It hands in the address of row lane % 8 of matrix lane // 8.
            lane = cute.arch.lane_idx()
            first_row, first_column = row - lane % 4 * 8, column - lane // 4
            source = first_row + lane % 8 // 2 * 8 + lane // 8 * 2 + lane % 2
            loaded = cute.arch.inline_ptx(
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Int32, Int32, Int32, Int32],
                read_only_args=[self.staged(base, source, first_column, 8).iterator.toint()],
            )
            words = cute.recast_tensor(values, Int32)
            for w in range_constexpr(4):
                words[w] = loaded[w]
        else:
            for e in range_constexpr(self.vector):
                values[e] = self.staged(base, row + e, column, 1)[0]

    @cute.jit
    def store(self, values, out, line_stride, row, column, rows):
        """Store what lies inside a matrix of ``rows`` rows and columns of a vector of its row ``row``."""
        to = self.global_vector(out, line_stride, row, column)
        if row < rows:
            if column + self.vector <= rows:
                cute.autovec_copy(values, to)
            else:
                for e in range_constexpr(self.vector):
                    if column + e < rows:
                        to[e] = values[e]

    def global_vector(self, matrix, line_stride, row, column):
        """The vector at element (row, column) of a matrix in global memory."""
        address = self.address(matrix, line_stride, row, column)
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(self.vector))
