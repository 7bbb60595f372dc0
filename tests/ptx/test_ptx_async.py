"""Asynchronous copies, mbarriers, TMA and wgmma: right when waited for, and noticed when not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dmuon.kernels.gpu.binary import Binary, Launch, TensorMap, pointer
from ptx import Deadlock, Memory, Race, run
from ptx.mutate import SYNCHRONISATION, mutants, survivors
from ptx.snippets import call, kernel
from ptx.tensors import check_tensor_map

SEEDS = (None, 0, 1, 2)

COPY = """
    mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 16, %r1;
    mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd0, %rd10; add.s64 %rd12, %rd1, %rd10;
"""


def test_cp_async_fills_with_zeros() -> None:
    x, out = torch.arange(128.0), torch.zeros(128)
    body = (
        COPY
        + """
        mov.u32 %r3, 16; setp.eq.u32 %p1, %r0, 5; @%p1 mov.u32 %r3, 0; setp.eq.u32 %p1, %r0, 6; @%p1 mov.u32 %r3, 12;
        cp.async.cg.shared.global.L2::128B [%r2], [%rd11], 16, %r3;
        cp.async.commit_group; cp.async.wait_group 0;
        ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r2]; st.global.v4.f32 [%rd12], {%f1, %f2, %f3, %f4};
    """
    )
    for seed in SEEDS:
        report = call(body, x, out, shared=512, seed=seed)
        want = x.clone()
        want[20:24], want[27] = 0, 0
        assert torch.equal(out, want) and report.loaded[0] == 30 * 16 + 12


def test_small_copies_of_neighbouring_threads_do_not_race() -> None:
    """Threads of two warps copy four bytes each into one line, in turns."""
    x, out = torch.arange(64.0), torch.zeros(64)
    body = """
        mov.u32 %r1, smem; and.b32 %r2, %r0, 31; shl.b32 %r2, %r2, 1; shr.u32 %r3, %r0, 5; add.u32 %r2, %r2, %r3;
        mul.wide.u32 %rd10, %r2, 4; add.s64 %rd11, %rd0, %rd10; mad.lo.u32 %r3, %r2, 4, %r1;
        cp.async.ca.shared.global [%r3], [%rd11], 4;
        cp.async.wait_all; bar.sync 0;
        and.b32 %r4, %r0, 15; mad.lo.u32 %r3, %r4, 16, %r1; mul.wide.u32 %rd10, %r4, 16; add.s64 %rd12, %rd1, %rd10;
        ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r3]; st.global.v4.f32 [%rd12], {%f1, %f2, %f3, %f4};
    """
    call(body, x, out, threads=64, shared=256)
    assert torch.equal(out, x)


def test_cp_async_does_not_read_what_it_fills() -> None:
    x, out = torch.ones(128)[:100], torch.zeros(128)
    body = (
        COPY
        + """
        setp.lt.u32 %p1, %r0, 25; selp.b32 %r3, 16, 0, %p1;
        cp.async.cg.shared.global [%r2], [%rd11], 16, {};
        cp.async.wait_all;
        ld.shared.v4.f32 {{%f1, %f2, %f3, %f4}}, [%r2]; st.global.v4.f32 [%rd12], {{%f1, %f2, %f3, %f4}};
    """
    )
    call(body.replace("{}", "%r3").replace("{{", "{").replace("}}", "}"), x, out, shared=512)
    assert out.sum() == 100
    with pytest.raises(IndexError, match=r"out of bounds.*cp\.async\.wait_all"):
        call(body.replace(", {}", "").replace("{{", "{").replace("}}", "}"), x, out, shared=512)


PIPELINE = """
    mov.u32 %r1, smem; and.b32 %r3, %r0, 63; mad.lo.u32 %r2, %r0, 16, %r1;
    mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd0, %rd10; add.s64 %rd12, %rd1, %rd10;
    xor.b32 %r4, %r0, 32; mad.lo.u32 %r5, %r4, 16, %r1;
    mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
    cp.async.cg.shared.global [%r2], [%rd11], 16;
    cp.async.commit_group;
    mov.u32 %r6, 0;
LOOP:
    add.u32 %r7, %r6, 1; setp.lt.u32 %p1, %r7, 5;
    and.b32 %r8, %r7, 1; mad.lo.u32 %r9, %r8, 1024, %r2; mul.wide.u32 %rd13, %r7, 1024; add.s64 %rd14, %rd11, %rd13;
    @%p1 cp.async.cg.shared.global [%r9], [%rd14], 16;
    cp.async.commit_group;
    cp.async.wait_group 1;
    bar.sync 0;
    and.b32 %r8, %r6, 1; mad.lo.u32 %r9, %r8, 1024, %r5;
    ld.shared.v4.f32 {%f5, %f6, %f7, %f8}, [%r9];
    add.f32 %f1, %f1, %f5; add.f32 %f2, %f2, %f6; add.f32 %f3, %f3, %f7; add.f32 %f4, %f4, %f8;
    bar.sync 0;
    mov.u32 %r6, %r7;
    @%p1 bra LOOP;
    st.global.v4.f32 [%rd12], {%f1, %f2, %f3, %f4};
"""
"""Two stages of cp.async; each thread sums what its counterpart in the other warp copied."""


def _pipeline(seeds: tuple[int | None, ...] = SEEDS, races: bool = True) -> Callable[[Binary], None]:
    def check(binary: Binary) -> None:
        for seed in seeds:
            x, out = torch.arange(5 * 64 * 4.0), torch.zeros(64, 4)
            launch = Launch((1, 1, 1), (pointer(x.data_ptr()), pointer(out.data_ptr())))
            run(binary, launch, Memory.of(x, out), seed=seed, races=races, max_steps=10_000)
            want = x.view(5, 64, 4).sum(0)
            assert torch.equal(out, torch.cat([want[32:], want[:32]]))

    return check


def test_every_fault_in_a_pipeline_of_copies_is_noticed() -> None:
    """In lockstep alone by the order of accesses, and by wrong numbers alone with random schedules."""
    binary = kernel(PIPELINE, 2, threads=64, shared=2048)
    assert len(list(mutants(binary, *SYNCHRONISATION))) == 5
    lived = survivors(binary, _pipeline((None,)), *SYNCHRONISATION, "comparison", "boundary")
    assert [str(mutant) for mutant in lived] == []
    lived = survivors(binary, _pipeline((None, *range(12)), races=False), *SYNCHRONISATION)
    assert [str(mutant) for mutant in lived] == []


TMA = """
    mov.u32 %r1, smem; add.u32 %r2, %r1, 2048;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    @%p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [map0, {%r3, %r4}], [%r2];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
    @!%p2 bra WAIT;
"""


def _map(tensor: torch.Tensor, box: tuple[int, int], swizzle: int) -> TensorMap:
    kind = {2: "bf16", 4: "fp32"}[tensor.element_size()]
    strides = (tensor.stride(0) * tensor.element_size(),)
    return TensorMap(tensor.data_ptr(), kind, (tensor.shape[1], tensor.shape[0]), strides, box, swizzle)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("corner", [(0, 0), (24, 9), (-8, -3), (64, 0)])
def test_tensor_loads(swizzle: int, corner: tuple[int, int]) -> None:
    """A box at ``corner`` (column, row) of a 20 × 40 matrix, zeros outside."""
    x = torch.arange(20 * 48).view(20, 48)[:, :40].to(torch.bfloat16)
    columns = max(swizzle, 32) // 2
    rows = 1024 // columns
    out = torch.zeros(rows, columns, dtype=torch.bfloat16)
    body = (
        f"mov.u32 %r3, {corner[0]}; mov.u32 %r4, {corner[1]};"
        + TMA
        + """
        mad.lo.u32 %r5, %r0, 16, %r1; mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd1, %rd10;
        ld.shared.v4.u32 {%r6, %r7, %r8, %r9}, [%r5]; st.global.v4.u32 [%rd11], {%r6, %r7, %r8, %r9};
    """
    )
    padded = torch.zeros(200, 200, dtype=torch.bfloat16)
    padded[50:70, 50:90] = x
    want = padded[50 + corner[1] :, 50 + corner[0] :][:rows, :columns]
    for seed in SEEDS:
        call(body, x, out, maps=(_map(x, (columns, rows), swizzle),), threads=128, shared=4096, seed=seed)
        found = torch.zeros_like(out).flatten()
        for chunk in range(128):
            address = 1024 + 16 * chunk
            source = address ^ ((address >> 7) % (swizzle // 16) << 4 if swizzle else 0)
            at = (source - 1024) // 2
            found[8 * chunk : 8 * chunk + 8] = out.flatten()[at : at + 8]
        assert torch.equal(found.view(rows, columns), want)


def test_a_tensor_load_that_is_not_waited_for() -> None:
    x, out = torch.ones(16, 64).bfloat16(), torch.zeros(16, 64).bfloat16()
    use = "mad.lo.u32 %r5, %r0, 4, %r1; ld.shared.u32 %r6, [%r5]; add.s64 %rd5, %rd1, 0; st.global.u32 [%rd5], %r6;"
    body = "mov.u32 %r3, 0; mov.u32 %r4, 0;" + TMA
    maps = (_map(x, (64, 16), 128),)
    call(body + use, x, out, maps=maps, threads=64, shared=4096)
    wait = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;\n    @!%p2 bra WAIT;"
    with pytest.raises(Race, match="written by a bulk load"):
        call((body + use).replace(wait, ""), x, out, maps=maps, threads=64, shared=4096)
    with pytest.raises(RuntimeError, match="still in flight"):
        call(body.replace(wait, ""), x, out, maps=maps, threads=64, shared=4096)
    with pytest.raises(Deadlock, match=r"warps 0-1: waits for an mbarrier at line \d+: mbarrier\.try_wait"):
        call(
            body.replace("b64 _, [%r2], 2048", "b64 _, [%r2], 2049"),
            x,
            out,
            maps=maps,
            threads=64,
            shared=4096,
        )
    with pytest.raises(RuntimeError, match="no initialised mbarrier"):
        call(
            body.replace("mbarrier.init.shared::cta.b64 [%r2], 1;", ""),
            x,
            out,
            maps=maps,
            threads=64,
            shared=4096,
        )


def test_more_arrivals_than_a_barrier_expects() -> None:
    body = """
        mov.u32 %r1, smem; setp.ne.u32 %p1, %r0, 0;
        @!%p1 mbarrier.init.shared.b64 [%r1], 8;
        bar.sync 0;
        mbarrier.arrive.shared.b64 %rd5, [%r1];
    """
    with pytest.raises(RuntimeError, match="32 arrivals at an mbarrier that expects 8 more"):
        call(body, torch.zeros(1), shared=64)


def test_a_wait_by_state() -> None:
    """The state that arrive returned names the phase to wait for; test_wait looks without waiting."""
    out = torch.zeros(64, dtype=torch.int32)
    body = """
        mov.u32 %r1, smem; setp.ne.u32 %p1, %r0, 0;
        @!%p1 mbarrier.init.shared.b64 [%r1], 64;
        bar.sync 0;
        mov.u32 %r5, 0;
    AGAIN:
        mbarrier.arrive.release.cta.shared::cta.b64 %rd5, [%r1];
    TRY:
        mbarrier.test_wait.shared.b64 %p2, [%r1], %rd5;
        @!%p2 bra TRY;
        add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 3; @%p3 bra AGAIN;
        mul.wide.u32 %rd10, %r0, 4; add.s64 %rd11, %rd0, %rd10; st.global.u32 [%rd11], %r5;
    """
    for seed in SEEDS:
        call(body, out, threads=64, shared=64, seed=seed)
        assert out.tolist() == [3] * 64


STORE = """
    mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 4, %r1; mad.lo.u32 %r3, %r0, 3, 5;
    mov.u32 %r8, 0; setp.ne.u32 %p1, %r0, 0; mov.u32 %r9, 0;
LOOP:
    add.u32 %r4, %r3, %r8; st.shared.u32 [%r2], %r4;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra NEXT;
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [map0, {%r9, %r8}], [%r1];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
NEXT:
    bar.sync 0;
    add.u32 %r8, %r8, 2; setp.lt.u32 %p2, %r8, 6; @%p2 bra LOOP;
"""
"""Two rows of 32 numbers at a time through one buffer to a 5 × 32 matrix: the last row is out of bounds."""


def _store(seeds: tuple[int | None, ...]) -> Callable[[Binary], None]:
    def check(binary: Binary) -> None:
        for seed in seeds:
            out = torch.zeros(5, 32)
            maps = (_map(out, (32, 2), 0),)
            launch = Launch((1, 1, 1), (pointer(out.data_ptr()), *maps))
            report = run(binary, launch, Memory.of(out), seed=seed, max_steps=10_000)
            values = 3 * torch.arange(64).view(2, 32) + 5
            want = torch.cat([values, values + 2, values + 4]).int()[:5]
            assert torch.equal(out.view(torch.int32), want)
            assert report.stored == [5 * 32 * 4] and report.tma_bytes == 6 * 32 * 4

    return check


def test_every_fault_in_tensor_stores_is_noticed() -> None:
    binary = kernel(STORE, 1, 1, threads=64, shared=512)
    lived = survivors(binary, _store((None, 0, 1)), *SYNCHRONISATION, "guard", "comparison", "boundary")
    assert [str(mutant) for mutant in lived] == []


def test_a_missing_fence_is_named() -> None:
    out = torch.zeros(5, 32)
    body, maps = STORE.replace("fence.proxy.async.shared::cta;", ""), (_map(out, (32, 2), 0),)
    with pytest.raises(
        RuntimeError, match=r"a bulk store reads .* without a fence\.proxy\.async .*st\.shared"
    ):
        call(body, out, maps=maps, threads=64, shared=512)


def test_a_fence_by_the_issuing_thread_after_the_barrier_will_do() -> None:
    moved = STORE.replace("fence.proxy.async.shared::cta;", "").replace(
        "cp.async.bulk.tensor", "fence.proxy.async.shared::cta; cp.async.bulk.tensor"
    )
    _store(SEEDS)(kernel(moved, 1, 1, threads=64, shared=512))


def test_tensor_reductions_add() -> None:
    out = torch.ones(5, 32)
    body = STORE.replace("mad.lo.u32 %r3, %r0, 3, 5;", "mov.b32 %r3, 0f40000000;")
    body = body.replace("add.u32 %r4, %r3, %r8;", "mov.u32 %r4, %r3;")
    body = body.replace("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor").replace(
        "shared::cta.bulk", "shared::cta.add.bulk"
    )
    call(body, out, maps=(_map(out, (32, 2), 0),), threads=64, shared=512)
    assert torch.equal(out, torch.full((5, 32), 3.0))


def test_bulk_copies_of_bytes() -> None:
    x, out = torch.arange(256.0), torch.zeros(256)
    body = """
        mov.u32 %r1, smem; add.u32 %r2, %r1, 1024; setp.ne.u32 %p1, %r0, 0; @%p1 bra WAIT;
        mbarrier.init.shared::cta.b64 [%r2], 1;
        mbarrier.arrive.expect_tx.shared::cta.b64 %rd5, [%r2], 1024;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd0], 1024, [%r2];
    WAIT:
        bar.sync 0;
    TRY:
        mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
        @!%p2 bra TRY;
        @%p1 bra END;
        cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 1024;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    END:
    """
    for seed in SEEDS:
        out.zero_()
        call(body, x, out, shared=2048, seed=seed, threads=64)
        assert torch.equal(out, x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": 8}, "address must be a multiple of 16"),
        ({"strides": (24,)}, "multiples of 16"),
        ({"box": (512, 1)}, "box sizes"),
        ({"box": (4, 4)}, "multiples of 16 bytes"),
        ({"swizzle": 32}, "longer than the swizzle"),
        ({"strides": ()}, "strides"),
    ],
)
def test_tensor_maps_that_a_driver_would_refuse(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "address": 1024,
        "dtype": "bf16",
        "shape": (64, 64),
        "strides": (128,),
        "box": (64, 8),
        "swizzle": 128,
    }
    check_tensor_map(TensorMap(**fields))
    with pytest.raises(ValueError, match=message):
        check_tensor_map(TensorMap(**{**fields, **change}))


WGMMA = """
    mov.u32 %r1, smem; mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd0, %rd10; mad.lo.u32 %r2, %r0, 16, %r1;
    ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd11];
    st.shared.v4.u32 [%r2], {%r4, %r5, %r6, %r7}; st.shared.v4.u32 [%r2+2048], {%r4, %r5, %r6, %r7};
    fence.proxy.async; bar.sync 0;
    mov.b64 %rd20, 0x0000001000080040;
    setp.ne.u32 %p1, 0, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd20, %rd20, %p1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    add.s64 %rd12, %rd1, %rd10; st.global.v4.f32 [%rd12], {%f0, %f1, %f2, %f3};
"""


def _wgmma(body: str, **options: Any) -> torch.Tensor:
    x, out = torch.ones(1024).bfloat16(), torch.zeros(128, 4)
    call(body, x, out, threads=128, shared=4096, **options)
    return out


def test_wgmma_that_is_not_waited_for() -> None:
    for seed in SEEDS:
        assert (_wgmma(WGMMA, seed=seed) == 16).all()
    early = WGMMA.replace("wgmma.wait_group.sync.aligned 0;", "")
    with pytest.raises(RuntimeError, match="never waited for"):
        _wgmma(early)
    # The accumulators are not there yet: poison.
    late = early + "wgmma.wait_group.sync.aligned 0;"
    assert torch.isnan(_wgmma(late)).all()


def test_accumulators_need_a_fence() -> None:
    with pytest.raises(RuntimeError, match=r"without a wgmma\.fence"):
        _wgmma(WGMMA.replace("wgmma.fence.sync.aligned;", ""))
    again = WGMMA[WGMMA.index("wgmma.mma_async") : WGMMA.index("add.s64 %rd12, %rd1")]
    twice = WGMMA.replace("add.s64 %rd12, %rd1", "setp.eq.u32 %p1, 0, 0; {0}" + again + "add.s64 %rd12, %rd1")
    assert (_wgmma(twice.replace("{0}", "")) == 32).all()
    assert (
        _wgmma(twice.replace("{0}", "add.f32 %f1, %f1, %f1; wgmma.fence.sync.aligned;"))[:, 1] == 48
    ).all()
    with pytest.raises(RuntimeError, match=r"without a wgmma\.fence"):
        _wgmma(twice.replace("{0}", "add.f32 %f1, %f1, %f1;"))


def test_a_block_that_exits_while_its_stores_are_read() -> None:
    body = STORE.replace("cp.async.bulk.wait_group.read 0;", "").replace("%r8, 6;", "%r8, 2;")
    out = torch.zeros(5, 32)
    with pytest.raises(RuntimeError, match="exits while bulk stores"):
        call(body, out, maps=(_map(out, (32, 2), 0),), threads=64, shared=512)


def test_operands_overwritten_while_wgmma_reads_them() -> None:
    overwrite = "mov.u32 %r9, 0; st.shared.u32 [%r2], %r9;"
    text = WGMMA.replace("wgmma.wait_group.sync.aligned 0;", overwrite + "wgmma.wait_group.sync.aligned 0;")
    with pytest.raises(Race, match="overwrites what others still read"):
        _wgmma(text)
    assert not (_wgmma(text.replace("%r9, 0", "%r9, 0x40004000"), races=False, late=True) == 16).all()
    _wgmma(WGMMA.replace("add.s64 %rd12, %rd1", "bar.sync 0;" + overwrite + "add.s64 %rd12, %rd1"))


def test_wgmma_needs_the_proxy_fence_and_the_whole_warpgroup() -> None:
    with pytest.raises(RuntimeError, match=r"wgmma reads .* without a fence\.proxy\.async"):
        _wgmma(WGMMA.replace("fence.proxy.async;", ""))
    leave = "setp.ne.u32 %p1, 0, 0; setp.lt.u32 %p5, %r0, 32; @%p5 bra OUT;"
    with pytest.raises(Deadlock, match=r"waits for its other threads at .*wgmma"):
        _wgmma(WGMMA.replace("setp.ne.u32 %p1, 0, 0;", leave) + "OUT: bar.sync 1;")
