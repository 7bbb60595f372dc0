"""Device side: what happens to a block of 64x64 sums that one warpgroup holds in registers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float16, Float32, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.utils import hopper_helpers

from dmuon.kernels.gpu.cute_kernels.symmetric_sm90 import BLOCK
from dmuon.kernels.gpu.cute_kernels.symmetric_sm90_tiles import coordinates, partition

# Named barriers of the warpgroups, each for the blocks that it stages.
STAGED = 1


class Blocks:
    """Blocks of C and of the result, in registers and in shared memory.

    Args:
        dtype: of C and the result.
        stagings: pairs of a block and its transpose in shared memory, for each warpgroup.
    """

    def __init__(self, dtype, stagings: int) -> None:
        self.dtype, self.stagings = dtype, stagings

    def layout(self, count: int) -> cute.ComposedLayout:
        """(64, 64, count) of blocks of C or the result in shared memory: rows in pieces of 128 bytes, swizzled."""
        kind = warpgroup.SmemLayoutAtomKind.K_SW128
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (BLOCK, BLOCK, count), order=(0, 1, 2))

    @cute.jit
    def add(self, block, sC, beta):
        """block += beta * C."""
        c = cute.make_rmem_tensor(block.layout, self.dtype)
        copy = cute.make_tiled_copy_C(self.row_copy(warp.LdMatrix8x8x16bOp), self.mma())
        part = copy.get_slice(cute.arch.thread_idx()[0] % 128)
        cute.copy(copy, part.partition_S(sC), part.retile(c))
        block.store(block.load() + beta * c.load().to(Float32))

    @cute.jit
    def store(self, store_d, block, sD, group, staging, at, matrix, diag):
        """Write a block and its transpose; of a block on the diagonal its lower half, to both sides."""
        diagonal = at[0] == at[1]
        thread = cute.arch.thread_idx()[0] % 128
        leader = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0
        place = 2 * (group * self.stagings + staging)
        here, mirror = sD[None, None, place], sD[None, None, place + 1]
        if leader:
            cute.arch.cp_async_bulk_wait_group(self.stagings - 1, read=True)
        cute.arch.barrier(barrier_id=STAGED + group, number_of_threads=128)
        if diagonal:
            part = self.mma().get_slice(thread)
            lower, upper = part.partition_C(here), part.partition_C(transposed(here))
            places = part.partition_C(cute.make_identity_tensor((BLOCK, BLOCK)))
            for e in range_constexpr(cute.size(block)):
                y, x = places[e]
                value = block[e]
                if y == x:
                    value += diag
                if y >= x:
                    lower[e] = value.to(self.dtype)
                    upper[e] = value.to(self.dtype)
        else:
            values = cute.make_rmem_tensor(block.layout, self.dtype)
            values.store(block.load().to(self.dtype))
            rows = cute.make_tiled_copy_C(self.row_copy(warp.StMatrix8x8x16bOp), self.mma())
            part = rows.get_slice(thread)
            cute.copy(rows, part.retile(values), part.partition_D(here))
            columns = cute.make_tiled_copy_C(self.column_copy(), self.mma())
            part = columns.get_slice(thread)
            cute.copy(columns, part.retile(values), part.partition_D(transposed(mirror)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=STAGED + group, number_of_threads=128)
        if leader:
            source, blocks = self.partition(store_d, sD, matrix)
            cute.copy(store_d, source[None, place], blocks[None, at[0], at[1]])
            if not diagonal:
                cute.copy(store_d, source[None, place + 1], blocks[None, at[1], at[0]])
            cute.arch.cp_async_bulk_commit_group()

    def mma(self) -> cute.TiledMma:
        """What says where a warpgroup's threads hold the elements of a block: wgmma of 64 columns."""
        K = OperandMajorMode.K
        return hopper_helpers.make_trivial_tiled_mma(
            Float16, Float16, K, K, Float32, (1, 1, 1), tiler_mn=(BLOCK, BLOCK)
        )

    def fragment(self):
        """Shape of a thread's part of a block."""
        return self.mma().get_slice(0).partition_shape_C((BLOCK, BLOCK))

    def row_copy(self, matrix_op):
        """Moves along rows of a block: by 8x8 matrices of 16-bit elements, or by two 32-bit elements."""
        if self.dtype.width == 16:
            return cute.make_copy_atom(matrix_op(False, 4), self.dtype)
        return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=64)

    def column_copy(self):
        """Moves down columns of a block."""
        if self.dtype.width == 16:
            return cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype)
        return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=32)

    def partition(self, atom, shared, matrix):
        """Shared places and global (row, column) of blocks."""
        blocks = cute.local_tile(coordinates(False)[None, None, matrix], (BLOCK, BLOCK), (None, None))
        return partition(atom, shared, blocks)


def transposed(block):
    """A (64, 64) view of a block by (column, row)."""
    layout = block.layout
    return cute.make_tensor(block.iterator, cute.select(layout, mode=[1, 0]))
