"""mbarriers and TMA: right when waited for, and noticed when not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dmuon.kernels.gpu.binary import Binary, Launch, TensorMap, pointer
from ptx import Deadlock, Memory, Race, run
from ptx.mutate import SYNCHRONISATION, survivors
from ptx.snippets import call, kernel
from ptx.tensors import check_tensor_map

SEEDS = (None, 0, 1, 2)

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


def test_a_block_that_exits_while_its_stores_are_read() -> None:
    body = STORE.replace("cp.async.bulk.wait_group.read 0;", "").replace("%r8, 6;", "%r8, 2;")
    out = torch.zeros(5, 32)
    with pytest.raises(RuntimeError, match="exits while bulk stores"):
        call(body, out, maps=(_map(out, (32, 2), 0),), threads=64, shared=512)
