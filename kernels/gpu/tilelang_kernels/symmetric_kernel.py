"""Device side of ``gram`` and ``symmetric_product`` in TileLang. Imports TileLang.

A thread block computes one tile on or below the diagonal and stores it twice: itself and its mirror.
"""
# ruff: noqa: F841  (assigning to a T.Ref parameter sets the caller's variable)

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.tilelang_kernels.compile import DTYPES, compile_tilelang
from dmuon.kernels.gpu.tilelang_kernels.copies import copies
from dmuon.kernels.gpu.tilelang_kernels.operands import ITEM_BYTES, LINE_BYTES
from dmuon.kernels.gpu.tilelang_kernels.symmetric import BAND


def build(spec: KernelSpec) -> Binary:
    """Compile the kernel for a spec of :class:`~dmuon.kernels.gpu.tilelang_kernels.symmetric.SymmetricFamily`."""
    copying = "tma" if spec.arch == "sm_90a" else "cp.async"
    return compile_tilelang(spec, symmetric(**spec.options, copying=copying))


@T.macro
def triangular(index, row: T.Ref, column: T.Ref):
    """Set row and column of entry ``index`` of a lower triangle that is counted row by row."""
    # The root is off by one at most, up to 2^31 entries.
    row = T.cast(T.floor((T.sqrt(T.cast(8 * index + 1, "float32")) - 1.0) * 0.5), "int64")
    if row * (row + 1) // 2 > index:
        row = row - 1
    elif (row + 1) * (row + 2) // 2 <= index:
        row = row + 1
    column = index - row * (row + 1) // 2


@T.macro
def locate(block, side, matrix: T.Ref, i: T.Ref, j: T.Ref):
    """Set matrix, tile row and tile column of a thread block.

    Blocks walk bands of BAND tile rows column by column, so that those that run together share operands in L2.
    """
    # Variables, not expressions: TileLang takes forever to simplify what these would become when inlined.
    index = T.alloc_var("int64")
    row = T.alloc_var("int64")
    column = T.alloc_var("int64")
    first = T.alloc_var("int64")
    height = T.alloc_var("int64")
    index = T.cast(side, "int64") * (side + 1) // 2
    matrix = T.cast(T.truncdiv(T.cast(block, "int64"), index), "int32")
    index = T.truncmod(T.cast(block, "int64"), index)
    triangular(index, row, column)
    first = T.truncdiv(row, BAND) * BAND
    height = T.min(side - first, BAND)
    index = index - first * (first + 1) // 2
    if index < first * height:
        i = T.cast(first + T.truncmod(index, height), "int32")
        j = T.cast(T.truncdiv(index, height), "int32")
    else:
        triangular(index - first * height, row, column)
        i = T.cast(first + row, "int32")
        j = T.cast(first + column, "int32")


def symmetric(
    *,
    tile: int,
    block_k: int,
    stages: int,
    threads: int,
    policy: str,
    dtype: str,
    out_dtype: str,
    by_columns: bool,
    copying: str,
) -> Any:
    """The kernel as a TileLang function.

    ``copying`` says how. With ``"tma"``, a warp of its own copies operands and C through tensor maps, and mbarriers
    pass them to wgmma; with ``"cp.async"``, every thread copies, and multiplies by mma.sync. Both pipelines are written
    out: TileLang's own cannot have a depth that varies (cp.async), and may hang when a producer warp lags (TMA).
    ``"plain"`` is for TileLang's CPU target, one thread a block: it serves to check tiles and their arithmetic.
    """
    element, result = DTYPES[dtype], DTYPES[out_dtype]
    lanes = LINE_BYTES // ITEM_BYTES[out_dtype]
    operand = (block_k, tile) if by_columns else (tile, block_k)
    warps = getattr(T.GemmWarpPolicy, policy)

    copy_in, copy_out = copies(threads)
    tma, plain = copying == "tma", copying == "plain"
    # TileLang's CPU target knows neither shared memory nor fragments.
    shared, fragment = ("global", "global") if plain else ("shared.dyn", "local.fragment")
    parts = operand if plain else (stages, *operand)

    @T.macro
    def operand_in(X, matrix, line, step, parts, slot):
        """Start copies of tile row ``line`` of X at inner ``step``."""
        if by_columns:
            copy_in(X, matrix, step * block_k, line * tile, parts, slot, block_k, tile, 8)
        else:
            copy_in(X, matrix, line * tile, step * block_k, parts, slot, tile, block_k, 8)

    @T.macro
    def multiply(A, B, matrix, i, j, steps, A_parts, B_parts, total):
        """A pipeline of cp.async, with one barrier a step."""
        for step in T.unroll(stages - 1):
            operand_in(A, matrix, i, step, A_parts, step)
            operand_in(B, matrix, j, step, B_parts, step)
            T.ptx_commit_group()
        for step in T.serial(steps):
            # After this, the step's operands are there for all, and all are done with the slot that is next filled.
            T.ptx_wait_group(stages - 2)
            T.sync_threads()
            operand_in(A, matrix, i, step + stages - 1, A_parts, (step + stages - 1) % stages)
            operand_in(B, matrix, j, step + stages - 1, B_parts, (step + stages - 1) % stages)
            T.ptx_commit_group()
            slot = step % stages
            T.gemm(
                A_parts[slot, :, :],
                B_parts[slot, :, :],
                total,
                transpose_A=by_columns,
                transpose_B=not by_columns,
                policy=warps,
            )
        T.ptx_wait_group(0)

    @T.macro
    def multiply_plainly(A, B, matrix, i, j, steps, A_part, B_part, total):
        for step in T.serial(steps):
            if by_columns:
                T.copy(A[matrix, step * block_k, i * tile], A_part)
                T.copy(B[matrix, step * block_k, j * tile], B_part)
            else:
                T.copy(A[matrix, i * tile, step * block_k], A_part)
                T.copy(B[matrix, j * tile, step * block_k], B_part)
            T.gemm(A_part, B_part, total, transpose_A=by_columns, transpose_B=not by_columns)

    @T.macro
    def fetch(X, matrix, line, step, parts, slot, full):
        """Start a TMA copy of tile row ``line`` of X at inner ``step``."""
        if by_columns:
            T.tma_copy(
                X[matrix, step * block_k, line * tile],
                parts[slot, :, :],
                barrier=full[slot],
                leader_scope_threads=32,
            )
        else:
            T.tma_copy(
                X[matrix, line * tile, step * block_k],
                parts[slot, :, :],
                barrier=full[slot],
                leader_scope_threads=32,
            )

    @T.macro
    def produce(A, B, C, matrix, i, j, steps, beta, A_parts, B_parts, staged, full, empty, staged_full):
        """Fill slots as they become empty, and stage C. For one warp."""
        if beta != 0:
            T.tma_copy(C[matrix, i * tile, j * tile], staged, barrier=staged_full[0], leader_scope_threads=32)
            T.barrier_arrive(staged_full[0])
        for step in T.serial(steps):
            slot = step % stages
            T.barrier_wait(empty[slot], (step // stages + 1) % 2)
            fetch(A, matrix, i, step, A_parts, slot, full)
            fetch(B, matrix, j, step, B_parts, slot, full)
            T.barrier_arrive(full[slot])

    @T.macro
    def consume(steps, A_parts, B_parts, full, empty, total):
        """Multiply slots as they become full. A slot is given back when the next one's wgmma is on its way."""
        for step in T.serial(steps):
            slot = step % stages
            T.barrier_wait(full[slot], step // stages % 2)
            T.wgmma_gemm(
                A_parts[slot, :, :],
                B_parts[slot, :, :],
                total,
                transpose_A=by_columns,
                transpose_B=not by_columns,
                policy=warps,
            )
            T.warpgroup_wait(1)
            if step > 0:
                T.barrier_arrive(empty[(step - 1) % stages])
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(total, num_regs=tile * tile // threads)

    @T.macro
    def meet():
        """A barrier of the threads that compute."""
        if tma:
            T.sync_threads(1, threads)
        elif not plain:
            T.sync_threads()

    @T.macro
    def store(staged, out, matrix, row, column):
        """The staged tile, once all of it is there, to (row, column) of out in wide accesses."""
        if tma:
            T.fence_proxy_async()
        meet()
        if tma or plain:
            T.copy(staged, out[matrix, row, column])
        else:
            copy_out(staged, out, matrix, row, column, tile, tile, lanes)

    @T.macro
    def finish(C, out, matrix, i, j, alpha, beta, diag, total, staged, staged_full):
        """Scale, add, make symmetric within the tile, and store the tile and its mirror."""
        if beta != 0:
            if tma:
                T.barrier_wait(staged_full[0], 0)
            elif plain:
                T.copy(C[matrix, i * tile, j * tile], staged)
            else:
                copy_in(C, matrix, i * tile, j * tile, staged, None, tile, tile, lanes)
                T.ptx_commit_group()
                T.ptx_wait_group(0)
                meet()
            for y, x in T.Parallel(tile, tile):
                total[y, x] = alpha * total[y, x] + beta * T.cast(staged[y, x], "float32")
            meet()
        else:
            for y, x in T.Parallel(tile, tile):
                total[y, x] = alpha * total[y, x]
        if i == j:
            for y, x in T.Parallel(tile, tile):
                total[y, x] = total[y, x] + T.if_then_else(y == x, diag, 0.0)
        for y, x in T.Parallel(tile, tile):
            staged[x, y] = total[y, x]
        if i == j:
            meet()
            for y, x in T.Parallel(tile, tile):
                total[y, x] = T.if_then_else(y < x, T.cast(staged[y, x], "float32"), total[y, x])
        else:
            store(staged, out, matrix, j * tile, i * tile)
        meet()
        T.copy(total, staged)
        store(staged, out, matrix, i * tile, j * tile)

    @T.prim_func
    def dmuon_symmetric(
        A_first: T.ptr,
        B_first: T.ptr,
        C_first: T.ptr,
        out_first: T.ptr,
        rows: T.int32,
        depth: T.int32,
        batch: T.int32,
        side: T.int32,
        a_batch: T.int64,
        b_batch: T.int64,
        c_batch: T.int64,
        out_batch: T.int64,
        a_line: T.int64,
        b_line: T.int64,
        c_line: T.int64,
        out_line: T.int64,
        alpha: T.float32,
        beta: T.float32,
        diag: T.float32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=None if plain else threads + 32 * tma) as block:
            shape, square = (batch, depth, rows) if by_columns else (batch, rows, depth), (batch, rows, rows)
            A = T.make_tensor(A_first, shape, element, strides=(a_batch * 8, a_line * 8, 1))
            B = T.make_tensor(B_first, shape, element, strides=(b_batch * 8, b_line * 8, 1))
            C = T.make_tensor(C_first, square, result, strides=(c_batch * lanes, c_line * lanes, 1))
            out = T.make_tensor(out_first, square, result, strides=(out_batch * lanes, out_line * lanes, 1))
            matrix = T.alloc_var("int32")
            i = T.alloc_var("int32")
            j = T.alloc_var("int32")
            locate(block, side, matrix, i, j)
            steps = T.ceildiv(depth, block_k)
            total = T.alloc_fragment((tile, tile), "float32", scope=fragment)
            staged = T.alloc_shared((tile, tile), result, scope=shared)
            A_parts = T.alloc_shared(parts, element, scope=shared)
            B_parts = T.alloc_shared(parts, element, scope=shared)
            if tma:
                full = T.alloc_barrier([32] * stages)
                empty = T.alloc_barrier([threads] * stages)
                staged_full = T.alloc_barrier([32])
                if T.get_thread_binding() >= threads:
                    produce(
                        A, B, C, matrix, i, j, steps, beta, A_parts, B_parts, staged, full, empty, staged_full
                    )
                else:
                    T.clear(total)
                    consume(steps, A_parts, B_parts, full, empty, total)
                    finish(C, out, matrix, i, j, alpha, beta, diag, total, staged, staged_full)
            else:
                T.clear(total)
                if plain:
                    multiply_plainly(A, B, matrix, i, j, steps, A_parts, B_parts, total)
                else:
                    T.annotate_layout({staged: make_swizzled_layout(staged)})
                    multiply(A, B, matrix, i, j, steps, A_parts, B_parts, total)
                # Where `staged` lies, operands may have been.
                meet()
                finish(C, out, matrix, i, j, alpha, beta, diag, total, staged, None)

    return dmuon_symmetric
