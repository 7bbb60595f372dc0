"""Clusters: each other's shared memory, cluster barriers, remote arrivals, multicast."""

from __future__ import annotations

import pytest
import torch

from dmuon.kernels.gpu.binary import TensorMap
from ptx import Deadlock, Race
from ptx.snippets import call

SEEDS = (None, 0, 1, 2)

EXCHANGE = """
    mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 4, %r1; mov.u32 %r3, %cluster_ctarank; mov.u32 %r4, %ctaid.x;
    mad.lo.u32 %r5, %r4, 1000, %r0;
    st.shared.u32 [%r2], %r5;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    xor.b32 %r6, %r3, 1;
    mapa.shared::cluster.u32 %r7, %r2, %r6;
    ld.shared::cluster.u32 %r8, [%r7];
    mad.lo.u32 %r9, %r4, 32, %r0; mul.wide.u32 %rd10, %r9, 4; add.s64 %rd11, %rd0, %rd10; st.global.u32 [%rd11], %r8;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
"""


def test_reading_the_other_blocks_memory() -> None:
    out = torch.zeros(6, 32, dtype=torch.int32)
    for seed in SEEDS:
        out.zero_()
        call(EXCHANGE, out, grid=(6, 1, 1), cluster=(2, 1, 1), shared=128, seed=seed)
        assert torch.equal(
            out, torch.tensor([[1000 * (b ^ 1) + t for t in range(32)] for b in range(6)]).int()
        )


def test_reading_the_other_blocks_memory_too_early() -> None:
    out = torch.zeros(2, 32, dtype=torch.int32)
    waits = "barrier.cluster.arrive.release.aligned;\n    barrier.cluster.wait.acquire.aligned;"
    with pytest.raises(Race, match=r"overwrites what others still read|reads shared"):
        call(EXCHANGE.replace(waits, ""), out, grid=(2, 1, 1), cluster=(2, 1, 1), shared=128, seed=1)
    with pytest.raises(IndexError, match="no shared address of the cluster"):
        call(
            EXCHANGE.replace("xor.b32 %r6, %r3, 1", "mov.u32 %r6, 2"),
            out,
            grid=(2, 1, 1),
            cluster=(2, 1, 1),
            shared=128,
        )


def test_writing_through_generic_addresses() -> None:
    out = torch.zeros(4, 32, dtype=torch.int32)
    body = """
        mov.u64 %rd5, smem; cvta.shared.u64 %rd5, %rd5; mov.u32 %r3, %cluster_ctarank; mov.u32 %r4, %ctaid.x;
        sub.u32 %r6, 3, %r3; mapa.u64 %rd6, %rd5, %r6; mul.wide.u32 %rd10, %r0, 4; add.s64 %rd6, %rd6, %rd10;
        st.u32 [%rd6], %r4;
        barrier.cluster.arrive; barrier.cluster.wait;
        add.s64 %rd5, %rd5, %rd10; ld.u32 %r8, [%rd5];
        mad.lo.u32 %r9, %r4, 32, %r0; mul.wide.u32 %rd10, %r9, 4; add.s64 %rd11, %rd0, %rd10;
        st.global.u32 [%rd11], %r8;
    """
    for seed in SEEDS:
        call(body, out, grid=(4, 1, 1), cluster=(4, 1, 1), shared=128, seed=seed)
        assert out[:, 0].tolist() == [3, 2, 1, 0]


MULTICAST = """
    mov.u32 %r1, smem; add.u32 %r2, %r1, 4096; add.u32 %r3, %r1, 4104; mov.u32 %r4, %cluster_ctarank;
    setp.ne.u32 %p1, %r0, 0; mov.u32 %r20, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 1; mbarrier.init.shared::cta.b64 [%r3], 2;
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
LOOP:
    @%p1 bra WAIT;
    xor.b32 %r11, %r20, 1;
EMPTY:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], %r11;
    @!%p2 bra EMPTY;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;
    mul.lo.u32 %r12, %r4, 8; mad.lo.u32 %r13, %r20, 16, %r12; mad.lo.u32 %r14, %r4, 1024, %r1;
    mov.u16 %h1, 3; mov.u32 %r15, 0;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r14], [map0, {%r15, %r13}], [%r2], %h1;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], %r20;
    @!%p2 bra WAIT;
    mad.lo.u32 %r16, %r0, 64, %r1; ld.shared.u32 %r17, [%r16];
    mov.u32 %r18, %ctaid.x; mad.lo.u32 %r18, %r18, 2, %r20; mad.lo.u32 %r18, %r18, 32, %r0;
    mul.wide.u32 %rd10, %r18, 4; add.s64 %rd11, %rd1, %rd10; st.global.u32 [%rd11], %r17;
    bar.sync 0;
    setp.gt.u32 %p3, %r0, 1; @%p3 bra NEXT;
    mapa.shared::cluster.u32 %r19, %r3, %r0;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r19];
NEXT:
    add.u32 %r20, %r20, 1; setp.lt.u32 %p4, %r20, 2; @%p4 bra LOOP;
    barrier.cluster.arrive; barrier.cluster.wait;
"""
"""Each of two blocks loads its half of a 16 × 32 box into both; both tell both when they have read it."""


def _multicast(body: str, seed: int | None) -> None:
    x = torch.arange(32 * 32.0).view(32, 32)
    out = torch.zeros(2, 2, 32)
    maps = (TensorMap(x.data_ptr(), "fp32", (32, 32), (128,), (32, 8), 0),)
    report = call(body, x, out, maps=maps, grid=(2, 1, 1), cluster=(2, 1, 1), shared=4112, seed=seed)
    want = x.view(2, 16, 2, 16)[..., 0].reshape(2, 32)
    assert torch.equal(out, want.expand(2, 2, 32))
    # Multicast reads global memory once for both.
    assert report.loaded[0] == x.numel() * 4 and report.tma_bytes == 2 * x.numel() * 4


def test_multicast_and_remote_arrivals() -> None:
    for seed in (*SEEDS, 3, 4):
        _multicast(MULTICAST, seed)


def test_faults_in_multicast() -> None:
    unsafe = MULTICAST.replace("@!%p2 bra EMPTY;", "")
    with pytest.raises(Race, match="bulk load"):
        for seed in SEEDS:
            _multicast(unsafe.replace("mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], %r11;", ""), seed)
    with pytest.raises(Deadlock):
        _multicast(MULTICAST.replace("setp.gt.u32 %p3, %r0, 1;", "setp.gt.u32 %p3, %r0, 0;"), None)
    with pytest.raises(RuntimeError, match="multicast to the blocks"):
        _multicast(MULTICAST.replace("mov.u16 %h1, 3", "mov.u16 %h1, 7"), None)


def test_a_grid_that_clusters_do_not_tile() -> None:
    with pytest.raises(ValueError, match="no multiple of the cluster"):
        call("", torch.zeros(1), grid=(3, 1, 1), cluster=(2, 1, 1))
