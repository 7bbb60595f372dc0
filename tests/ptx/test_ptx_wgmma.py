"""wgmma: right when fenced and waited for, and noticed when not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ptx import Deadlock, Race
from ptx.snippets import call

SEEDS = (None, 0, 1, 2)

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
