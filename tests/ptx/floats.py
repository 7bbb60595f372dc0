"""Floating-point arithmetic, scalar and packed, and conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.syntax import Instruction
from ptx.table import Closure, Mask, instruction
from ptx.types import (
    DTYPES,
    exact_sum,
    fma_f32,
    round_bf16,
    widen_bf16,
)

if TYPE_CHECKING:
    from ptx.machine import Machine

TINY = np.float32(2.0**-126)
_HALF = ("f16", "bf16", "f16x2", "bf16x2")
_ALL = ("f32", "f64", "f32x2", *_HALF)


def _type(statement: Instruction) -> str:
    return statement.mods[-1]


def flush(values: Any) -> Any:
    """Subnormal fp32 numbers as zeros of their sign."""
    return np.where(np.abs(values) < TINY, np.copysign(np.float32(0), values), values)


def decode(bits: Any, kind: str) -> Any:
    """A register's value as fp32 (half types) or as it is; packed types get a last axis of two."""
    if kind in ("f32", "f64"):
        return bits
    if kind == "f32x2":
        return np.ascontiguousarray(np.atleast_1d(np.asarray(bits))).view(np.float32).reshape(-1, 2)
    if kind.endswith("x2"):
        pairs = np.ascontiguousarray(np.atleast_1d(np.asarray(bits))).view(np.uint16).reshape(-1, 2)
        return decode(pairs, kind[:-2])
    if kind == "bf16":
        return widen_bf16(np.asarray(bits))
    return np.asarray(bits).view(np.float16).astype(np.float32)


def encode(values: Any, kind: str) -> Any:
    """The register's content for fp32 or fp64 ``values``, rounded once to the type."""
    if kind in ("f32", "f64"):
        return np.asarray(values).astype(DTYPES[kind])
    if kind.endswith("x2"):
        halves = np.ascontiguousarray(encode(values, kind[:-2]))
        return halves.view(DTYPES[kind])[:, 0]
    if kind == "bf16":
        return round_bf16(_narrow(np.asarray(values)))
    return np.asarray(values).astype(np.float16).view(np.uint16)


def rectified(values: Any) -> Any:
    """Negative numbers as zero; NaN stays."""
    return np.where(values <= 0, values.dtype.type(0), values)


def _narrow(values: Any) -> Any:
    """fp64 as fp32 rounded to odd, for a second rounding; fp32 as it is."""
    if values.dtype == np.float32:
        return values
    single = values.astype(np.float32)
    rest = values - single.astype(np.float64)
    bits = single.view(np.int32)
    nudge = (rest != 0) & (bits & 1 == 0) & np.isfinite(single)
    toward = np.where((rest > 0) == (single > 0), 1, -1).astype(np.int32)
    return np.where(nudge, bits + toward, bits).astype(np.int32).view(np.float32)


def _multiply_add(x: Any, y: Any, z: Any, kind: str) -> Any:
    """x·y + z in one rounding, before encoding: exact, or rounded to odd in fp64."""
    if kind in ("f32", "f32x2"):
        return fma_f32(x, y, z)
    if kind == "f64":
        return _fma_f64(x, y, z)
    product = np.multiply(x, y, dtype=np.float64)
    return exact_sum(product, np.broadcast_to(np.asarray(z, np.float64), product.shape))


def _fma_f64(x: Any, y: Any, z: Any) -> Any:
    """Through exact fractions: rare, so slow will do."""
    from fractions import Fraction

    def one(a: float, b: float, c: float) -> float:
        if not np.isfinite([a, b, c]).all():
            return a * b + c
        return float(Fraction(a) * Fraction(b) + Fraction(c))

    x, y, z = np.broadcast_arrays(np.atleast_1d(x), y, z)
    return np.array([one(*map(float, triple)) for triple in zip(x, y, z, strict=True)], np.float64)


_ARITHMETIC: dict[str, tuple[int, Callable[..., Any]]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    "min": (2, np.fmin),
    "max": (2, np.fmax),
    "div": (2, np.divide),
    "neg": (1, np.negative),
    "abs": (1, np.absolute),
    "sqrt": (1, np.sqrt),
}
_APPROXIMATE: dict[str, Callable[..., Any]] = {
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def elementwise(
    machine: Machine, statement: Instruction, kind: str, operation: Callable[..., Any], count: int
) -> Closure:
    """``args[0] = operation(args[1], …)`` on decoded values; in place where numpy has the type."""
    sources = [machine.source(arg, kind) for arg in statement.args[1 : 1 + count]]
    ftz = "ftz" in statement.mods
    saturate = "sat" in statement.mods
    row = machine.exact_row(statement.args[0], kind)
    if (
        kind in ("f32", "f64")
        and isinstance(operation, np.ufunc)
        and row is not None
        and not (ftz or saturate)
    ):
        x, y = sources[0], sources[-1]
        if count == 2:

            def run_two(mask: Mask) -> None:
                operation(x, y, out=row, where=mask)

            return run_two

        def run_one(mask: Mask) -> None:
            operation(x, out=row, where=mask)

        return run_one
    write = machine.target(statement.args[0], kind)
    relu = "relu" in statement.mods

    def run(mask: Mask) -> None:
        values = [decode(source, kind) for source in sources]
        if ftz and kind in ("f32", "f32x2"):
            values = [flush(value) for value in values]
        result = operation(*values)
        if ftz and kind in ("f32", "f32x2"):
            result = flush(result)
        if saturate:
            result = np.where(np.isnan(result), 0, np.clip(result, 0, 1))
        if relu:
            result = rectified(result)
        write(encode(result, kind), mask)

    return run


@instruction(
    *(
        f"{op}{mods}.{kind}"
        for op in ("add", "sub", "mul", "min", "max", "neg", "abs")
        for kind in _ALL
        for mods in ("", ".ftz")
    )
)
def plain(machine: Machine, statement: Instruction) -> Closure:
    return arithmetic(machine, statement)


@instruction(
    *(f"{op}.{rounding}" for op in ("add", "sub", "mul", "div") for rounding in ("rn", "rz", "rm", "rp"))
)
@instruction(
    "div.approx", "div.full", "sqrt", "add.sat", "min.NaN", "max.NaN", "max.ftz.NaN", "min.ftz.NaN", "mul.sat"
)
def arithmetic(machine: Machine, statement: Instruction) -> Closure:
    kind = _type(statement)
    count, operation = _ARITHMETIC[statement.op]
    if "NaN" in statement.mods:
        operation = np.maximum if statement.op == "max" else np.minimum
    if {"rz", "rm", "rp"} & set(statement.mods):
        if kind != "f32" or statement.op == "sqrt":
            raise NotImplementedError(statement.opcode)
        operation = _directed(operation, next(m for m in statement.mods if m in ("rz", "rm", "rp")))
    return elementwise(machine, statement, kind, operation, count)


def _directed(operation: Callable[..., Any], rounding: str) -> Callable[..., Any]:
    """``operation`` on fp32 rounded in a direction, from its fp64 value (exact for products, near enough else)."""

    def run(*values: Any) -> Any:
        return round_f32(operation(*(np.asarray(v).astype(np.float64) for v in values)), rounding)

    return run


def round_f32(exact: Any, rounding: str) -> Any:
    """fp64 rounded to fp32 to nearest (rn), toward zero (rz), down (rm) or up (rp)."""
    nearest = np.asarray(exact).astype(np.float32)
    if rounding == "rn":
        return nearest
    over, under = nearest > exact, nearest < exact
    down, up = np.nextafter(nearest, np.float32(-np.inf)), np.nextafter(nearest, np.float32(np.inf))
    if rounding == "rz":
        over, under = over & (nearest > 0), under & (nearest < 0)
    elif rounding == "rm":
        under = np.zeros_like(under)
    else:
        over = np.zeros_like(over)
    return np.where(over, down, np.where(under, up, nearest))


@instruction(*_APPROXIMATE)
def approximate(machine: Machine, statement: Instruction) -> Closure:
    """Special functions, rounded from fp64: closer than any GPU's approximation."""
    kind = _type(statement)
    function = _APPROXIMATE[statement.op]

    def operation(x: Any) -> Any:
        return function(np.asarray(x, np.float64)) if kind != "f64" else function(x)

    if kind == "f32":
        return elementwise(machine, statement, kind, lambda x: operation(x).astype(np.float32), 1)
    return elementwise(machine, statement, kind, operation, 1)


@instruction("fma")
@instruction(*(f"mad{mods}.{kind}" for kind in ("f32", "f64") for mods in (".rn", ".rn.ftz", ".ftz", "")))
def fused(machine: Machine, statement: Instruction) -> Closure:
    kind = _type(statement)
    row = machine.exact_row(statement.args[0], kind)
    if (
        kind == "f32"
        and row is not None
        and not {"ftz", "sat", "relu", "rz", "rm", "rp"} & set(statement.mods)
    ):
        x, y, z = (machine.source(arg, kind) for arg in statement.args[1:4])

        def run(mask: Mask) -> None:
            np.copyto(row, fma_f32(x, y, z), where=mask)

        return run
    if {"rz", "rm", "rp"} & set(statement.mods):
        raise NotImplementedError(statement.opcode)
    return elementwise(machine, statement, kind, lambda x, y, z: _multiply_add(x, y, z, kind), 3)


@instruction("copysign")
def copy_sign(machine: Machine, statement: Instruction) -> Closure:
    return elementwise(machine, statement, _type(statement), lambda x, y: np.copysign(y, x), 2)


@instruction("testp")
def test_property(machine: Machine, statement: Instruction) -> Closure:
    tests: dict[str, Callable[..., Any]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "notanumber": np.isnan,
        "number": lambda x: ~np.isnan(x),
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
    }
    test, source = tests[statement.mods[0]], machine.source(statement.args[1], _type(statement))
    write = machine.target(statement.args[0], "pred")

    def run(mask: Mask) -> None:
        write(test(source), mask)

    return run
