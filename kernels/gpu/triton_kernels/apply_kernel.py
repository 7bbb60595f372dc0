"""Device side of :mod:`dmuon.kernels.gpu.triton_kernels.apply`. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.triton_kernels.compile import compile_triton
from dmuon.kernels.gpu.triton_kernels.elementwise_kernel import address_of, scalar_of
from dmuon.kernels.gpu.triton_kernels.tile_kernel import add_product


def build(spec: KernelSpec) -> Binary:
    """Compile the kernel for ``spec``, which :meth:`ApplyFamily.spec` made."""
    options = spec.options
    vector = {name: options[f"vector_{name}"] for name in ("a", "b", "c", "out")}
    lines = {
        "a": "depth" if options["a_rows"] else "m",
        "b": "n" if options["b_rows"] else "depth",
        "c": "n" if options["c_rows"] else "m",
        "out": "n",
    }
    eights = {length for name, length in lines.items() if vector[name]}
    dtypes = {
        "a": options["dtype"],
        "b": options["dtype"],
        "c": options["c_dtype"],
        "out": options["out_dtype"],
    }
    pointers = {"a": "A", "b": "B", "c": "C", "out": "out"}
    signature = {
        **{pointers[name]: f"*{dtypes[name]}" + ":16" * vector[name] for name in vector},
        **{size: "i32" + ":8" * (size in eights) for size in ("m", "n", "depth")},
        **{f"line_{name}": "i64" + ":8" * vector[name] for name in vector},
        **{f"batch_{name}": "i64" + ":8" * vector[name] for name in vector},
        **dict.fromkeys(("alpha", "beta"), "fp32"),
        "table": "*i64",
        "group": "i32",
    }
    names = ("a_rows", "b_rows", "c_rows", "block_m", "block_n", "block_k", "lower", "update", "vector_out")
    constexprs = {name.upper(): options[name] for name in names}
    constexprs["QUARTERS"] = options["block_m"] * options["block_n"] >= 4096 * options["warps"]
    return compile_triton(
        spec,
        apply,
        signature,
        constexprs,
        num_warps=options["warps"],
        num_stages=options["stages"],
        registers=Arch.registers_per_thread,
    )


@triton.jit
def apply(
    A,
    B,
    C,
    out,
    m,
    n,
    depth,
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
    table,
    group,
    A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    C_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUARTERS: tl.constexpr,
    LOWER: tl.constexpr,
    UPDATE: tl.constexpr,
    VECTOR_OUT: tl.constexpr,
):
    """alpha·A B + beta·C for A (m, depth), B (depth, n); with UPDATE, weights of ``table`` are moved by it.

    LOWER names the operand that is symmetric and read from its lower half, if any.
    """
    high, wide = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles = high.to(tl.int64) * wide
    batch = tl.program_id(0) // tiles
    i, j = grouped_tile((tl.program_id(0) - batch * tiles).to(tl.int32), high, wide, group)
    r, c = i * BLOCK_M, j * BLOCK_N
    A += batch * batch_a
    B += batch * batch_b
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if LOWER == "":
        total = add_product(
            total, A, B, line_a, line_b, r, c, m, n, depth, 0, depth, A_ROWS, B_ROWS, BLOCK_K, "", ""
        )
    elif LOWER == "A":
        end, stop = r + BLOCK_M, tl.minimum(r + BLOCK_M, depth)
        total = add_product(
            total, A, B, line_a, line_b, r, c, m, n, depth, 0, r, A_ROWS, B_ROWS, BLOCK_K, "below", ""
        )
        total = add_product(
            total, A, B, line_a, line_b, r, c, m, n, depth, r, stop, A_ROWS, B_ROWS, BLOCK_K, "across", ""
        )
        total = add_product(
            total, A, B, line_a, line_b, r, c, m, n, depth, end, depth, A_ROWS, B_ROWS, BLOCK_K, "above", ""
        )
    else:
        end, stop = c + BLOCK_N, tl.minimum(c + BLOCK_N, depth)
        total = add_product(
            total, A, B, line_a, line_b, r, c, m, n, depth, 0, c, A_ROWS, B_ROWS, BLOCK_K, "", "below"
        )
        total = add_product(
            total, A, B, line_a, line_b, r, c, m, n, depth, c, stop, A_ROWS, B_ROWS, BLOCK_K, "", "across"
        )
        total = add_product(
            total, A, B, line_a, line_b, r, c, m, n, depth, end, depth, A_ROWS, B_ROWS, BLOCK_K, "", "above"
        )

    C += batch * batch_c
    if UPDATE:
        out = address_of(table, batch, 2, out.dtype.element_ty, VECTOR_OUT)
        alpha, beta = alpha * scalar_of(table, batch, 2), beta * scalar_of(table, batch, 2)
        keep = scalar_of(table, batch, 3)
    else:
        out += batch * batch_out
        keep = 0.0
    rows, columns = r + tl.arange(0, BLOCK_M), c + tl.arange(0, BLOCK_N)
    if QUARTERS:
        # A quarter of a wide tile at a time: all of C beside all of the result would be too many registers.
        quarter = c + tl.arange(0, BLOCK_N // 4)
        left, right = halves(total)
        for half in tl.static_range(2):
            first, second = halves(right if half else left)
            at = quarter + half * (BLOCK_N // 2)
            finish(first, rows, at, C, out, m, n, line_c, line_out, alpha, beta, keep, C_ROWS, UPDATE)
            finish(
                second,
                rows,
                at + BLOCK_N // 4,
                C,
                out,
                m,
                n,
                line_c,
                line_out,
                alpha,
                beta,
                keep,
                C_ROWS,
                UPDATE,
            )
    else:
        finish(total, rows, columns, C, out, m, n, line_c, line_out, alpha, beta, keep, C_ROWS, UPDATE)


@triton.jit
def halves(tile):
    """The left and the right half of a tile."""
    HALF: tl.constexpr = tile.shape[1] // 2
    return tile.reshape(tile.shape[0], 2, HALF).permute(0, 2, 1).split()


@triton.jit
def finish(
    total,
    rows,
    columns,
    C,
    out,
    m,
    n,
    line_c,
    line_out,
    alpha,
    beta,
    keep,
    C_ROWS: tl.constexpr,
    UPDATE: tl.constexpr,
):
    """Write alpha·total + beta·C, and with UPDATE keep·out too."""
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    rows, columns = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
    total *= alpha
    if beta != 0:
        offsets = rows * line_c + columns if C_ROWS else rows + columns * line_c
        total += beta * tl.load(C + offsets, inside, other=0.0)
    place = out + rows * line_out + columns
    if UPDATE:
        total += keep * tl.load(place, inside, other=0.0)
    tl.store(place, total.to(out.dtype.element_ty), inside)


@triton.jit
def grouped_tile(index, high, wide, group):
    """Row and column of tile ``index`` of ``high`` × ``wide``: bands of group rows, column by column in a band."""
    first = index // (group * wide) * group
    height = tl.minimum(group, high - first)
    local = index - first * wide
    return first + local % height, local // height
