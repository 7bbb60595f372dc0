"""Device side of :mod:`dmuon.kernels.gpu.cute_kernels.symmetric_sm80`: mma.sync, ldmatrix, cp.async.

A block computes one tile on or below the diagonal. Its operands' rows (columns, if those are contiguous) pass
through a ring of stages in shared memory; a tile on the diagonal of A Aᵀ needs one operand only. The finished tile
is staged in shared memory, where C was read into, and written twice: by rows, and transposed by ldmatrix to the
other side of the diagonal. Lines are moved 16 bytes at a time, and by single elements at a ragged edge.

Parameters of the kernel, in order: u64 addresses of A, B, C (0 for none) and out; i64 batch strides of the same; i32
line strides of the same; i32 rows, depth, tile rows, tiles of one matrix, tile rows of a band, whether A and B are
one; f32 alpha, beta, diag. Strides are in elements.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warp

from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.cute_kernels.compile import compile_cute
from dmuon.kernels.gpu.cute_kernels.symmetric_sm80 import Plan
from dmuon.kernels.gpu.cute_kernels.symmetric_sm80_epilogue import Epilogue, copy_async
from dmuon.kernels.gpu.cute_kernels.symmetric_sm90_tiles import tile_at

DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}


def build(spec: KernelSpec) -> Binary:
    """Compile the kernel that ``spec`` asks for."""
    from cutlass.cute.runtime import make_fake_stream

    plan = Plan(**spec.options)
    arguments = ((Int64(0),) * 8, (Int32(0),) * 10, (Float32(0),) * 3, make_fake_stream())
    return compile_cute(spec, SymmetricSm80(plan), arguments, shared_bytes=plan.shared_bytes)


class SymmetricSm80:
    """The kernel of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.dtype = DTYPES[plan.dtype]
        self.epilogue = Epilogue(plan, DTYPES[plan.out_dtype])

    @cute.jit
    def __call__(self, longs, ints, floats, stream):
        # With no carve-out named, asking for two resident blocks would look for a GPU.
        self.kernel(*longs, *ints, *floats).launch(
            grid=[1, 1, 1],
            block=[self.plan.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.plan.resident,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        a: Int64,
        b: Int64,
        c: Int64,
        d: Int64,
        a_batch: Int64,
        b_batch: Int64,
        c_batch: Int64,
        d_batch: Int64,
        a_line: Int32,
        b_line: Int32,
        c_line: Int32,
        d_line: Int32,
        rows: Int32,
        depth: Int32,
        tile_rows: Int32,
        tiles_each: Int32,
        band: Int32,
        one: Int32,
        alpha: Float32,
        beta: Float32,
        diag: Float32,
    ):
        plan = self.plan
        thread = cute.arch.thread_idx()[0]
        i, j, matrix = tile_at(cute.arch.block_idx()[0], tile_rows, tiles_each, band)
        i, j = i * plan.tile, j * plan.tile
        on_diagonal = i == j
        alone = on_diagonal & (one != 0)

        base = cute.arch.get_dyn_smem(self.dtype, 1024)
        stages = self.stage_layout()
        b_offset = Int32(0) if alone else Int32(plan.stages * plan.stage_elements)
        sA = cute.make_tensor(base, stages)
        sB = cute.make_tensor(base + cute.assume(b_offset, divby=plan.stage_elements), stages)
        into_a = base.toint() + 2 * self.first_place(stages)
        load_a = self.first_source(a + 2 * a_batch * matrix, a_line, i), a_line, into_a, rows - i
        load_b = (
            self.first_source(b + 2 * b_batch * matrix, b_line, j),
            b_line,
            into_a + 2 * b_offset,
            rows - j,
        )
        for stage in range_constexpr(plan.stages - 1):
            self.load(stage, stage, depth, *load_a)
            if not alone:
                self.load(stage, stage, depth, *load_b)
            cute.arch.cp_async_commit_group()

        mma = self.mma()
        sums = mma.make_fragment_C(mma.partition_shape_C((plan.tile, plan.tile)))
        sums.fill(0.0)
        if on_diagonal:
            self.multiply(sums, sA, sB, load_a, load_b, depth, alone, True)
        else:
            self.multiply(sums, sA, sB, load_a, load_b, depth, Boolean(False), False)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        size = self.epilogue.size
        c_matrix, out = c + size * c_batch * matrix, d + size * d_batch * matrix
        places = mma.get_slice(thread).partition_C(cute.make_identity_tensor((plan.tile, plan.tile)))
        sums.store(alpha * sums.load())
        if c != 0:
            self.epilogue.add_c(sums, places, base, c_matrix, c_line, i, j, rows, beta)
        if on_diagonal:
            self.epilogue.add_diagonal(sums, places, diag)
        self.epilogue.stage(sums, places, base)
        cute.arch.sync_threads()
        if not on_diagonal:
            self.epilogue.store_rows(base, out, d_line, i, j, rows)
        self.epilogue.store_columns(base, out, d_line, i, j, rows)

    @cute.jit
    def multiply(self, sums, sA, sB, load_a, load_b, depth, alone, on_diagonal):
        """The main loop: sums += A Bᵀ; on the diagonal hardly more than the lower half, ``alone`` if B is A."""
        plan, mma, thread = self.plan, self.mma(), cute.arch.thread_idx()[0]
        part = mma.get_slice(thread)
        rA = mma.make_fragment_A(part.partition_A(sA[None, None, 0]))
        rB = mma.make_fragment_B(part.partition_B(sB[None, None, 0]))
        atom = cute.make_copy_atom(
            warp.LdMatrix8x8x16bOp(transpose=plan.column_major, num_matrices=4), self.dtype
        )
        copy_a, copy_b = cute.make_tiled_copy_A(atom, mma), cute.make_tiled_copy_B(atom, mma)
        part_a, part_b = copy_a.get_slice(thread), copy_b.get_slice(thread)
        stages_a, stages_b = part_a.partition_S(sA), part_b.partition_S(sB)
        into_a, into_b = part_a.retile(rA), part_b.retile(rB)

        blocks, lead = plan.bk // 16, int(plan.ahead)
        write, read = Int32(plan.stages - 1), Int32(0)
        if const_expr(plan.ahead):
            cute.arch.cp_async_wait_group(plan.stages - 2)
            cute.arch.sync_threads()
            cute.copy(copy_a, stages_a[None, None, 0, read], into_a[None, None, 0])
            cute.copy(copy_b, stages_b[None, None, 0, read], into_b[None, None, 0])
        for k in cutlass.range(cute.ceil_div(depth, plan.bk), unroll=1):
            for kb in range_constexpr(blocks):
                fetch = (kb + lead) % blocks
                if const_expr(fetch == 0):
                    cute.arch.cp_async_wait_group(plan.stages - 2)
                    cute.arch.sync_threads()
                cute.copy(copy_a, stages_a[None, None, fetch, read], into_a[None, None, fetch])
                cute.copy(copy_b, stages_b[None, None, fetch, read], into_b[None, None, fetch])
                if const_expr(fetch == blocks - 1):
                    read = Int32(0) if read == plan.stages - 1 else read + 1
                if const_expr(kb == 0):
                    # Every thread has passed the barrier since it read the stage before this one.
                    later = k + plan.stages - 1
                    self.load(later, write, depth, *load_a)
                    if not alone:
                        self.load(later, write, depth, *load_b)
                    cute.arch.cp_async_commit_group()
                    write = Int32(0) if write == plan.stages - 1 else write + 1
                if const_expr(on_diagonal):
                    self.multiply_lower(sums, rA[None, None, kb], rB[None, None, kb])
                else:
                    cute.gemm(mma, sums, rA[None, None, kb], rB[None, None, kb], sums)

    @cute.jit
    def multiply_lower(self, sums, rA, rB):
        """sums += A Bᵀ over 16 columns, but for parts that lie above the diagonal in every warp."""
        for m in range_constexpr(cute.size(sums, mode=[1])):
            for n in range_constexpr(cute.size(sums, mode=[2])):
                # The warps' m-th rows end before 16 warps_m (m + 1), their n-th columns begin at 8 warps_n n.
                if const_expr(16 * self.plan.warps_m * (m + 1) > 8 * self.plan.warps_n * n):
                    part = cute.append_ones(sums[None, m, n], up_to_rank=3)
                    a, b = (cute.append_ones(r[None, k], up_to_rank=2) for r, k in ((rA, m), (rB, n)))
                    cute.gemm(self.mma(), part, a, b, part)

    def mma(self) -> cute.TiledMma:
        """The block's warps side by side over 16 rows and 16 columns each."""
        m, n = self.plan.warps_m, self.plan.warps_n
        op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
        return cute.make_tiled_mma(op, cute.make_layout((m, n, 1)), permutation_mnk=(16 * m, 16 * n, 16))

    def stage_layout(self) -> cute.ComposedLayout:
        """(tile, bk, stages) of an operand: lines in pieces of 64 or 128 bytes, swizzled over all banks."""
        plan = self.plan
        length = min(64, plan.tile if plan.column_major else plan.bk)
        swizzle = cute.make_swizzle(3 if length == 64 else 2, 3, 3)
        outer = cute.make_layout((8, length), stride=(length, 1))
        if plan.column_major:
            outer = cute.make_layout((length, 8), stride=(1, length))
        atom = cute.make_composed_layout(swizzle, 0, outer)
        return cute.tile_to_shape(atom, (plan.tile, plan.bk, plan.stages), (0, 1, 2))

    def spot(self):
        """The line and the vector in it that a thread starts with, and the way to its next line."""
        length = self.plan.tile if self.plan.column_major else self.plan.bk
        vectors = length // 8
        thread = cute.arch.thread_idx()[0]
        return thread // vectors, thread % vectors, self.plan.threads // vectors

    def first_place(self, stages):
        """Where a thread's first vector goes in a stage."""
        line, vector, _ = self.spot()
        place = (8 * vector, line, 0) if self.plan.column_major else (line, 8 * vector, 0)
        return cute.crd2idx(place, stages)

    def first_source(self, matrix, line_stride, first):
        """The address of a thread's first vector of the tile's rows ``first`` and on, but for its line if by rows."""
        line, vector, _ = self.spot()
        if self.plan.column_major:
            return matrix + 2 * (Int64(line) * Int64(line_stride) + first + 8 * vector)
        return matrix + 2 * (Int64(first) * Int64(line_stride) + 8 * vector)

    @cute.jit
    def load(self, step, stage, depth, source, line_stride, into, rows):
        """Start copying the ``step``-th bk columns of an operand's tile into ``stage``; beyond the depth, zeros.

        Of ``rows`` short of a tile, the missing ones are not read, but the last one again: what it adds to is never
        stored.
        """
        plan = self.plan
        line, vector, lines = self.spot()
        length = plan.tile if plan.column_major else plan.bk
        into += 2 * plan.stage_elements * stage
        k = plan.bk * step
        if const_expr(plan.column_major):
            source += 2 * Int64(k) * Int64(line_stride)
            size = 2 * cutlass.max(cutlass.min(rows - 8 * vector, 8), 0)
        else:
            source += 2 * k
            size = 2 * cutlass.max(cutlass.min(depth - k - 8 * vector, 8), 0)
        for n in range_constexpr(plan.stage_elements // (8 * plan.threads)):
            if const_expr(plan.column_major):
                at = Int32(lines * n)
                count = size if k + line + lines * n < depth else Int32(0)
            else:
                at = cutlass.min(line + lines * n, rows - 1)
                count = size
            copy_async(into + 2 * length * lines * n, source + Int64(2 * at) * Int64(line_stride), count)
