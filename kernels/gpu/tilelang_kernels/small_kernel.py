"""Device side of the whole Newton–Schulz iteration of small matrices in TileLang. Imports TileLang.

A thread block iterates on one matrix of m rows, padded with zeros to ``side``. R, P and each segment's Q stay in
shared memory; X is read in panels, once for each segment's R and once for the result. What earlier segments made of
X is made again from X, panel by panel: cheaper than to write it and read it back.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.tilelang_kernels.compile import DTYPES, compile_tilelang
from dmuon.kernels.gpu.tilelang_kernels.copies import copies
from dmuon.kernels.gpu.tilelang_kernels.operands import ITEM_BYTES, LINE_BYTES

_TINY = 1.1754943508222875e-38
"""The smallest normal fp32 number, in place of a divisor of 0."""


def build(spec: KernelSpec) -> Binary:
    """Compile the kernel for a spec of :class:`~dmuon.kernels.gpu.tilelang_kernels.small.SmallGramFamily`."""
    return compile_tilelang(spec, small_gram_ns(**spec.options), wgmma=False)


def small_gram_ns(
    *,
    side: int,
    panel: int,
    stages: int,
    threads: int,
    segments: list[int],
    dtype: str,
    x_dtype: str,
    x_by_columns: bool,
    out_dtype: str,
    out_by_columns: bool,
    normalize: bool,
) -> Any:
    """The kernel as a TileLang function."""
    working, given, result = DTYPES[dtype], DTYPES[x_dtype], DTYPES[out_dtype]
    x_lanes, out_lanes = LINE_BYTES // ITEM_BYTES[x_dtype], LINE_BYTES // ITEM_BYTES[out_dtype]
    x_block = (panel, side) if x_by_columns else (side, panel)
    out_block = (panel, side) if out_by_columns else (side, panel)
    copy_in, copy_out = copies(threads)

    @T.macro
    def load(X, matrix, first, raw, slot):
        """Start copies of the panel of X at column ``first``."""
        if x_by_columns:
            copy_in(X, matrix, first, 0, raw, slot, panel, side, x_lanes)
        else:
            copy_in(X, matrix, 0, first, raw, slot, side, panel, x_lanes)

    @T.macro
    def fold(X, matrix, panels, sums: str, scale, scratch):
        """The block's maximum of |X| or sum of (scale·X)², the same in every thread."""
        thread = T.get_thread_binding()
        value = T.alloc_var("float32", init=0.0)
        for step in T.serial(panels):
            for k in T.unroll(side * panel // (x_lanes * threads)):
                y = (k * threads + thread) * x_lanes // x_block[1] + (step * panel if x_by_columns else 0)
                x = (k * threads + thread) * x_lanes % x_block[1] + (0 if x_by_columns else step * panel)
                value = T.call_extern(
                    "float32",
                    f"dmuon::fold<{sums}>",
                    value,
                    T.address_of(X[matrix, y, x]),
                    T.if_then_else(y < X.shape[1], X.shape[2] - x, 0),
                    scale,
                )
        return T.call_extern("float32", f"dmuon::block_fold<{sums}>", value, T.address_of(scratch[0]))

    @T.macro
    def multiply(A, B, total):
        T.clear(total)
        T.gemm(A, B, total)
        T.sync_threads()

    @T.macro
    def polynomial(R, P, Q, total, rows, steps):
        """Q = the product of the step polynomials of R, of which a lone one leaves its a I to the caller."""
        for k in [*range(len(steps))]:
            factor = Q if k == 0 else P
            multiply(R, R, total)
            for y, x in T.Parallel(side, side):
                total[y, x] = steps[k][2] * total[y, x] + steps[k][1] * T.cast(R[y, x], "float32")
            if len(steps) > 1:
                for y, x in T.Parallel(side, side):
                    # Not on the padding, where powers of a could overflow and make NaN of its zeros.
                    total[y, x] = total[y, x] + T.if_then_else(y == x and y < rows, steps[k][0], 0.0)
            # TileLang may have laid Q where R was, of which a warp has read no more than it overwrites.
            T.copy(total, factor)
            T.sync_threads()
            if k > 0:
                multiply(P, Q, total)
                T.copy(total, Q)
                T.sync_threads()
            if k < len(steps) - 1:
                multiply(R, factor, total)
                T.copy(total, R)
                T.sync_threads()
                multiply(factor, R, total)
                T.copy(total, R)
                T.sync_threads()

    @T.macro
    def apply(Q, steps, source, by_columns: bool, made):
        """``made`` = Q source, + a source for a lone step, for the panel ``source`` or its transpose."""
        if len(steps) > 1:
            T.clear(made)
        else:
            for y, x in T.Parallel(side, panel):
                made[y, x] = steps[0][0] * T.cast(source[x, y] if by_columns else source[y, x], "float32")
        T.gemm(Q, source, made, transpose_B=by_columns)

    @T.prim_func
    def dmuon_small_gram_ns(
        X_first: T.ptr,
        out_first: T.ptr,
        rows: T.int32,
        columns: T.int32,
        batch: T.int32,
        x_batch: T.int64,
        x_line: T.int64,
        out_batch: T.int64,
        out_line: T.int64,
        a0: T.float32,
        b0: T.float32,
        c0: T.float32,
        a1: T.float32,
        b1: T.float32,
        c1: T.float32,
        a2: T.float32,
        b2: T.float32,
        c2: T.float32,
        a3: T.float32,
        b3: T.float32,
        c3: T.float32,
        a4: T.float32,
        b4: T.float32,
        c4: T.float32,
        a5: T.float32,
        b5: T.float32,
        c5: T.float32,
        a6: T.float32,
        b6: T.float32,
        c6: T.float32,
        a7: T.float32,
        b7: T.float32,
        c7: T.float32,
    ):
        with T.Kernel(batch, threads=threads) as matrix:
            x_shape = (batch, columns, rows) if x_by_columns else (batch, rows, columns)
            out_shape = (batch, columns, rows) if out_by_columns else (batch, rows, columns)
            X = T.make_tensor(X_first, x_shape, given, strides=(x_batch * x_lanes, x_line * x_lanes, 1))
            out = T.make_tensor(
                out_first, out_shape, result, strides=(out_batch * out_lanes, out_line * out_lanes, 1)
            )
            steps = (
                (a0, b0, c0),
                (a1, b1, c1),
                (a2, b2, c2),
                (a3, b3, c3),
                (a4, b4, c4),
                (a5, b5, c5),
                (a6, b6, c6),
                (a7, b7, c7),
            )
            parts = [steps[sum(segments[:k]) : sum(segments[: k + 1])] for k in range(len(segments))]
            Qs = [T.alloc_shared((side, side), working) for _ in range(len(segments))]
            total = T.alloc_fragment((side, side), "float32")
            made = T.alloc_fragment((side, panel), "float32")

            count = T.ceildiv(columns, panel)
            shrink = T.alloc_var("float32", init=1.0)
            norm = T.alloc_var("float32", init=1.0)
            if normalize:
                scratch = T.alloc_shared((threads // 32,), "float32")
                # As dmuon.kernels.normalize: by the largest element, then by the norm; a zero stays zero. The maximum
                # passes over NaN, which then poisons its matrix in R.
                shrink = 1.0 / T.max(fold(X, matrix, count, "false", 1.0, scratch), _TINY)
                norm = 1.0 / T.max(T.sqrt(fold(X, matrix, count, "true", shrink, scratch)), _TINY)
                T.sync_threads()

            for segment in [*range(len(segments) + 1)]:
                last = segment == len(segments)
                # Each segment has its own, so that they can lie in the same place as its R and P.
                raw = T.alloc_shared((stages, *x_block), given)
                scaled = T.alloc_shared(x_block, working)
                between = T.alloc_shared((side, panel), working)
                T.annotate_layout({raw: make_swizzled_layout(raw)})
                if last:
                    staged = T.alloc_shared(out_block, result)
                    T.annotate_layout({staged: make_swizzled_layout(staged)})
                else:
                    T.clear(total)
                for step in [*range(stages - 1)]:
                    load(X, matrix, step * panel, raw, step)
                    T.ptx_commit_group()
                for step in T.serial(count):
                    T.ptx_wait_group(stages - 2)
                    T.sync_threads()
                    load(X, matrix, (step + stages - 1) * panel, raw, (step + stages - 1) % stages)
                    T.ptx_commit_group()
                    for y, x in T.Parallel(*x_block):
                        scaled[y, x] = T.cast(raw[step % stages, y, x], "float32") * shrink * norm
                    T.sync_threads()
                    for k in [*range(segment)]:
                        source, by_columns = (scaled, x_by_columns) if k == 0 else (between, False)
                        apply(Qs[k], parts[k], source, by_columns, made)
                        if k < segment - 1 or not last:
                            T.sync_threads()
                            T.copy(made, between)
                            T.sync_threads()
                    if not last:
                        source, by_columns = (scaled, x_by_columns) if segment == 0 else (between, False)
                        T.gemm(source, source, total, transpose_A=by_columns, transpose_B=not by_columns)
                    else:
                        for y, x in T.Parallel(side, panel):
                            if out_by_columns:
                                staged[x, y] = T.cast(T.cast(made[y, x], working), result)
                            else:
                                staged[y, x] = T.cast(T.cast(made[y, x], working), result)
                        T.sync_threads()
                        if out_by_columns:
                            copy_out(staged, out, matrix, step * panel, 0, panel, side, out_lanes)
                        else:
                            copy_out(staged, out, matrix, 0, step * panel, side, panel, out_lanes)
                T.ptx_wait_group(0)
                T.sync_threads()
                if not last:
                    R = T.alloc_shared((side, side), working)
                    P = T.alloc_shared((side, side), working)
                    T.copy(total, R)
                    T.sync_threads()
                    polynomial(R, P, Qs[segment], total, rows, parts[segment])

    return dmuon_small_gram_ns
