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


@cute.jit
def copy_async(into: Int32, source: Int64, size: Int32):
    """Start copying ``size`` bytes, at most 16, to shared memory; what is missing becomes zero."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[into, source, size]
    )


class Epilogue:
    """Everything after the main loop.

    Args:
        plan: what is fixed.
        dtype: of C and the result.
    """

    def __init__(self, plan: Plan, dtype) -> None:
        self.plan, self.dtype = plan, dtype
        self.size, self.vector = dtype.width // 8, plan.vector
        self.vectors = plan.tile // plan.vector

    def place(self, row, column):
        """Where element (row, column) of the tile is staged."""
        if self.size == 2:
            # Distinct for 8 rows from a multiple of 8 on, and for rows 2q, 2q + 1 of each of 4 such groups.
            turn = (row ^ ((row >> 2) & 6)) & 7
        else:
            # Bits 1 and 2 distinct for 4 rows from a multiple of 4 on; all for every 4th of 32 rows.
            turn = ((row >> 2) ^ ((row << 1) & 6)) & 7
        return row * self.plan.pitch + (((column // self.vector) ^ turn) * self.vector + column % self.vector)

    def staged(self, base, row, column, count):
        """``count`` staged elements of a row; ``column`` is a multiple of ``count``."""
        place = cute.assume(self.place(row, column), divby=count)
        return cute.make_tensor(cute.recast_ptr(base, dtype=self.dtype) + place, cute.make_layout(count))

    @cute.jit
    def load_c(self, base, source, line_stride, rows, columns):
        """Start copying a tile of C to where it is staged; missing rows and columns become zero."""
        thread, address = cute.arch.thread_idx()[0], base.toint()
        for n in cutlass.range(self.plan.tile * self.vectors // self.plan.threads, unroll=4):
            index = thread + n * self.plan.threads
            row, column = index // self.vectors, index % self.vectors * self.vector
            size = self.size * cutlass.max(cutlass.min(columns - column, self.vector), 0)
            copy_async(
                address + self.size * self.place(row, column),
                source + self.size * (Int64(row) * Int64(line_stride) + column),
                size if row < rows else Int32(0),
            )

    @cute.jit
    def add_c(self, sums, places, base, beta):
        """sums += beta * C, staged."""
        pair = cute.make_rmem_tensor(cute.make_layout(2), self.dtype)
        for n in range_constexpr(cute.size(sums) // 2):
            row, column = places[2 * n]
            cute.autovec_copy(self.staged(base, row, column, 2), pair)
            for e in range_constexpr(2):
                sums[2 * n + e] += beta * pair[e].to(Float32)

    @cute.jit
    def stage(self, sums, places, base):
        """Round and stage a tile."""
        pair = cute.make_rmem_tensor(cute.make_layout(2), self.dtype)
        for n in range_constexpr(cute.size(sums) // 2):
            row, column = places[2 * n]
            for e in range_constexpr(2):
                pair[e] = sums[2 * n + e].to(self.dtype)
            cute.autovec_copy(pair, self.staged(base, row, column, 2))

    @cute.jit
    def stage_diagonal(self, sums, places, base, diag):
        """The same for a tile on the diagonal, to which ``diag`` is added: its lower half, on both sides."""
        for n in range_constexpr(cute.size(sums)):
            row, column = places[n]
            value = sums[n]
            if row == column:
                value += diag
            rounded = value.to(self.dtype)
            here, mirror = self.staged(base, row, column, 1), self.staged(base, column, row, 1)
            if row >= column:
                here[0] = rounded
                mirror[0] = rounded

    @cute.jit
    def store_rows(self, base, target, line_stride, rows, columns, whole):
        """Store a tile, or what of it lies inside ``rows`` and ``columns``."""
        thread = cute.arch.thread_idx()[0]
        values = cute.make_rmem_tensor(cute.make_layout(self.vector), self.dtype)
        for n in cutlass.range(self.plan.tile * self.vectors // self.plan.threads, unroll=4 if whole else 1):
            index = thread + n * self.plan.threads
            row, column = index // self.vectors, index % self.vectors * self.vector
            cute.autovec_copy(self.staged(base, row, column, self.vector), values)
            self.store(values, target, line_stride, row, column, rows, columns, whole)

    @cute.jit
    def store_columns(self, base, target, line_stride, rows, whole):
        """Store a tile's transpose, or what of it lies inside of ``rows`` of the tile."""
        thread = cute.arch.thread_idx()[0]
        lane, first = thread % 32, thread // 32
        # A warp takes 32 rows by 8 columns (16 bits) or by 4 columns.
        height = 8 if self.size == 2 else 4
        along = self.plan.tile // 32
        values = cute.make_rmem_tensor(cute.make_layout(self.vector), self.dtype)
        count = along * (self.plan.tile // height)
        warps = self.plan.threads // 32
        for n in cutlass.range(count // warps, unroll=4 if whole else 1):
            index = first + n * warps
            row, column = index % along * 32, index // along * height
            if const_expr(self.size == 2):
                # Row addresses such that a thread gets 8 rows in order: 2q and 2q + 1 of 8 from matrix q.
                q, e = lane // 8, lane % 8
                source = self.staged(base, row + e // 2 * 8 + q * 2 + e % 2, column, 8)
                words = cute.recast_tensor(values, Int32)
                loaded = cute.arch.inline_ptx(
                    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                    write_only_types=[Int32, Int32, Int32, Int32],
                    read_only_args=[source.iterator.toint()],
                )
                for w in range_constexpr(4):
                    words[w] = loaded[w]
                row, column = row + lane % 4 * 8, column + lane // 4
            else:
                row, column = row + lane % 8 * 4, column + lane // 8
                for e in range_constexpr(4):
                    values[e] = self.staged(base, row + e, column, 1)[0]
            self.store(values, target, line_stride, column, row, Int32(self.plan.tile), rows, whole)

    @cute.jit
    def store(self, values, target, line_stride, row, column, rows, columns, whole):
        """Store a vector of a row; unless ``whole``, what of it lies inside ``rows`` and ``columns``."""
        address = target + self.size * (Int64(row) * Int64(line_stride) + column)
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        to = cute.make_tensor(pointer, cute.make_layout(self.vector))
        if const_expr(whole):
            cute.autovec_copy(values, to)
        elif row < rows:
            if column + self.vector <= columns:
                cute.autovec_copy(values, to)
            else:
                for e in range_constexpr(self.vector):
                    if column + e < columns:
                        to[e] = values[e]
