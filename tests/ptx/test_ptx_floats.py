"""Floating-point instructions against exact fractions, numpy and torch."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from ptx.snippets import evaluate

F = np.float32


def _floats(seed: int, scale: int = 20) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(120) * 2.0 ** rng.integers(-scale, scale, 120)
    edges = [0.0, -0.0, 1.0, -1.0, np.inf, 2.0**-130, 3.5, 65519.0]
    return np.concatenate([values, edges]).astype(F)


def _halves(kind: str, seed: int) -> torch.Tensor:
    values = torch.from_numpy(_floats(seed, 6))
    return values.to(torch.bfloat16 if kind == "bf16" else torch.float16)


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.view(torch.int16).numpy().view(np.uint16)


def _same(found: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
    np.testing.assert_array_equal(found.astype(np.float64), want.astype(np.float64))


SINGLE: dict[str, Callable[..., Any]] = {
    "add.f32 d, a, b": lambda a, b, c: a + b,
    "add.rn.f32 d, a, b": lambda a, b, c: a + b,
    "sub.f32 d, a, b": lambda a, b, c: a - b,
    "mul.f32 d, a, b": lambda a, b, c: a * b,
    "mul.f32 d, a, 0f40490FDB": lambda a, b, c: a * F(np.pi),
    "div.rn.f32 d, a, b": lambda a, b, c: a / b,
    "max.f32 d, a, b": lambda a, b, c: np.fmax(a, b),
    "min.NaN.f32 d, a, b": lambda a, b, c: np.minimum(a, b),
    "neg.f32 d, a": lambda a, b, c: -a,
    "abs.f32 d, a": lambda a, b, c: np.abs(a),
    "mul.ftz.f32 d, a, b": lambda a, b, c: _flushed(_flushed(a) * _flushed(b)),
    "sqrt.rn.f32 d, a": lambda a, b, c: np.sqrt(a),
    "add.sat.f32 d, a, b": lambda a, b, c: np.clip(np.nan_to_num(a + b, posinf=1.0), 0, 1),
    "{ .reg .pred q; setp.ltu.f32 q, a, b; selp.f32 d, a, b, q; }": lambda a, b, c: np.where(~(a >= b), a, b),
    "{ .reg .pred q; setp.ne.f32 q, a, a; selp.f32 d, a, b, q; }": lambda a, b, c: b,
    "copysign.f32 d, a, b": lambda a, b, c: np.copysign(b, a),
    "cvt.rni.f32.f32 d, a": lambda a, b, c: np.rint(a),
    "cvt.rzi.f32.f32 d, a": lambda a, b, c: np.trunc(a),
}


def _flushed(x: Any) -> Any:
    return np.where(np.abs(x) < 2.0**-126, F(0), x)


@pytest.mark.parametrize("statement", SINGLE)
def test_single_precision(statement: str) -> None:
    a, b, c = _floats(0), _floats(1), _floats(2)
    found = evaluate(f"{statement};", a, b, c, result=F)
    with np.errstate(all="ignore"):
        _same(found, np.asarray(SINGLE[statement](a, b, c), F))


def test_fma_rounds_once() -> None:
    """Against exact fractions, on sums that land halfway between two floats after rounding to fp64."""
    rng = np.random.default_rng(3)
    a, b = _floats(4, 3), _floats(5, 3)
    a[-8:], b[-8:] = 1, 1
    c = -(a.astype(np.float64) * b).astype(F)
    c[::2] = (rng.standard_normal(c[::2].size) * 2.0 ** rng.integers(-40, 30, c[::2].size)).astype(F)
    # 1 + 2^-24 is halfway; a tiny third part must decide.
    a[:4], b[:4] = F(1 + 2.0**-12), F(1 + 2.0**-12)
    c[:4] = np.array([2.0**-60, -(2.0**-60), 0, 2.0**-24], F)
    found = evaluate("fma.rn.f32 d, a, b, c;", a, b, c, result=F)
    for x, y, z, value in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        neighbours = [np.nextafter(value, F(-np.inf)), value, np.nextafter(value, F(np.inf))]
        errors = [abs(Fraction(float(v)) - exact) for v in neighbours]
        assert errors[1] == min(errors)
        if errors.count(errors[1]) > 1:
            assert value.view(np.uint32) % 2 == 0


def test_directed_rounding() -> None:
    a, b = _floats(6, 4)[:120], _floats(7, 4)[:120]
    exact = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a, b, strict=True)]
    down = evaluate("mul.rm.f32 d, a, b;", a, b, result=F)
    up = evaluate("mul.rp.f32 d, a, b;", a, b, result=F)
    zero = evaluate("mul.rz.f32 d, a, b;", a, b, result=F)
    for value, low, high, near in zip(exact, down, up, zero, strict=True):
        assert Fraction(float(low)) <= value <= Fraction(float(high))
        assert np.nextafter(low, F(np.inf)) >= high
        assert near == (low if value > 0 else high)


@pytest.mark.parametrize(
    ("statement", "function"),
    [
        ("ex2.approx.ftz.f32", np.exp2),
        ("lg2.approx.f32", np.log2),
        ("rcp.approx.ftz.f32", np.reciprocal),
        ("rsqrt.approx.f32", lambda x: x**-0.5),
        ("sqrt.approx.f32", np.sqrt),
        ("sin.approx.f32", np.sin),
        ("tanh.approx.f32", np.tanh),
    ],
)
def test_approximations(statement: str, function: Callable[..., Any]) -> None:
    x = np.random.default_rng(8).uniform(0.01, 10, 64).astype(F)
    found = evaluate(f"{statement} d, a;", x, result=F)
    np.testing.assert_allclose(found, function(x.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "max", "min", "neg", "abs"])
@pytest.mark.parametrize("packed", [False, True])
def test_half_arithmetic(kind: str, op: str, packed: bool) -> None:
    x, y = _halves(kind, 9), _halves(kind, 10)
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "max": torch.fmax,
        "min": torch.fmin,
        "neg": lambda a, b: -a,
        "abs": lambda a, b: a.abs(),
    }
    want = functions[op](x, y)
    a, b = _bits(x), _bits(y)
    if packed:
        a, b = a.view(np.uint32), b.view(np.uint32)
    operands = "d, a" if op in ("neg", "abs") else "d, a, b"
    found = evaluate(f"{op}.{kind}{'x2' if packed else ''} {operands};", a, b, result=a.dtype)
    got = torch.from_numpy(found.view(np.int16).copy()).view(want.dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_fma_rounds_once(kind: str) -> None:
    x, y, z = (_halves(kind, seed) for seed in (11, 12, 13))
    x, y, z = (torch.where(v.isfinite(), v, 1) for v in (x, y, z))
    exact = x.double() * y.double() + z.double()
    found = evaluate(
        f"fma.rn.{kind}x2 d, a, b, c;", *(_bits(v).view(np.uint32) for v in (x, y, z)), result=np.uint32
    )
    got = torch.from_numpy(found.view(np.int16).copy()).view(x.dtype)
    # fp64 holds these sums, and torch rounds fp64 to f16 once, but to bf16 through fp32.
    if kind == "f16":
        torch.testing.assert_close(got, exact.half(), rtol=0, atol=0)
    else:
        spacing = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2.0**-120))) - 7)
        assert ((got.double() - exact).abs() <= spacing / 2).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_comparisons_and_selection(kind: str) -> None:
    x, y = _halves(kind, 14), _halves(kind, 15)
    text = f"{{ .reg .pred q; setp.lt.{kind} q, a, b; selp.b16 d, a, b, q; }}"
    found = evaluate(text, _bits(x), _bits(y), result=np.uint16)
    np.testing.assert_array_equal(found, _bits(torch.where(x < y, x, y)))


def test_conversions_to_half() -> None:
    x, y = _floats(16, 8), _floats(17, 8)
    for kind, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        one = evaluate(f"cvt.rn.{kind}.f32 d, a;", x, result=np.uint16)
        np.testing.assert_array_equal(one, _bits(torch.from_numpy(x).to(dtype)))
        two = evaluate(f"cvt.rn.{kind}x2.f32 d, a, b;", x, y, result=np.uint32).view(np.uint16)
        np.testing.assert_array_equal(two[1::2], one)
        np.testing.assert_array_equal(two[::2], _bits(torch.from_numpy(y).to(dtype)))
        back = evaluate(f"cvt.f32.{kind} d, a;", one, result=F)
        _same(back, torch.from_numpy(x).to(dtype).float().numpy())
        relu = evaluate(f"cvt.rn.relu.{kind}.f32 d, a;", x, result=np.uint16)
        np.testing.assert_array_equal(relu, _bits(torch.from_numpy(np.where(x > 0, x, F(0))).to(dtype)))
        zero = evaluate(f"cvt.rz.{kind}.f32 d, a;", x, result=np.uint16)
        values = torch.from_numpy(zero.view(np.int16)).view(dtype).float().numpy()
        finite = np.isfinite(x)
        assert (np.abs(values[finite]) <= np.abs(x[finite])).all()
        assert (
            np.abs(values[:100] - x[:100]) <= np.abs(x[:100]) * 2.0 ** (-7 if kind == "bf16" else -10)
        ).all()


def test_tf32() -> None:
    x = _floats(18, 8)[:120]
    found = evaluate("cvt.rna.tf32.f32 d, a;", x, result=F)
    assert (found.view(np.uint32) & 0x1FFF == 0).all()
    assert (np.abs(found - x) <= np.abs(x) * 2.0**-11).all()


@pytest.mark.parametrize("rounding", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "s16", "u8"])
def test_float_to_integer(rounding: str, kind: str) -> None:
    x = np.concatenate(
        [_floats(19, 12), [np.nan, -np.inf, 2.0**31, -(2.0**31), 1e30, 0.5, 1.5, -2.5]]
    ).astype(F)
    bits = int(kind[1:])
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")
    found = evaluate(f"cvt.{rounding}.{kind}.f32 d, a;", x, result=dtype)
    functions = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    limits = np.iinfo(dtype)
    for value, got in zip(x.tolist(), found.tolist(), strict=True):
        if np.isnan(value):
            assert got == 0
        else:
            whole = value if np.isinf(value) else functions[rounding](value)
            want = limits.max if whole > limits.max else limits.min if whole < limits.min else int(whole)
            assert got == want


def test_integer_to_float() -> None:
    x = np.array([0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 16777217, 33554435], np.uint32)
    _same(evaluate("cvt.rn.f32.u32 d, a;", x, result=F), x.astype(F))
    _same(evaluate("cvt.rn.f32.s32 d, a;", x, result=F), x.view(np.int32).astype(F))
    found = evaluate("cvt.rz.f32.u32 d, a;", x, result=F)
    assert (found.astype(np.float64) <= x).all() and found[5] == 16777216


def test_double_precision() -> None:
    a, b, c = (_floats(seed).astype(np.float64) / 3 for seed in (20, 21, 22))
    _same(evaluate("mul.f64 d, a, b;", a, b, result=np.float64), a * b)
    _same(evaluate("cvt.rn.f32.f64 d, a;", a, result=F), a.astype(F))
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    a, b, c = a[finite], b[finite], c[finite]
    found = evaluate("fma.rn.f64 d, a, b, c;", a, b, c, result=np.float64)
    want = [
        float(Fraction(x) * Fraction(y) + Fraction(z))
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    _same(found, np.array(want))


def test_pairs_of_single_precision() -> None:
    a, b, c = _floats(23), _floats(24), _floats(25)
    pairs = [x.view(np.uint64) for x in (a, b, c)]
    with np.errstate(all="ignore"):
        for op, want in (("add.rn", a + b), ("mul", a * b)):
            _same(evaluate(f"{op}.f32x2 d, a, b;", *pairs, result=np.uint64).view(F), want)
    single = evaluate("fma.rn.f32 d, a, b, c;", a, b, c, result=F)
    _same(evaluate("fma.rn.f32x2 d, a, b, c;", *pairs, result=np.uint64).view(F), single)


def test_registers_that_were_never_written_are_not_zero() -> None:
    found = evaluate("add.f32 d, a, %f7;", np.ones(32, F), result=F)
    assert np.isnan(found).all()
