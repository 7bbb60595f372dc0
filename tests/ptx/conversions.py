"""Conversions between numeric types."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.floats import TINY, decode, encode, flush, rectified, round_f32
from ptx.syntax import Instruction
from ptx.table import Closure, Mask, instruction
from ptx.types import DTYPES, round_tf32, truncate_bf16

if TYPE_CHECKING:
    from ptx.machine import Machine

_INTEGRAL: dict[str, Callable[..., Any]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@instruction("cvt")
def convert(machine: Machine, statement: Instruction) -> Closure:
    target, source = statement.mods[-2:]
    mods = set(statement.mods[:-2])
    if target.endswith("x2"):
        return _convert_pair(machine, statement, target, source, mods)
    value, write = machine.source(statement.args[1], source), machine.target(statement.args[0], target)
    function = _conversion(target, source, mods)

    def run(mask: Mask) -> None:
        write(function(value), mask)

    return run


@instruction("cvt.pack")
def convert_pack(machine: Machine, statement: Instruction) -> Closure:
    raise NotImplementedError(statement.opcode)


def _is_float(kind: str) -> bool:
    return "f" in kind


def _conversion(target: str, source: str, mods: set[str]) -> Callable[[Any], Any]:
    """A function from values of ``source`` (as a register view) to what ``target`` holds."""
    if not _is_float(target) and not _is_float(source):
        return _integer_to_integer(target, source, "sat" in mods)
    if not _is_float(target):
        return _float_to_integer(target, source, mods)
    if not _is_float(source):
        rounding = next((m for m in mods if m in ("rz", "rm", "rp")), "rn")

        def from_integer(x: Any) -> Any:
            x = np.asarray(x)
            if target == "f32" and rounding != "rn":
                return round_f32(x.astype(np.float64), rounding)
            wide = x if target in ("f32", "f64") else x.astype(np.float64)
            return encode(wide, target)

        return from_integer
    return _float_to_float(target, source, mods)


def _integer_to_integer(target: str, source: str, saturate: bool) -> Callable[[Any], Any]:
    dtype = DTYPES[target]

    def plain(x: Any) -> Any:
        if saturate:
            limits = np.iinfo(np.dtype(dtype))
            low = max(int(limits.min), int(np.iinfo(x.dtype).min))
            high = min(int(limits.max), int(np.iinfo(x.dtype).max))
            x = np.clip(x, x.dtype.type(low), x.dtype.type(high))
        return x.astype(dtype)

    return plain


def _float_to_integer(target: str, source: str, mods: set[str]) -> Callable[[Any], Any]:
    round_ = _INTEGRAL[next(m for m in mods if m in _INTEGRAL)]
    limits: Any = np.iinfo(np.dtype(DTYPES[target]))

    def run(x: Any) -> Any:
        values = np.asarray(decode(x, source), np.float64)
        if "ftz" in mods:
            values = np.where(np.abs(values) < TINY, 0, values)
        whole = round_(np.where(np.isnan(values), 0, values))
        inside = np.clip(whole, float(limits.min), float(limits.max))
        # The upper limit of a wide type is no fp64 number: it would wrap.
        result = np.where(inside >= float(limits.max), 0, inside).astype(DTYPES[target])
        return np.where(inside >= float(limits.max), limits.max, result).astype(DTYPES[target])

    return run


def _float_to_float(target: str, source: str, mods: set[str]) -> Callable[[Any], Any]:
    round_ = next((_INTEGRAL[m] for m in mods if m in _INTEGRAL), None)
    toward_zero = "rz" in mods

    def run(x: Any) -> Any:
        values = np.asarray(decode(x, source))
        if "ftz" in mods and values.dtype == np.float32:
            values = flush(values)
        if round_ is not None:
            values = round_(values)
        if "relu" in mods:
            values = rectified(values)
        if "sat" in mods:
            values = np.where(np.isnan(values), 0, np.clip(values, 0, 1)).astype(values.dtype)
        if target == "tf32":
            return round_tf32(values, "rna" in mods).view(np.uint32)
        if "satfinite" in mods:
            values = _finite(values, target)
        if toward_zero:
            return _toward_zero(values, target)
        return encode(values, target)

    return run


def _finite(values: Any, target: str) -> Any:
    largest = {"f16": 65504.0, "bf16": float(np.uint32(0x7F7F0000).view(np.float32))}[target]
    return np.where(np.isnan(values), values, np.clip(values, -largest, largest)).astype(np.float32)


def _toward_zero(values: Any, target: str) -> Any:
    if target == "bf16":
        return truncate_bf16(values)
    if target == "f32":
        return round_f32(values, "rz")
    if target == "f16":
        nearest = values.astype(np.float16)
        over = np.abs(nearest.astype(np.float64)) > np.abs(values)
        return (
            np.where(over, np.nextafter(nearest, np.float16(0)), nearest).astype(np.float16).view(np.uint16)
        )
    raise NotImplementedError(f"rounding toward zero to {target}")


def _convert_pair(
    machine: Machine, statement: Instruction, target: str, source: str, mods: set[str]
) -> Closure:
    """Two fp32 values into one packed register, the first into the upper half."""
    if source != "f32" or target not in ("f16x2", "bf16x2"):
        raise NotImplementedError(statement.opcode)
    high, low = (machine.source(arg, source) for arg in statement.args[1:3])
    write = machine.target(statement.args[0], target)
    function = _conversion(target[:-2], source, mods)

    def run(mask: Mask) -> None:
        upper = function(np.asarray(high)).view(np.uint16).astype(np.uint32)
        write(upper << np.uint32(16) | function(np.asarray(low)).view(np.uint16), mask)

    return run
