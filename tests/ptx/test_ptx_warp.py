"""Instructions by which the threads of a warp exchange values, and threads that part."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ptx import Deadlock
from ptx.snippets import call, evaluate

X = np.random.default_rng(0).integers(0, 1 << 32, 64, dtype=np.uint32)


def _shuffled(mode: str, values: list[int], lane: int, b: int, c: int) -> tuple[int, bool]:
    """As the PTX manual's pseudocode has it."""
    segment, clamp = c >> 8 & 31, c & 31
    highest, lowest = (lane & segment) | (clamp & ~segment), lane & segment
    j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": lowest | (b & ~segment)}[mode]
    inside = j >= highest if mode == "up" else j <= highest
    return values[j if inside else lane], inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize(
    ("b", "c"), [(1, 31), (3, 31), (16, 31), (2, 0x181F), (5, 0x1C07), (1, 0), (4, 0x1800)]
)
def test_shuffle(mode: str, b: int, c: int) -> None:
    text = f"""{{ .reg .pred q; .reg .b32 x;
        shfl.sync.{mode}.b32 x|q, a, {b}, {c}, -1; @!q xor.b32 x, x, 1; mov.b32 d, x; }}"""
    found = evaluate(text, X, result=np.uint32)
    for thread in range(64):
        value, inside = _shuffled(mode, X[thread // 32 * 32 :][:32].tolist(), thread % 32, b, c)
        assert found[thread] == value ^ (not inside)


def test_votes() -> None:
    bits = (X & 1).astype(np.uint32)
    bits[32:] = 1
    text = "{{ .reg .pred q, r; setp.ne.u32 q, a, 0; vote.sync.{} {}, q, -1; {} }}"
    ballot = evaluate(text.format("ballot.b32", "d", ""), bits, result=np.uint32)
    assert ballot[0] == sum(int(bit) << k for k, bit in enumerate(bits[:32])) and ballot[32] == 0xFFFFFFFF
    for mode, want in (("any", [1, 1]), ("all", [0, 1]), ("uni", [0, 1])):
        found = evaluate(text.format(f"{mode}.pred", "r", "selp.b32 d, 1, 0, r;"), bits, result=np.uint32)
        assert found[[0, 32]].tolist() == want


def test_matches_and_reductions() -> None:
    small = X % 5
    found = evaluate("match.any.sync.b32 d, a, -1;", small, result=np.uint32)
    for thread in range(64):
        warp = small[thread // 32 * 32 :][:32]
        assert found[thread] == sum(1 << k for k in range(32) if warp[k] == small[thread])
    for mode, function in (
        ("add", np.add),
        ("min", np.minimum),
        ("max", np.maximum),
        ("xor", np.bitwise_xor),
    ):
        kind = "b32" if mode == "xor" else "u32"
        found = evaluate(f"redux.sync.{mode}.{kind} d, a, -1;", X, result=np.uint32)
        assert found[0] == function.reduce(X[:32], dtype=np.uint32)
        assert found[63] == function.reduce(X[32:], dtype=np.uint32)


def test_elect_chooses_the_first_lane() -> None:
    text = "{ .reg .pred q; .reg .b32 x; elect.sync x|q, -1; selp.b32 d, 1, 0, q; }"
    found = evaluate(text, X, result=np.uint32)
    assert found.nonzero()[0].tolist() == [0, 32]


def test_a_part_of_a_warp_exchanges_values_under_its_mask() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    body = """
        mov.u32 %r1, 99;
        setp.ge.u32 %p1, %r0, 16;
        @%p1 bra AFTER;
        shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xFFFF;
    AFTER:
        mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd0, %rd1;
        st.global.u32 [%rd1], %r1;
    """
    for seed in (None, 0, 1):
        call(body, out, seed=seed)
        assert out.tolist() == [k ^ 1 for k in range(16)] + [99] * 16


def test_lanes_that_part_meet_again_at_a_full_mask() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    body = """
        mov.u32 %r1, %r0;
        setp.ge.u32 %p1, %r0, 7;
        @%p1 bra OTHER;
        add.u32 %r1, %r1, 100;
        bra TOGETHER;
    OTHER:
        add.u32 %r1, %r1, 200;
    TOGETHER:
        shfl.sync.idx.b32 %r2, %r1, 7, 31, -1;
        mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd0, %rd1;
        st.global.u32 [%rd1], %r2;
    """
    for seed in (None, 0, 1, 2):
        call(body, out, seed=seed)
        assert out.tolist() == [207] * 32


def test_a_lane_that_is_missing_is_a_deadlock_that_says_where() -> None:
    body = """
        setp.eq.u32 %p1, %r0, 5;
        @%p1 bra AWAY;
        shfl.sync.idx.b32 %r2, %r0, 0, 31, -1;
        ret;
    AWAY:
        bar.warp.sync -1;
    """
    with pytest.raises(Deadlock, match=r"shfl\.sync.*31 threads"):
        call(body, torch.zeros(1))
