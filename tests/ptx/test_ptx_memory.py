"""Memory spaces: widths, bounds, alignment, variables, atomics."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, f32, i32, i64, pointer
from dmuon.kernels.gpu.ptx_text import params_of
from ptx import Memory, Race, run
from ptx.snippets import call

ADDRESS = "mul.wide.u32 %rd10, %r0, {0}; add.s64 %rd11, %rd0, %rd10; add.s64 %rd12, %rd1, %rd10;"


@pytest.mark.parametrize(
    ("load", "store", "registers", "size"),
    [
        ("ld.global.b16", "st.global.b16", "%h1", 2),
        ("ld.global.nc.b32", "st.global.wt.b32", "%r1", 4),
        ("ld.global.L1::evict_last.b64", "st.global.b64", "%rd20", 8),
        ("ld.global.v2.b16", "st.global.v2.b16", "{%h1, %h2}", 4),
        ("ld.global.v4.b16", "st.global.v4.b16", "{%h1, %h2, %h3, %h4}", 8),
        ("ld.global.nc.L1::no_allocate.v2.f32", "st.global.v2.f32", "{%f1, %f2}", 8),
        ("ld.global.v4.b32", "st.global.cs.v4.b32", "{%r1, %r2, %r3, %r4}", 16),
        ("ld.global.v2.b64", "st.global.v2.b64", "{%rd20, %rd21}", 16),
        ("ld.global.v8.b32", "st.global.v8.b32", "{%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}", 32),
    ],
)
@pytest.mark.parametrize("through", ["", "shared", "generic"])
def test_vectors(load: str, store: str, registers: str, size: int, through: str) -> None:
    x = torch.randint(0, 256, (64 * size,), dtype=torch.uint8)
    y = torch.zeros_like(x)
    body = ADDRESS.format(size) + f"{load} {registers}, [%rd11];"
    if through:
        space = ".shared" if through == "shared" else ""
        plain = re.sub(r"\.(nc|wt|cs|L1::\w+)", "", load), re.sub(r"\.(nc|wt|cs)", "", store)
        into, back = (text.replace(".global", space) for text in (plain[1], plain[0]))
        where = f"mov.u32 %r100, smem; mad.lo.u32 %r100, %r0, {size}, %r100; cvt.u64.u32 %rd13, %r100;"
        if through == "generic":
            where += "cvta.shared.u64 %rd13, %rd13;"
        address = "[%r100]" if through == "shared" else "[%rd13]"
        body += where + f"{into} {address}, {registers}; bar.sync 0; {back} {registers}, {address};"
    body += f"{store} [%rd12], {registers};"
    report = call(body, x, y, threads=64, shared=64 * size)
    assert torch.equal(x, y)
    assert report.loaded == [x.numel(), 0] and report.stored == [0, x.numel()]


def test_narrow_loads_are_extended() -> None:
    x = torch.arange(-16, 16, dtype=torch.int8)
    y, z = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    body = """
        cvt.u64.u32 %rd10, %r0; add.s64 %rd11, %rd0, %rd10; shl.b64 %rd10, %rd10, 2;
        add.s64 %rd12, %rd1, %rd10; add.s64 %rd13, %rd2, %rd10;
        ld.global.s8 %r1, [%rd11]; ld.global.u8 %r2, [%rd11];
        st.global.b32 [%rd12], %r1; st.global.b32 [%rd13], %r2;
    """
    call(body, x, y, z)
    assert torch.equal(y, x.int()) and torch.equal(z, x.view(torch.uint8).int())


@pytest.mark.parametrize(
    ("offset", "message"),
    [(32, r"out of bounds: the nearest tensor is 0"), (-4, "out of bounds"), (2, "not a multiple of 4")],
)
def test_out_of_bounds_or_misaligned(offset: int, message: str) -> None:
    x = torch.zeros(40)[4:36]
    with pytest.raises(IndexError, match=rf"{message}.*line \d+: ld\.global"):
        call(ADDRESS.format(4) + f"ld.global.b32 %r1, [%rd11+{4 * offset if offset != 2 else 2}];", x, x)


def test_gaps_between_rows_are_out_of_bounds() -> None:
    x = torch.zeros(8, 40)[:, :32]
    body = "mul.wide.u32 %rd10, %r0, {0}; add.s64 %rd11, %rd0, %rd10; st.global.b32 [%rd11], %r0;"
    call(body.format(4), x)
    with pytest.raises(IndexError, match="in a gap of tensor 0, 128 bytes after"):
        call("st.global.b32 [%rd0+128], %r0;", x)
    with pytest.raises(IndexError, match="gap"):
        call("mov.b32 %r1, 0; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd0+144];", x)


def test_accesses_in_several_tensors_at_once() -> None:
    x, y, out = torch.arange(32), torch.arange(100, 132), torch.zeros(32, dtype=torch.int64)
    body = """
        and.b32 %r1, %r0, 1; setp.eq.u32 %p1, %r1, 0; selp.b64 %rd5, %rd0, %rd1, %p1;
        mul.wide.u32 %rd10, %r0, 8; add.s64 %rd5, %rd5, %rd10; add.s64 %rd6, %rd2, %rd10;
        ld.global.b64 %rd7, [%rd5]; st.global.b64 [%rd6], %rd7;
    """
    report = call(body, x, y, out)
    assert torch.equal(out, torch.where(torch.arange(32) % 2 == 0, x, y))
    assert report.loaded == [128, 128, 0]


def test_overlapping_views_are_one_memory() -> None:
    x = torch.zeros(64)
    memory = Memory.of(x, x[32:])
    values = np.ones(1, np.uint32)
    memory.store(np.array([x.data_ptr() + 4 * 40]), values, 4)
    assert memory.stored == [4, 4] and x[40] != 0


def test_shared_bounds_and_poison() -> None:
    out = torch.zeros(32)
    body = "mov.u32 %r1, smem; ld.shared.f32 %f1, [%r1+{}]; st.global.f32 [%rd0], %f1;"
    call(body.format(0), out, shared=64)
    assert torch.isnan(out[0])
    with pytest.raises(IndexError, match="shared address 0x440: the block has 0x400 to 0x440"):
        call(body.format(64), out, shared=64)


def test_static_shared_constant_and_global_variables() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    head = """
    .global .align 4 .u32 table[4] = {3, 5, 7, 0xB};
    .const .align 4 .b8 bytes[4] = {1, 2, 3, 4};
    """
    body = """
        .shared .align 8 .b8 mine[128];
        mov.u32 %r10, mine; shl.b32 %r11, %r0, 2; add.u32 %r10, %r10, %r11;
        and.b32 %r1, %r0, 3; mul.wide.u32 %rd10, %r1, 4;
        mov.u64 %rd11, table; add.s64 %rd11, %rd11, %rd10; ld.global.u32 %r2, [%rd11];
        mov.u64 %rd12, bytes; cvt.u64.u32 %rd13, %r1; add.s64 %rd12, %rd12, %rd13; ld.const.u8 %r3, [%rd12];
        mad.lo.u32 %r2, %r3, 100, %r2;
        st.shared.u32 [%r10], %r2; ld.shared.u32 %r4, [%r10];
        mul.wide.u32 %rd10, %r0, 4; add.s64 %rd1, %rd0, %rd10; st.global.u32 [%rd1], %r4;
    """
    for _ in range(2):
        call(body, out, head=head)
        assert out.tolist() == [103, 205, 307, 411] * 8


def test_local_memory() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    body = (
        """
        .local .align 16 .b8 depot[32];
        mov.u64 %rd10, depot; cvta.local.u64 %rd11, %rd10;
        st.local.u32 [%rd10+4], %r0;
        add.u32 %r1, %r0, 1000; st.u32 [%rd11+8], %r1;
        ld.local.v2.u32 {%r2, %r3}, [%rd10+4];
    """.replace("v2.u32 {%r2, %r3}, [%rd10+4]", "u32 %r2, [%rd10+4]; ld.local.u32 %r3, [%rd10+8]")
        + """
        add.u32 %r2, %r2, %r3; mul.wide.u32 %rd12, %r0, 4; add.s64 %rd1, %rd0, %rd12; st.global.u32 [%rd1], %r2;
    """
    )
    call(body, out, threads=64)
    assert out.tolist() == [2 * k + 1000 for k in range(64)]


ATOMICS = {
    "red.global.add.u32 [%rd0], %r1": sum(range(1, 65)),
    "atom.global.gpu.relaxed.add.u32 %r2, [%rd0], %r1": sum(range(1, 65)),
    "atom.global.max.s32 %r2, [%rd0], %r1": 64,
    "red.global.gpu.acq_rel.or.b32 [%rd0], %r1": 127,
    "atom.global.inc.u32 %r2, [%rd0], 9": 64 % 10,
}


@pytest.mark.parametrize("statement", ATOMICS)
def test_atomics(statement: str) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    call(f"add.u32 %r1, %r0, 1; {statement};", out, threads=64, seed=0)
    assert out.item() == ATOMICS[statement]


def test_atomic_results_and_floats() -> None:
    total, tickets, drawn = (
        torch.zeros(1),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(64, dtype=torch.int32),
    )
    body = """
        atom.global.add.f32 %f1, [%rd0], 0f3F000000;
        atom.global.add.u32 %r1, [%rd1], 1;
        mul.wide.u32 %rd10, %r0, 4; add.s64 %rd11, %rd2, %rd10; st.global.u32 [%rd11], %r1;
    """
    call(body, total, tickets, drawn, threads=64, seed=1)
    assert (
        total.item() == 32 and sorted(drawn.tolist()) == list(range(64)) and drawn.tolist() != list(range(64))
    )


def test_atomics_in_shared_memory_do_not_race() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    body = """
        mov.u32 %r1, smem; setp.ne.u32 %p1, %r0, 0; mov.u32 %r2, 0;
        @!%p1 st.shared.u32 [%r1], %r2;
        bar.sync 0;
        atom.shared.add.u32 %r3, [%r1], %r0;
        bar.sync 0;
        ld.shared.u32 %r4, [%r1]; st.global.u32 [%rd0], %r4;
    """
    call(body, out, threads=128, shared=16)
    assert out.item() == 127 * 64


def test_launches_that_a_driver_would_refuse() -> None:
    with pytest.raises(ValueError, match=r"needs 232449 bytes of shared memory.* sm_90a has at most 232448"):
        call("", torch.zeros(1), shared=232449)
    with pytest.raises(ValueError, match="grid must be from"):
        call("", torch.zeros(1), grid=(1, 65536, 1))
    with pytest.raises(ValueError, match="blocks of 1056 threads"):
        call("", torch.zeros(1), threads=1056)


def test_compare_and_swap_as_a_lock() -> None:
    """Blocks that wait for each other must be resident together."""
    lock, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    body = """
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra END;
    TRY:
        atom.global.acquire.gpu.cas.b32 %r1, [%rd0], 0, 1;
        setp.ne.u32 %p2, %r1, 0;
        @%p2 bra TRY;
        ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, 1; st.global.u32 [%rd1], %r2;
        atom.global.release.gpu.exch.b32 %r1, [%rd0], 0;
    END:
    """
    for seed in (None, 0, 1):
        lock.zero_(), total.zero_()
        call(body, lock, total, grid=(5, 1, 1), seed=seed, races=False)
        assert total.item() == 5


def test_parameters_of_all_sizes_are_read_where_they_lie() -> None:
    ptx = """
    .version 8.0
    .target sm_80
    .address_size 64
    .visible .entry k(.param .u64 .ptr .global .align 16 k_0, .param .b32 k_1, .param .u64 k_2, .param .f32 k_3,
        .param .align 4 .b8 k_4[12])
    .maxntid 32
    {
        .reg .b64 %rd<4>; .reg .b32 %r<8>;
        ld.param.b64 %rd1, [k_0]; cvta.to.global.u64 %rd1, %rd1;
        ld.param.b32 %r1, [k_1]; ld.param.b64 %rd2, [k_2]; ld.param.b32 %r2, [k_3]; ld.param.v2.b32 {%r3, %r4}, [k_4+4];
        st.global.b32 [%rd1], %r1; st.global.b64 [%rd1+8], %rd2; st.global.b32 [%rd1+16], %r2;
        st.global.v2.b32 [%rd1+24], {%r3, %r4};
        ret;
    }
    """
    out = torch.zeros(8, dtype=torch.int32)
    binary = Binary(KernelSpec("ptx", "x", "sm_80"), "k", 32, 0, params_of(ptx), ptx, b"")
    args = (pointer(out.data_ptr()), i32(-3), i64(1 << 40), f32(1.5), i32(7) + i32(8) + i32(9))
    run(binary, Launch((1, 1, 1), args), Memory.of(out))
    assert out[0] == -3 and out.view(torch.int64)[1] == 1 << 40
    assert out.view(torch.float32)[4] == 1.5 and out[6:].tolist() == [8, 9]


RACING = """
    mov.u32 %r1, smem; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; xor.b32 %r2, %r2, 128; add.u32 %r4, %r1, %r2;
    st.shared.u32 [%r3], %r0;
    {0}
    ld.shared.u32 %r5, [%r4];
    {1}
    st.shared.u32 [%r3], %r5;
    mul.wide.u32 %rd10, %r0, 4; add.s64 %rd1, %rd0, %rd10; st.global.u32 [%rd1], %r5;
"""


def test_races_in_shared_memory() -> None:
    """Another warp's write without a barrier, and a write to what another warp may still read."""
    out = torch.zeros(64, dtype=torch.int32)
    call(RACING.format("bar.sync 0;", "bar.sync 0;"), out, threads=64, shared=256)
    assert out.tolist() == [k ^ 32 for k in range(64)]
    with pytest.raises(Race, match=r"warp 0 reads .*last written by warp 1.*st\.shared"):
        call(RACING.format("", "bar.sync 0;"), out, threads=64, shared=256)
    with pytest.raises(Race, match="overwrites what others still read"):
        call(RACING.format("bar.sync 0;", ""), out, threads=64, shared=256)
    call(RACING.format("", "bar.sync 0;"), out, threads=64, shared=256, races=False)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("st.global.u32 [%rd0], %r0;", "writes at the same time as cluster"),
        (
            "setp.eq.u32 %p1, %r9, 1; @!%p1 st.global.u32 [%rd0], %r0; @%p1 st.global.u32 [%rd0], %r0;",
            "has written",
        ),
        ("ld.global.u32 %r1, [%rd0]; setp.eq.u32 %p1, %r9, 1; @%p1 st.global.u32 [%rd0], %r0;", "has read"),
        (
            "setp.eq.u32 %p1, %r9, 0; @%p1 st.global.u32 [%rd0], %r0; ld.global.u32 %r1, [%rd0];",
            "reads what cluster 0",
        ),
    ],
)
def test_races_between_blocks_in_global_memory(statement: str, message: str) -> None:
    out = torch.zeros(32)
    body = "mov.u32 %r9, %ctaid.x;" + statement
    for seed in (None, 0):
        call(body, out, seed=seed)
        call(body, out, grid=(2, 1, 1), seed=seed, races=False)
        with pytest.raises(Race, match=message if seed is None else "race"):
            call(body, out, grid=(2, 1, 1), seed=seed)


SHARED_TILE = """
    mul.wide.u32 %rd10, %r0, 4; xor.b32 %r2, %r0, 32; mul.wide.u32 %rd11, %r2, 4;
    add.s64 %rd12, %rd0, %rd10; add.s64 %rd13, %rd0, %rd11;
    ld.global.u32 %r1, [%rd12]; add.u32 %r1, %r1, 1;
    {0}
    st.global.u32 [%rd13], %r1;
    {1}
    ld.global.u32 %r3, [%rd12];
"""


def test_races_between_warps_in_global_memory() -> None:
    """An accumulator updated in place, each element written by another warp than read it."""
    for seed in (None, 0, 1):
        x = torch.arange(64, dtype=torch.int32)
        call(SHARED_TILE.format("bar.sync 0;", "bar.sync 0;"), x, threads=64, seed=seed)
        assert x.tolist() == [1 + (k ^ 32) for k in range(64)]
        with pytest.raises(Race, match="warp . overwrites what warp . has read" if seed is None else "race"):
            call(SHARED_TILE.format("", "bar.sync 0;"), x, threads=64, seed=seed)
        with pytest.raises(Race, match="warp . reads what warp . has written" if seed is None else "race"):
            call(SHARED_TILE.format("bar.sync 0;", ""), x, threads=64, seed=seed)


def test_named_barriers_order_only_those_that_meet() -> None:
    """A producer that only arrives is ordered before a consumer that waits, not the other way round."""
    out = torch.zeros(64, dtype=torch.int32)
    body = """
        mov.u32 %r1, smem; and.b32 %r2, %r0, 31; shl.b32 %r2, %r2, 2; add.u32 %r3, %r1, %r2;
        setp.ge.u32 %p1, %r0, 32;
        @%p1 bra CONSUMER;
        st.shared.u32 [%r3], %r0;
        {0} 1, 64;
        {1}
        ret;
    CONSUMER:
        mov.u32 %r6, 1;
        {2} %r6, 64;
        ld.shared.u32 %r5, [%r3];
        mul.wide.u32 %rd10, %r0, 4; add.s64 %rd1, %rd0, %rd10; st.global.u32 [%rd1], %r5;
    """
    for seed in (None, 0, 1, 2):
        call(body.format("bar.arrive", "", "bar.sync"), out, threads=64, shared=256, seed=seed)
        assert out[32:].tolist() == list(range(32))
    with pytest.raises(Race):
        call(body.format("bar.sync", "", "bar.arrive"), out, threads=64, shared=256)
    with pytest.raises(Race):
        call(body.format("bar.arrive", "st.shared.u32 [%r3], %r1;", "bar.sync"), out, threads=64, shared=256)


def test_barriers_that_count_and_vote() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    body = """
        setp.lt.u32 %p1, %r0, 40;
        barrier.cta.red.popc.aligned.u32 %r1, 0, %p1;
        bar.red.and.pred %p2, 0, %p1;
        selp.b32 %r2, 1000, 0, %p2; add.u32 %r1, %r1, %r2;
        mul.wide.u32 %rd10, %r0, 4; add.s64 %rd1, %rd0, %rd10; st.global.u32 [%rd1], %r1;
    """
    call(body, out, threads=64)
    assert out.tolist() == [40] * 64


def test_a_barrier_in_a_part_of_a_warp_is_refused() -> None:
    with pytest.raises(RuntimeError, match="aligned barrier"):
        call("setp.lt.u32 %p1, %r0, 5; @%p1 bar.sync 0;", torch.zeros(1))
