"""cp.async: right when waited for, and noticed when not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dmuon.kernels.gpu.binary import Binary, Launch, pointer
from ptx import Memory, run
from ptx.mutate import SYNCHRONISATION, mutants, survivors
from ptx.snippets import call, kernel

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
