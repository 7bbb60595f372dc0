"""Device side of :mod:`dmuon.kernels.gpu.cute_kernels.symmetric_sm90`: TMA, wgmma, warp specialisation.

A CTA has one producer warpgroup and two or three consumer warpgroups, and stays on its multiprocessor: it takes
tiles of the lower triangle until none is left. The producer's first warp loads operands into a ring of stages; of
its other warps, each loads C into the ring of slots of one consumer warpgroup. All run ahead of the consumers, into
the next tile. A consumer accumulates in registers, then finishes its part of a tile block by block: 64×64 sums, to
which it adds C and the diagonal, and which it stages in shared memory, as they are and transposed. TMA writes both.

*Cooperative*: each consumer warpgroup computes 64 rows of one tile. *Ping-pong*: two consumer warpgroups take tiles
in turn, one on the tensor cores while the other finishes its tile. *Clusters*: two CTAs take neighbouring tiles in
step; where these are of one column, each loads half of B's rows for both.

Parameters of the kernel, in order: tensor maps of A, B, C and out (dimensions fastest first: columns, rows, batch,
or rows, columns, batch of column-major operands); i32 steps of k, tile rows, tiles of one matrix, CTA tiles of all
matrices, tile rows of a band, whether there is a C; f32 alpha, beta, diag.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int16, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.cute_kernels.compile import compile_cute
from dmuon.kernels.gpu.cute_kernels.symmetric_sm90 import BLOCK, Plan
from dmuon.kernels.gpu.cute_kernels.symmetric_sm90_blocks import Blocks
from dmuon.kernels.gpu.cute_kernels.symmetric_sm90_tiles import coordinates, partition, tile_at

DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}

# Named barriers of whose turn it is on the tensor cores.
TURN = 4


def build(spec: KernelSpec) -> Binary:
    """Compile the kernel that ``spec`` asks for."""
    plan = Plan(**spec.options)
    binary = compile_cute(spec, SymmetricSm90(plan), fake_arguments(plan), shared_bytes=plan.shared_bytes)
    return replace(binary, cluster=(plan.cluster, 1, 1))


def fake_arguments(plan: Plan) -> tuple[Any, ...]:
    """Arguments to trace :class:`SymmetricSm90` with."""
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    def matrices(dtype: str, column_major: bool = False) -> Any:
        stride = cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8)
        strides = (1, *stride) if column_major else (stride[0], 1, stride[1])
        shape = tuple(cute.sym_int() for _ in range(3))
        return make_fake_tensor(DTYPES[dtype], shape, strides, assumed_align=16)

    operands = [matrices(plan.dtype, plan.column_major) for _ in "AB"]
    results = [matrices(plan.out_dtype) for _ in "CD"]
    return (*operands, *results, (Int32(1),) * 6, (Float32(1),) * 3, make_fake_stream())


class SymmetricSm90:
    """The kernel of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.c_slots, self.stagings = plan.buffers
        self.dtype = DTYPES[plan.dtype]
        self.blocks = Blocks(DTYPES[plan.out_dtype], self.stagings)

    @cute.jit
    def __call__(self, A: cute.Tensor, B: cute.Tensor, C: cute.Tensor, D: cute.Tensor, ints, floats, stream):
        rows, tile, bk = self.plan.rows, self.plan.tile, self.plan.bk
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        stage_a, stage_b = (
            cute.slice_(self.operand_layout(lines), (None, None, 0))
            for lines in (rows, tile // self.plan.cluster)
        )
        block = cute.slice_(self.blocks.layout(1), (None, None, 0))
        load_a, _ = cpasync.make_tiled_tma_atom(load, A, stage_a, (rows, bk))
        if const_expr(self.plan.cluster == 1):
            load_b, _ = cpasync.make_tiled_tma_atom(load, B, stage_b, (tile, bk))
        else:
            multicast = cpasync.CopyBulkTensorTileG2SMulticastOp()
            load_b, _ = cpasync.make_tiled_tma_atom(multicast, B, stage_b, (tile // 2, bk))
        load_c, _ = cpasync.make_tiled_tma_atom(load, C, block, (BLOCK, BLOCK))
        store_d, _ = cpasync.make_tiled_tma_atom(store, D, block, (BLOCK, BLOCK))
        self.kernel(load_a, load_b, load_c, store_d, *ints, *floats).launch(
            grid=[self.plan.cluster, 1, 1],
            block=[self.plan.threads, 1, 1],
            cluster=[self.plan.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def operand_layout(self, rows: int) -> cute.ComposedLayout:
        """(rows, bk, stages) of an operand in shared memory, as wgmma reads it."""
        major = LayoutEnum.COL_MAJOR if self.plan.column_major else LayoutEnum.ROW_MAJOR
        shape = (rows, rows, self.plan.bk)
        return hopper_helpers.make_smem_layout_a(major, shape, self.dtype, self.plan.stages)

    @cute.kernel
    def kernel(
        self,
        load_a: cute.CopyAtom,
        load_b: cute.CopyAtom,
        load_c: cute.CopyAtom,
        store_d: cute.CopyAtom,
        steps: Int32,
        tile_rows: Int32,
        tiles_each: Int32,
        tiles: Int32,
        band: Int32,
        has_c: Int32,
        alpha: Float32,
        beta: Float32,
        diag: Float32,
    ):
        plan = self.plan
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (load_a, load_b, load_c, store_d):
                cpasync.prefetch_descriptor(atom)
        smem = SmemAllocator()
        full = smem.allocate_array(Int64, plan.stages)
        empty = smem.allocate_array(Int64, plan.stages)
        c_full = smem.allocate_array(Int64, self.c_slots * plan.consumers)
        c_empty = smem.allocate_array(Int64, self.c_slots * plan.consumers)
        operand_a, operand_b = self.operand_layout(plan.rows), self.operand_layout(plan.tile)
        slots = self.blocks.layout(self.c_slots * plan.consumers)
        staged = self.blocks.layout(2 * self.stagings * plan.consumers)
        sA = smem.allocate_tensor(self.dtype, operand_a.outer, 1024, operand_a.inner)
        sB = smem.allocate_tensor(self.dtype, operand_b.outer, 1024, operand_b.inner)
        sC = smem.allocate_tensor(self.blocks.dtype, slots.outer, 1024, slots.inner)
        sD = smem.allocate_tensor(self.blocks.dtype, staged.outer, 1024, staged.inner)

        if warp_index == 0:
            with cute.arch.elect_one():
                for s in range_constexpr(plan.stages):
                    cute.arch.mbarrier_init(full + s, 1)
                    cute.arch.mbarrier_init(empty + s, plan.cluster * 4 * plan.groups_on_tile)
                for s in range_constexpr(self.c_slots * plan.consumers):
                    cute.arch.mbarrier_init(c_full + s, 1)
                    cute.arch.mbarrier_init(c_empty + s, 4)
            cute.arch.mbarrier_init_fence()
        if const_expr(plan.cluster == 1):
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

        schedule = (tile_rows, tiles_each, band)
        group = warp_index // 4
        if group == plan.consumers:
            cute.arch.setmaxregister_decrease(plan.registers[0])
            if warp_index % 4 == 0:
                self.load_operands(load_a, load_b, sA, sB, full, empty, steps, tiles, schedule)
            elif warp_index % 4 <= plan.consumers and has_c != 0:
                self.load_blocks(load_c, sC, c_full, c_empty, warp_index % 4 - 1, tiles, schedule)
        else:
            cute.arch.setmaxregister_increase(plan.registers[1])
            bars = (full, empty, c_full, c_empty)
            scalars = (alpha, beta, diag)
            self.consume(store_d, sA, sB, sC, sD, bars, group, steps, tiles, schedule, has_c, scalars)
        if const_expr(plan.cluster > 1):
            # The other CTA may still send to this one's shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def load_operands(self, load_a, load_b, sA, sB, full, empty, steps, tiles, schedule):
        """The producer's first warp: both operands' rows of every tile, step by step of k."""
        plan = self.plan
        stage, phase = Int32(0), Int32(1)
        tile = Int32(cute.arch.block_idx()[0])
        while self.first_of_cluster(tile) < tiles:
            i, j, matrix = self.place_of(tile, schedule)
            into_a, from_a = self.partition_operand(load_a, sA, matrix, plan.rows)
            into_b, from_b = self.partition_operand(load_b, sB, matrix, plan.tile // plan.cluster)
            shared = plan.cluster > 1 and self.shares_column(tile, tiles, schedule)
            idle = plan.cluster > 1 and tile >= tiles
            for k in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                bar = full + stage
                if idle:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(bar)
                else:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(bar, plan.stage_bytes)
                    cute.copy(load_a, from_a[None, i, k], into_a[None, 0, 0, stage], tma_bar_ptr=bar)
                    if const_expr(plan.cluster == 1):
                        cute.copy(load_b, from_b[None, j, k], into_b[None, 0, 0, stage], tma_bar_ptr=bar)
                    else:
                        halves = from_b[None, None, k], into_b[None, None, 0, stage]
                        self.load_halves(load_b, *halves, bar, j, tile % 2, shared)
                stage, phase = step(stage, phase, plan.stages)
            tile += cute.arch.grid_dim()[0]

    @cute.jit
    def load_halves(self, load_b, source, target, bar, j, rank, shared):
        """B's rows in two halves. Of a shared column each CTA of the cluster loads one half, for both."""
        for half in range_constexpr(2):
            if not shared or half == rank:
                to = Int16(3 if shared else 1 << rank)
                piece = source[None, 2 * j + half]
                cute.copy(load_b, piece, target[None, half], tma_bar_ptr=bar, mcast_mask=to)

    def first_of_cluster(self, tile):
        """The first of the tiles that a cluster works on while one of its CTAs works on ``tile``."""
        return tile if self.plan.cluster == 1 else tile & ~1

    @cute.jit
    def shares_column(self, tile, tiles, schedule):
        """Whether the two tiles of a cluster are of one column, so that B serves both."""
        _, j, matrix = self.place_of(tile, schedule)
        _, other_j, other_matrix = self.place_of(tile ^ 1, schedule)
        return j == other_j and matrix == other_matrix and (tile | 1) < tiles

    @cute.jit
    def load_blocks(self, load_c, sC, c_full, c_empty, group, tiles, schedule):
        """A warp of the producer: the blocks of C for one consumer warpgroup, in the order in which it adds them."""
        plan = self.plan
        slots = self.c_slots
        slot, phase = Int32(0), Int32(1)
        tile, stride = self.tiles_of(group)
        while tile < tiles:
            i, j, matrix = self.place_of(tile, schedule)
            into, blocks = self.blocks.partition(load_c, sC, matrix)
            for r in range_constexpr(plan.rows_of_blocks):
                row = self.block_row(group, r)
                for column in range_constexpr(plan.tile // BLOCK):
                    at = self.block_at(i, j, row, column)
                    if at[1] <= at[0]:
                        place = group * slots + slot
                        cute.arch.mbarrier_wait(c_empty + place, phase)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(c_full + place, plan.block_bytes)
                        block = blocks[None, at[0], at[1]]
                        cute.copy(load_c, block, into[None, place], tma_bar_ptr=c_full + place)
                        slot, phase = step(slot, phase, slots)
            tile += stride

    @cute.jit
    def consume(self, store_d, sA, sB, sC, sD, bars, group, steps, tiles, schedule, has_c, scalars):
        """A consumer warpgroup: multiply and finish its tiles."""
        plan = self.plan
        full, empty, c_full, c_empty = bars
        mma = self.mma()
        mma.set(warpgroup.Field.ACCUMULATE, True)
        # Descriptors of operands are the same for all threads of a warpgroup; the slice of its first thread says so.
        part = mma.get_slice(group * 128 if plan.groups_on_tile > 1 else 0)
        a = mma.make_fragment_A(part.partition_A(sA))
        b = mma.make_fragment_B(part.partition_B(sB))
        sums = cute.make_rmem_tensor(part.partition_shape_C((plan.rows, plan.tile)), Float32)

        stage, phase = Int32(0), Int32(0)
        slot, c_phase, staging = Int32(0), Int32(0), Int32(0)
        if plan.ping_pong and group == 1:
            cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=256)
            stage, phase = skip(stage, phase, steps, plan.stages)
        tile, stride = self.tiles_of(group)
        while tile < tiles:
            stage, phase, last = self.multiply(mma, a, b, sums, full, empty, group, steps, stage, phase)
            i, j, matrix = self.place_of(tile, schedule)
            warpgroup.wait_group(0)
            self.release(empty + last)
            for r in range_constexpr(plan.rows_of_blocks):
                row = self.block_row(group, r)
                for column in range_constexpr(plan.tile // BLOCK):
                    at = self.block_at(i, j, row, column)
                    if at[1] <= at[0]:
                        block = cute.make_rmem_tensor(self.blocks.fragment(), Float32)
                        first = cute.size(block) * (plan.tile // BLOCK * r + column)
                        for e in range_constexpr(cute.size(block)):
                            block[e] = scalars[0] * sums[first + e]
                        if has_c != 0:
                            place = group * self.c_slots + slot
                            cute.arch.mbarrier_wait(c_full + place, c_phase)
                            self.blocks.add(block, sC[None, None, place], scalars[1])
                            cute.arch.sync_warp()
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive(c_empty + place)
                            slot, c_phase = step(slot, c_phase, self.c_slots)
                        self.blocks.store(store_d, block, sD, group, staging, at, matrix, scalars[2])
                        staging = (staging + 1) % self.stagings
            tile += stride
        if plan.cluster > 1 and self.first_of_cluster(tile) < tiles:
            self.pass_over(full, empty, group, steps, stage, phase)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def multiply(self, mma, a, b, sums, full, empty, group, steps, stage, phase):
        """sums = the product of a tile, from the stages that follow.

        Returns the ring's place for the next tile, and the stage that products in flight still read.
        """
        plan = self.plan
        sums.fill(0.0)
        if const_expr(plan.ping_pong):
            cute.arch.barrier(barrier_id=TURN + group, number_of_threads=256)
        previous = stage
        for k in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for kb in range_constexpr(plan.bk // 16):
                cute.gemm(mma, sums, a[None, None, kb, stage], b[None, None, kb, stage], sums)
            warpgroup.commit_group()
            # This step's products stay in flight; those of the step before are done with their stage.
            warpgroup.wait_group(1)
            if k > 0:
                self.release(empty + previous)
            previous = stage
            stage, phase = step(stage, phase, plan.stages)
        if const_expr(plan.ping_pong):
            cute.arch.barrier_arrive(barrier_id=TURN + 1 - group, number_of_threads=256)
            stage, phase = skip(stage, phase, steps, plan.stages)
        return stage, phase, previous

    @cute.jit
    def pass_over(self, full, empty, group, steps, stage, phase):
        """Keep in step with the other CTA of the cluster through its last tile, without one of one's own."""
        if const_expr(self.plan.ping_pong):
            cute.arch.barrier(barrier_id=TURN + group, number_of_threads=256)
        for _ in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            self.release(empty + stage)
            stage, phase = step(stage, phase, self.plan.stages)

    @cute.jit
    def release(self, empty):
        """Tell the producers of all CTAs of the cluster, once for each warp, that a stage has been read."""
        if const_expr(self.plan.cluster == 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty)
        else:
            lane = cute.arch.lane_idx()
            if lane < self.plan.cluster:
                cute.arch.mbarrier_arrive(empty, lane)

    def mma(self) -> cute.TiledMma:
        """wgmma over 64 rows of a tile for each of its warpgroups."""
        major = OperandMajorMode.MN if self.plan.column_major else OperandMajorMode.K
        groups = (self.plan.groups_on_tile, 1, 1)
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype, self.dtype, major, major, Float32, groups, tiler_mn=(64, self.plan.tile)
        )

    def tiles_of(self, group):
        """First tile of a consumer warpgroup, and the way to its next."""
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if self.plan.ping_pong:
            return block + group * blocks, 2 * blocks
        return Int32(block), blocks

    @cute.jit
    def place_of(self, tile, schedule):
        """Row (of ``plan.rows``), column (of ``plan.tile``) and matrix of a CTA tile: a tile, or one turn of it."""
        turns = self.plan.turns
        i, j, matrix = tile_at(tile // turns, *schedule)
        return i * turns + tile % turns, j, matrix

    def block_row(self, group, r):
        """The row of blocks, within its CTA tile, of a warpgroup's ``r``-th."""
        return r if self.plan.ping_pong else group

    def block_at(self, i, j, row, column):
        """Row and column, in blocks, of a block in the CTA tile at (i, j)."""
        return i * (self.plan.rows // BLOCK) + row, j * (self.plan.tile // BLOCK) + column

    def partition_operand(self, atom, shared, matrix, rows):
        """Shared (part, 0, stage) and global (row of parts, step of k) of an operand in parts of ``rows``."""
        shape = rows, self.plan.bk
        tiles = cute.local_tile(coordinates(self.plan.column_major)[None, None, matrix], shape, (None, None))
        return partition(atom, cute.flat_divide(shared, shape), tiles)


@cute.jit
def step(place, phase, size):
    """The next place of a ring of ``size``; the phase flips at every wrap."""
    place += 1
    if place == size:
        place = Int32(0)
        phase ^= 1
    return place, phase


@cute.jit
def skip(place, phase, count, size):
    """The place ``count`` further in a ring of ``size``."""
    place += count
    wraps = place // size
    return place - wraps * size, phase ^ (wraps & 1)
