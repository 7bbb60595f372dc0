"""Device side of the whole Newton–Schulz iteration of small matrices, one thread block per matrix. Imports Triton.

In Gluon, Triton's language of explicit layouts: R, P and every Q lie in shared memory as padded (M, M) arrays, and
each product reads its operands from there. Plain Triton would keep them in registers, which m = 128 overflows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.triton_kernels.compile import compile_triton

_TINY = gl.constexpr(1.1754943508222875e-38)


@gluon.jit
def _matrix(
    base,
    line,
    m,
    columns,
    batch_stride,
    DTYPE: gl.constexpr,
    RAGGED: gl.constexpr,
    ALIGNED: gl.constexpr,
    ROW_MAJOR: gl.constexpr,
):
    """This thread block's matrix: its first element, the elements between its lines, its rows and columns."""
    index = gl.program_id(0).to(gl.int64)
    if RAGGED:
        record = base + 3 * index
        first = gl.load(record).to(gl.pointer_type(DTYPE))
        columns = gl.load(record + 1).to(gl.int32)
        line = gl.load(record + 2).to(gl.int32)
    else:
        first = base + index * batch_stride
    if ALIGNED:
        # Rounding down to whole 16 bytes changes nothing, and tells the compiler that accesses may be so wide.
        lanes: gl.constexpr = 128 // DTYPE.primitive_bitwidth
        first = gl.multiple_of(first, 16)
        line = line // lanes * lanes
        if ROW_MAJOR:
            columns = columns // lanes * lanes
        else:
            m = m // lanes * lanes
    return first, line, m, columns


@gluon.jit
def _tile(
    first,
    line,
    m,
    columns,
    start,
    M: gl.constexpr,
    PANEL: gl.constexpr,
    ROW_MAJOR: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Addresses of the (M, PANEL) elements from column ``start`` on, and which of them exist."""
    i = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, PANEL, gl.SliceLayout(0, LAYOUT))[None, :]
    inside = (i < m) & (j < columns - start)
    offsets = i * line + j if ROW_MAJOR else j * line + i
    return first + gl.to_tensor(start).to(gl.int64) * (1 if ROW_MAJOR else line) + offsets, inside


@gluon.jit
def _read(
    first,
    line,
    m,
    columns,
    start,
    M: gl.constexpr,
    PANEL: gl.constexpr,
    ROW_MAJOR: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """The panel from column ``start`` on, zero beyond the matrix."""
    addresses, inside = _tile(first, line, m, columns, start, M, PANEL, ROW_MAJOR, LAYOUT)
    return gl.load(addresses, inside, other=0.0)


@gluon.jit
def _zero(m):
    """0, but unknown to the compiler: addresses and descriptors of shared memory that it enters are computed where
    they are used. Else those of all products would be computed once, and fill the registers of every loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [m], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _write(value, shared, WARPGROUP: gl.constexpr):
    """Round ``value`` into shared memory, for the products that come."""
    shared.store(value.to(shared.dtype))
    if WARPGROUP:
        fence_async_shared()


@gluon.jit
def _product(A, B, total, DEPTH: gl.constexpr, WARPGROUP: gl.constexpr, ADD: gl.constexpr = False):
    """A B for A and B in shared memory, added to ``total`` with ADD; else only the layout of ``total`` counts."""
    if WARPGROUP:
        total = warpgroup_mma(A, B, total, use_acc=ADD)
    else:
        layout: gl.constexpr = total.type.layout
        inner: gl.constexpr = A.shape[1]
        if not ADD:
            total = gl.zeros_like(total)
        for k in gl.static_range(0, inner, DEPTH):
            a = A.slice(k, DEPTH, 1).load(gl.DotOperandLayout(0, layout, 2))
            b = B.slice(k, DEPTH, 0).load(gl.DotOperandLayout(1, layout, 2))
            total = mma_v2(a, b, total)
    return total


@gluon.jit
def _polynomial(
    work,
    Qs,
    columns,
    m,
    zero,
    SEGMENT: gl.constexpr,
    STEPS: gl.constexpr,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    DEPTH: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    """Fill Qs[SEGMENT] with the product of COUNT step polynomials of R; a lone step's lacks its a·I, left to whom
    applies it.

    ``work`` is R and room for P, and both are lost. ``columns`` holds 0, 1, …, M − 1. ``zero`` is an (M, M)
    accumulator.
    """
    layout: gl.constexpr = zero.type.layout
    M: gl.constexpr = zero.shape[0]
    for k in gl.static_range(COUNT):
        first = _zero(m)
        R, Q = work.index(first), Qs.index(first + SEGMENT)
        P = Q if k == 0 else work.index(first + 1)
        value = STEPS[3 * (FIRST + k) + 2] * _product(R, R, zero, DEPTH, WARPGROUP)
        value += STEPS[3 * (FIRST + k) + 1] * R.load(layout).to(gl.float32)
        if COUNT > 1:
            i = gl.arange(0, M, gl.SliceLayout(1, layout))[:, None]
            j = columns.load(gl.SliceLayout(0, layout))[None, :]
            # Not on the padding, where powers of a could overflow and make NaN of its zeros.
            value += gl.where((i == j) & (i < m), STEPS[3 * (FIRST + k)], 0.0)
        _write(value, P, WARPGROUP)
        if k > 0:
            # All of P Q, not half: else P and Q would cease to commute. The sum is complete before it is written.
            _write(_product(P, Q, zero, DEPTH, WARPGROUP), Q, WARPGROUP)
        if k < COUNT - 1:
            _write(_product(R, P, zero, DEPTH, WARPGROUP), R, WARPGROUP)
            _write(_product(P, R, zero, DEPTH, WARPGROUP), R, WARPGROUP)


@gluon.jit
def small_gram_ns(
    X,
    out,
    m,
    n,
    x_batch,
    x_line,
    out_batch,
    out_line,
    STEPS: gl.constexpr,
    FIRSTS: gl.constexpr,
    COUNTS: gl.constexpr,
    DTYPE: gl.constexpr,
    X_DTYPE: gl.constexpr,
    OUT_DTYPE: gl.constexpr,
    NORMALIZE: gl.constexpr,
    RAGGED: gl.constexpr,
    X_ALIGNED: gl.constexpr,
    OUT_ALIGNED: gl.constexpr,
    X_ROW_MAJOR: gl.constexpr,
    OUT_ROW_MAJOR: gl.constexpr,
    M: gl.constexpr,
    PANEL: gl.constexpr,
    DEPTH: gl.constexpr,
    WARPGROUP: gl.constexpr,
    SQUARE: gl.constexpr,
    WIDE: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    OUT_LAYOUT: gl.constexpr,
):
    SEGMENTS: gl.constexpr = len(COUNTS)
    x_first, x_line, x_m, n = _matrix(X, x_line, m, n, x_batch, X_DTYPE, RAGGED, X_ALIGNED, X_ROW_MAJOR)
    out_first, out_line, out_m, out_n = _matrix(
        out, out_line, m, n, out_batch, OUT_DTYPE, RAGGED, OUT_ALIGNED, OUT_ROW_MAJOR
    )
    largest, norm = 1.0, 1.0
    if NORMALIZE:
        # As dmuon.kernels.normalize: by the largest element, then by the norm; a zero stays zero. The maximum
        # passes over NaN, which then poisons its matrix in R.
        tile = gl.zeros((M, PANEL), gl.float32, X_LAYOUT)
        for start in range(0, n, PANEL):
            value = _read(x_first, x_line, x_m, n, start, M, PANEL, X_ROW_MAJOR, X_LAYOUT)
            tile = gl.maximum(tile, gl.abs(value.to(gl.float32)))
        largest = gl.maximum(gl.max(gl.max(tile, 1), 0), _TINY)
        tile = gl.zeros((M, PANEL), gl.float32, X_LAYOUT)
        for start in range(0, n, PANEL):
            value = _read(x_first, x_line, x_m, n, start, M, PANEL, X_ROW_MAJOR, X_LAYOUT)
            scaled = value.to(gl.float32) / largest
            tile += scaled * scaled
        norm = gl.maximum(gl.sqrt(gl.sum(gl.sum(tile, 1), 0)), _TINY)

    matrix: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, M], DTYPE)
    panel: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, PANEL], DTYPE)
    loaded: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, PANEL], DTYPE, transposed=not X_ROW_MAJOR)
    Qs = gl.allocate_shared_memory(DTYPE, [SEGMENTS, M, M], matrix)
    zero = gl.zeros((M, M), gl.float32, SQUARE)
    # Read from memory whenever the diagonal is wanted: where it is would else be kept in a register per element.
    # One for each thread: more than M of them would else write the same elements.
    THREADS: gl.constexpr = 32 * gl.num_warps()
    each: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    columns = gl.allocate_shared_memory(gl.int32, [THREADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    columns.store(gl.arange(0, THREADS, each))
    for segment in gl.static_range(SEGMENTS + 1):
        R = zero
        Xs = gl.allocate_shared_memory(DTYPE, [M, PANEL], loaded)
        Ys = gl.allocate_shared_memory(DTYPE, [M, PANEL], panel)
        ahead = _read(x_first, x_line, x_m, n, 0, M, PANEL, X_ROW_MAJOR, X_LAYOUT)
        first = _zero(m)
        for start in range(0, n, PANEL):
            value = ahead
            ahead = _read(x_first, x_line, x_m, n, start + PANEL, M, PANEL, X_ROW_MAJOR, X_LAYOUT)
            if NORMALIZE:
                value = value.to(gl.float32) / largest / norm
            _write(value, Xs, WARPGROUP)
            # What earlier segments made of X is made again from X: cheaper than to write it and read it back.
            now = Xs
            for k in gl.static_range(segment):
                total = gl.zeros((M, PANEL), gl.float32, WIDE)
                if COUNTS[k] == 1:
                    total = STEPS[3 * FIRSTS[k]] * now.load(WIDE).to(gl.float32)
                total = _product(Qs.index(first + k), now, total, DEPTH, WARPGROUP, COUNTS[k] == 1)
                if k < SEGMENTS - 1:
                    _write(total, Ys, WARPGROUP)
                    now = Ys
                else:
                    addresses, inside = _tile(
                        out_first, out_line, out_m, out_n, start, M, PANEL, OUT_ROW_MAJOR, OUT_LAYOUT
                    )
                    # Rounded as a working matrix first, whatever the result's dtype.
                    result = total.to(DTYPE).to(OUT_DTYPE)
                    gl.store(addresses, gl.convert_layout(result, OUT_LAYOUT), inside)
            if segment < SEGMENTS:
                R = _product(now, now.permute((1, 0)), R, DEPTH, WARPGROUP, True)
        if segment < SEGMENTS:
            work = gl.allocate_shared_memory(DTYPE, [2, M, M], matrix)
            _write(R, work.index(0), WARPGROUP)
            _polynomial(
                work,
                Qs,
                columns.slice(0, M),
                m,
                zero,
                segment,
                STEPS,
                FIRSTS[segment],
                COUNTS[segment],
                DEPTH,
                WARPGROUP,
            )


_DTYPES = {"fp32": gl.float32, "fp16": gl.float16, "bf16": gl.bfloat16}
_BITS = {"fp32": 32, "fp16": 16, "bf16": 16}


def build(spec: KernelSpec) -> Binary:
    """Compile the kernel that ``spec`` describes."""
    options = spec.options
    side, panel, warps = options["side"], options["panel"], options["warps"]
    # Warpgroup instructions exist on sm_90a alone, for 64 rows and more.
    warpgroup = spec.arch == "sm_90a" and side >= 64
    firsts = [sum(options["segments"][:k]) for k in range(len(options["segments"]))]
    constexprs = {
        "STEPS": tuple(value for step in options["steps"] for value in step),
        "FIRSTS": tuple(firsts),
        "COUNTS": tuple(options["segments"]),
        "DTYPE": _DTYPES[options["dtype"]],
        "X_DTYPE": _DTYPES[options["x_dtype"]],
        "OUT_DTYPE": _DTYPES[options["out_dtype"]],
        "NORMALIZE": options["normalize"],
        "RAGGED": options["ragged"],
        "X_ALIGNED": options["x_aligned"],
        "OUT_ALIGNED": options["out_aligned"],
        "X_ROW_MAJOR": options["x_row_major"],
        "OUT_ROW_MAJOR": options["out_row_major"],
        "M": side,
        "PANEL": panel,
        "DEPTH": min(side, panel, 32),
        "WARPGROUP": warpgroup,
        "SQUARE": _accumulator(side, side, warps, warpgroup),
        "WIDE": _accumulator(side, panel, warps, warpgroup),
        "X_LAYOUT": _access(
            side, panel, warps, options["x_row_major"], options["x_dtype"], options["x_aligned"]
        ),
        "OUT_LAYOUT": _access(
            side, panel, warps, options["out_row_major"], options["out_dtype"], options["out_aligned"]
        ),
    }
    table = options["ragged"]
    signature = {
        "X": "*i64" if table else f"*{options['x_dtype']}",
        "out": "*i64" if table else f"*{options['out_dtype']}",
        "m": "i32",
        "n": "i32",
        "x_batch": "i64",
        "x_line": "i32",
        "out_batch": "i64",
        "out_line": "i32",
    }
    return compile_triton(
        spec, small_gram_ns, signature, constexprs, num_warps=warps, num_stages=1, registers=255
    )


def _accumulator(rows: int, columns: int, warps: int, warpgroup: bool) -> gl.NVMMADistributedLayout:
    """How a product's (rows, columns) lie in the registers of the warps."""
    down = min(rows // 16, warps)
    across = warps // down
    if warpgroup:
        return gl.NVMMADistributedLayout([3, 0], [down, across], [16, columns // across, 16])
    if warps == 8:
        # Squarer shares read less of both operands.
        down, across = 4, 2
    return gl.NVMMADistributedLayout([2, 0], [down, across], [16, 8])


def _access(
    rows: int, columns: int, warps: int, row_major: bool, dtype: str, aligned: bool
) -> gl.BlockedLayout:
    """How threads share the accesses to a (rows, columns) panel in memory: along its lines, 16 bytes each."""
    lanes = 128 // _BITS[dtype] if aligned else 1
    along = min(32, (columns if row_major else rows) // lanes)
    if row_major:
        return gl.BlockedLayout([1, lanes], [32 // along, along], [warps, 1], [1, 0])
    return gl.BlockedLayout([lanes, 1], [along, 32 // along], [1, warps], [0, 1])
