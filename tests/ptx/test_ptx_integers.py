"""Integer, logic and data-movement instructions, against Python's integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ptx.snippets import call, evaluate

_EDGES = [0, 1, 2, 3, 7, 31, 32, 33, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def _values(seed: int, bits: int = 32) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    edges = np.array(_EDGES, np.uint64)
    if bits == 64:
        edges = np.concatenate([edges, edges << np.uint64(32), ~edges])
    random = rng.integers(0, 1 << bits, 96 - edges.size, dtype=np.uint64)
    return rng.permutation(np.concatenate([edges, random])).astype(f"u{bits // 8}")


def _signed(x: int, bits: int = 32) -> int:
    return x - (1 << bits) if x >> (bits - 1) & 1 else x


def _quotient(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _byte_permutation(a: int, b: int, s: int) -> int:
    data = (a | b << 32).to_bytes(8, "little")
    out = 0
    for k in range(4):
        nibble = s >> 4 * k & 15
        byte = data[nibble & 7]
        out |= (0xFF * (byte >> 7) if nibble & 8 else byte) << 8 * k
    return out


def _extract(a: int, b: int, c: int, signed: bool) -> int:
    start, length = b & 255, c & 255
    last = min(start + length - 1, 31)
    sign = (a >> last & 1) if signed and length and last >= 0 else 0
    out = 0
    for k in range(32):
        inside = k < length and start + k <= 31
        out |= (a >> (start + k) & 1 if inside else sign) << k
    return out


def _insert(a: int, b: int, c: int) -> int:
    out = b
    start, length = c & 255, 5
    for k in range(length):
        if start + k < 32:
            out = out & ~(1 << start + k) | (a >> k & 1) << start + k
    return out


CASES: dict[str, Callable[[int, int, int], int]] = {
    "add.s32 d, a, b": lambda a, b, c: a + b,
    "sub.u32 d, a, b": lambda a, b, c: a - b,
    "mul.lo.s32 d, a, b": lambda a, b, c: a * b,
    "mul.hi.u32 d, a, b": lambda a, b, c: a * b >> 32,
    "mul.hi.s32 d, a, b": lambda a, b, c: _signed(a) * _signed(b) >> 32,
    "mad.lo.s32 d, a, b, c": lambda a, b, c: a * b + c,
    "mad.hi.u32 d, a, b, c": lambda a, b, c: (a * b >> 32) + c,
    "min.s32 d, a, b": lambda a, b, c: min(_signed(a), _signed(b)),
    "max.u32 d, a, b": lambda a, b, c: max(a, b),
    "neg.s32 d, a": lambda a, b, c: -a,
    "abs.s32 d, a": lambda a, b, c: abs(_signed(a)),
    "not.b32 d, a": lambda a, b, c: ~a,
    "and.b32 d, a, b": lambda a, b, c: a & b,
    "or.b32 d, a, 0xFF": lambda a, b, c: a | 255,
    "xor.b32 d, a, b": lambda a, b, c: a ^ b,
    "shl.b32 d, a, b": lambda a, b, c: a << b if b < 32 else 0,
    "shl.b32 d, a, 5": lambda a, b, c: a << 5,
    "shr.u32 d, a, b": lambda a, b, c: a >> b if b < 32 else 0,
    "shr.s32 d, a, b": lambda a, b, c: _signed(a) >> min(b, 31),
    "shf.l.wrap.b32 d, a, b, c": lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    "shf.r.wrap.b32 d, a, b, c": lambda a, b, c: (b << 32 | a) >> (c & 31),
    "shf.l.clamp.b32 d, a, b, c": lambda a, b, c: ((b << 32 | a) << min(c, 32)) >> 32,
    "lop3.b32 d, a, b, c, 0xCA": lambda a, b, c: a & b | ~a & c,
    "lop3.b32 d, a, b, c, 0x96": lambda a, b, c: a ^ b ^ c,
    "prmt.b32 d, a, b, c": _byte_permutation,
    "prmt.b32 d, a, b, 0x7531": lambda a, b, c: _byte_permutation(a, b, 0x7531),
    "bfe.u32 d, a, b, c": lambda a, b, c: _extract(a, b, c, False),
    "bfe.s32 d, a, b, c": lambda a, b, c: _extract(a, b, c, True),
    "bfe.s32 d, a, 4, 7": lambda a, b, c: _extract(a, 4, 7, True),
    "bfi.b32 d, a, b, c, 5": _insert,
    "popc.b32 d, a": lambda a, b, c: a.bit_count(),
    "clz.b32 d, a": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 d, a": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 d, a": lambda a, b, c: a.bit_length() - 1,
    "{ .reg .pred q; setp.lt.s32 q, a, b; selp.b32 d, a, c, q; }": lambda a, b, c: (
        a if _signed(a) < _signed(b) else c
    ),
    "{ .reg .pred q; setp.hi.u32 q, a, b; @q mov.u32 c, 7; mov.u32 d, c; }": lambda a, b, c: (
        7 if a > b else c
    ),
    "{ .reg .pred q, r; setp.lt.and.s32 q|r, a, b, 1; selp.b32 d, 1, 0, r; }": lambda a, b, c: int(
        not _signed(a) < _signed(b)
    ),
    "{ .reg .pred q, r; setp.ne.u32 r, c, 0; setp.eq.or.u32 q, a, b, !r; selp.b32 d, 1, 2, q; }": lambda a, b, c: (
        1 if a == b or c == 0 else 2
    ),
    "{ .reg .b16 x, y; mov.b32 {x, y}, a; mov.b32 d, {y, x}; }": lambda a, b, c: a >> 16 | a << 16,
    "{ .reg .b16 x; cvt.u16.u32 x, a; cvt.s32.s16 d, x; }": lambda a, b, c: _signed(a & 0xFFFF, 16),
    "cvt.sat.s8.s32 d, a": lambda a, b, c: max(-128, min(127, _signed(a))),
    "{ .reg .b64 x; mul.wide.s32 x, a, b; cvt.u32.u64 d, x; }": lambda a, b, c: a * b,
    "{ .reg .b64 x; mad.wide.u32 x, a, b, 1; shr.u64 x, x, 32; cvt.u32.u64 d, x; }": lambda a, b, c: (
        a * b + 1 >> 32
    ),
}


@pytest.mark.parametrize("statement", CASES)
def test_integers(statement: str) -> None:
    a, b, c = _values(0), _values(1), _values(2)
    if "sh" in statement[:3] or statement.startswith("bf"):
        b[::2] %= 40
        c[::2] %= 40
    found = evaluate(f"{statement};".replace(";;", ";"), a, b, c, result=np.uint32)
    want = [CASES[statement](*map(int, values)) & 0xFFFFFFFF for values in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(found, np.array(want, np.uint32))


WIDE: dict[str, Callable[[int, int], int]] = {
    "add.s64 d, a, b": lambda a, b: a + b,
    "mul.lo.s64 d, a, b": lambda a, b: a * b,
    "mul.hi.u64 d, a, b": lambda a, b: a * b >> 64,
    "mul.hi.s64 d, a, b": lambda a, b: _signed(a, 64) * _signed(b, 64) >> 64,
    "shl.b64 d, a, 40": lambda a, b: a << 40,
    "shr.s64 d, a, 40": lambda a, b: _signed(a, 64) >> 40,
    "max.s64 d, a, b": lambda a, b: max(_signed(a, 64), _signed(b, 64)),
    "{ .reg .b32 x, y; mov.b64 {x, y}, a; mov.b64 d, {y, x}; }": lambda a, b: a >> 32 | a << 32,
    "{ .reg .b32 x; cvt.u32.u64 x, a; cvt.s64.s32 d, x; }": lambda a, b: _signed(a & 0xFFFFFFFF),
    "{ .reg .b32 x; popc.b64 x, a; cvt.u64.u32 d, x; }": lambda a, b: a.bit_count(),
}


@pytest.mark.parametrize("statement", WIDE)
def test_wide_integers(statement: str) -> None:
    a, b = _values(3, 64), _values(4, 64)
    found = evaluate(f"{statement};", a, b, result=np.uint64)
    want = [WIDE[statement](int(x), int(y)) & (1 << 64) - 1 for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(found, np.array(want, np.uint64))


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "s16", "u16"])
def test_division(kind: str) -> None:
    bits = int(kind[1:])
    rng = np.random.default_rng(5)
    x = rng.integers(0, 1 << bits, 64, dtype=np.uint64).astype(f"u{bits // 8}")
    y = rng.integers(1, 1 << (bits // 2), 64, dtype=np.uint64).astype(f"u{bits // 8}")
    y[::3] = (-y[::3].astype(np.int64)).astype(y.dtype)
    quotient = evaluate(f"div.{kind} d, a, b;", x, y, result=x.dtype)
    remainder = evaluate(f"rem.{kind} d, a, b;", x, y, result=x.dtype)
    for a, b, q, r in zip(x.tolist(), y.tolist(), quotient.tolist(), remainder.tolist(), strict=True):
        if kind[0] == "s":
            a, b = _signed(a, bits), _signed(b, bits)
        want = _quotient(a, b)
        assert q == want & (1 << bits) - 1
        assert r == a - want * b & (1 << bits) - 1


def test_a_loop_with_a_different_length_for_each_thread() -> None:
    """Threads of a warp part and meet again."""
    out = torch.zeros(64, dtype=torch.int32)
    body = """
        mov.u32 %r1, 0; mov.u32 %r2, 0;
    LOOP:
        setp.ge.u32 %p1, %r2, %r0;
        @%p1 bra END;
        add.s32 %r2, %r2, 1;
        add.s32 %r1, %r1, %r2;
        bra.uni LOOP;
    END:
        activemask.b32 %r4;
        mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd0, %rd1;
        popc.b32 %r4, %r4;
        mad.lo.u32 %r1, %r4, 10000, %r1;
        st.global.u32 [%rd1], %r1;
    """
    for seed in (None, 0, 1):
        call(body, out, threads=64, seed=seed)
        assert out.tolist() == [320000 + k * (k + 1) // 2 for k in range(64)]


def test_special_registers() -> None:
    out = torch.zeros(6, 32, 4, dtype=torch.int32)
    body = """
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %nctaid.x; mov.u32 %r4, %laneid;
        mad.lo.u32 %r5, %r2, %r3, %r1; mad.lo.u32 %r5, %r5, 32, %r0;
        mul.wide.u32 %rd1, %r5, 16; add.s64 %rd1, %rd0, %rd1;
        st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};
    """
    call(body, out, grid=(2, 3, 1))
    for block in range(6):
        assert out[block].tolist() == [[block % 2, block // 2, 2, lane] for lane in range(32)]


def test_jump_table() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    body = """
        and.b32 %r1, %r0, 3;
    $TABLE: .branchtargets $A, $B, $C, $A;
        brx.idx %r1, $TABLE;
    $A: mov.u32 %r2, 10; bra.uni $D;
    $B: mov.u32 %r2, 20; bra.uni $D;
    $C: mov.u32 %r2, 30;
    $D: mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd0, %rd1;
        st.global.u32 [%rd1], %r2;
    """
    call(body, out)
    assert out.tolist() == [10, 20, 30, 10] * 8
