"""Reading PTX text, single faults, counts, and what happens at statements that are not understood."""

from __future__ import annotations

import pytest
import torch

from dmuon.kernels.gpu.binary import Binary, Launch, pointer
from ptx import Memory, run
from ptx.mutate import KINDS, mutants
from ptx.program import parse
from ptx.snippets import call, kernel
from ptx.syntax import Address, Pair, Register, Special, Symbol, Vector

TEXT = """
// A comment with { braces and .entry in it
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 buffer[];
.global .align 1 .b8 message[4] = {104, 105, 33};
.visible .entry f(
    .param .u64 .ptr .global .align 1 f_param_0,  // the first
    .param .align 64 .b8 f_param_1[128]
)
.maxntid 64
{
    .reg .pred %p<3>;
    .reg .b32 %r<5>, %x;
    .reg .b64 %rd<4>;
    .loc 1 20 5
    ld.param.u64 %rd1, [f_param_0];
$L__BB0_1: /* a comment
    over two lines */
    @!%p1 bra $L__BB0_2;
    // begin inline asm
    {
    .reg .pred P1;
    LAB_WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 P1, [%r1+8], %r2;
    @P1 bra DONE;
    bra LAB_WAIT;
    DONE:
    }
    // end inline asm
    { .reg .pred P1; LAB_WAIT: setp.ne.b32 P1, %r1, 0; @P1 bra LAB_WAIT; }
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group .L2::cache_hint [f_param_1, {%r1, %r2}], [%r3], %rd2;
    shfl.sync.idx.b32 %r1|%p2, %x, 0, 31, -1;
    mov.u32 %r4, buffer+16;
    mov.u32 %r3, %tid.x;
$L__BB0_2:
    ret;
}
.section .debug_abbrev { .b8 1 }
"""


def test_reading() -> None:
    program = parse(TEXT)
    assert (program.entry, program.target) == ("f", "sm_80")
    assert program.params == {"f_param_0": 0, "f_param_1": 1}
    assert program.variables["message"].data == b"hi!" and program.variables["buffer"].extern
    opcodes = [statement.opcode for statement in program.code]
    assert "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint" in opcodes
    by_op = {statement.op: statement for statement in program.code}
    copy = by_op["cp"]
    tensor = copy.args[0]
    assert isinstance(tensor, Address) and tensor.base == Symbol("f_param_1") and len(tensor.coordinates) == 2
    assert isinstance(by_op["shfl"].args[0], Pair) and isinstance(by_op["shfl"].args[1], Register)
    moves = [statement for statement in program.code if statement.op == "mov"]
    assert moves[0].args[1] == Symbol("buffer", 16) and moves[1].args[1] == Special("%tid.x")
    for statement in program.code:
        start, end = statement.span
        assert " ".join(TEXT[start:end].split()) == statement.text
        assert TEXT.count("\n", 0, start) + 1 == statement.line


def test_names_in_nested_scopes_are_their_own() -> None:
    program = parse(TEXT)
    branches = [s.args[0].name for s in program.code if s.op == "bra" and isinstance(s.args[0], Symbol)]
    assert len(set(branches)) == 4 and branches[0] == "$L__BB0_2"
    waits = [s for s in program.code if s.guard is not None and s.guard.name.startswith("P1")]
    assert len({s.guard.row for s in waits if s.guard is not None}) == 2


def test_a_module_of_several_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="one kernel"):
        parse(TEXT + TEXT)
    with pytest.raises(ValueError, match="nowhere"):
        parse(TEXT.replace("bra $L__BB0_2", "bra $L__BB0_7"))


def test_unknown_statements_fail_when_they_are_reached() -> None:
    out = torch.zeros(1)
    with pytest.raises(NotImplementedError, match=r"no instruction frobnicate\.u32 — line \d+: frobnicate"):
        call("frobnicate.u32 %r1, %r2;", out)
    call("bra END; frobnicate.u32 %r1, %r2; END:", out)


def test_counts() -> None:
    x, out = torch.ones(4, 32), torch.zeros(4, 32)
    body = """
        mov.u32 %r1, %ctaid.x; mad.lo.u32 %r1, %r1, 32, %r0; mul.wide.u32 %rd10, %r1, 4;
        add.s64 %rd11, %rd0, %rd10; add.s64 %rd12, %rd1, %rd10; mov.u32 %r2, 0;
    LOOP:
        ld.global.f32 %f1, [%rd11]; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 3; @%p1 bra LOOP;
        bar.sync 0;
        st.global.f32 [%rd12], %f1;
    """
    for seed in (None, 0):
        report = call(body, x, out, grid=(4, 1, 1), seed=seed)
        assert report.loaded == [3 * x.numel() * 4, 0] and report.stored == [0, x.numel() * 4]
        assert report.count("ld.global") == 12 and report.count("st") == 4 and report.count("ld.shared") == 0
        assert report.blocks == 4 and report.barriers == 4


def test_a_seed_names_one_schedule() -> None:
    """Tickets in the order that warps draw them."""
    orders = []
    for seed in (5, 5, 6):
        ticket, out = torch.zeros(1, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
        body = """
            atom.global.add.u32 %r1, [%rd0], 1;
            mul.wide.u32 %rd10, %r1, 4; add.s64 %rd11, %rd1, %rd10; st.global.u32 [%rd11], %r0;
        """
        call(body, ticket, out, threads=256, seed=seed)
        orders.append(out.tolist())
    assert orders[0] == orders[1] != orders[2] and sorted(orders[2]) == list(range(256))


def test_arguments_that_do_not_fit() -> None:
    binary, out = kernel("", 2), torch.zeros(1)
    with pytest.raises(ValueError, match="takes 2 arguments, got 1"):
        run(binary, Launch((1, 1, 1), (pointer(0),)), Memory.of(out))
    with pytest.raises(ValueError, match="on the CPU"):
        Memory.of(torch.zeros(1, device="meta"))


FAULTS = {
    "barrier": ("bar.sync 0;", ""),
    "copy wait": ("cp.async.wait_group 1;", ""),
    "wgmma fence": ("wgmma.fence.sync.aligned;", ""),
    "mbarrier wait": ("mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;", "setp.eq.u32 %p1, 0, 0"),
    "comparison": ("setp.lt.and.s32 %p1, %r1, %r2, %p2;", "setp.ge.and.s32 %p1, %r1, %r2, %p2"),
    "boundary": ("setp.gt.u32 %p1, %r1, 4;", "setp.ge.u32 %p1, %r1, 4"),
    "guard": ("@!%p1 mov.u32 %r1, 0;", "@%p1 mov.u32 %r1, 0"),
    "ldmatrix address": (
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2+48];",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2+64]",
    ),
    "zero fill": (
        "cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;",
        "cp.async.cg.shared.global [%r1], [%rd1], 16",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_mutants(kind: str) -> None:
    statement, changed = FAULTS[kind]
    binary: Binary = kernel(f"mov.u32 %r9, 1; {statement} mov.u32 %r8, 1;", 1)
    (mutant,) = mutants(binary, kind)
    assert mutant.before == statement[:-1] and mutant.after == changed
    assert mutant.binary.ptx == binary.ptx.replace(statement[:-1], changed)
    assert str(mutant).startswith(f"{kind}, line {mutant.line}: ")


def test_mutants_of_descriptors() -> None:
    text = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd20, %rd21, %p1, 1, 1, 0, 0;"
    kinds = [kind for kind in KINDS if kind.startswith("descriptor")]
    found = [mutant.binary.ptx for mutant in mutants(kernel(text, 1), *kinds)]
    assert len(found) == 3
    for ptx in found:
        (multiply,) = [s for s in parse(ptx).code if s.op == "wgmma"]
        a, b = multiply.args[1], multiply.args[2]
        assert isinstance(a, Register) and isinstance(b, Register) and isinstance(multiply.args[0], Vector)
        assert b.name.startswith("%mutant") and a.name == "%rd20"
