"""PTX types as numpy types, and rounding to the floating-point types that numpy lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
DTYPES: dict[str, type[np.generic]] = {
    "pred": np.bool_,
    "u8": np.uint8,
    "s8": np.int8,
    "b8": np.uint8,
    "u16": np.uint16,
    "s16": np.int16,
    "b16": np.uint16,
    "u32": np.uint32,
    "s32": np.int32,
    "b32": np.uint32,
    "u64": np.uint64,
    "s64": np.int64,
    "b64": np.uint64,
    "f32": np.float32,
    "f64": np.float64,
    # As bits: numpy computes with none of them as a GPU does.
    "f16": np.uint16,
    "bf16": np.uint16,
    "tf32": np.uint32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "f32x2": np.uint64,
    "b128": np.complex128,
}
"""What a register holds under a type; wide or exotic types are carried as bits."""


def bytes_of(type_name: str) -> int:
    """Bytes of a value of a PTX type."""
    return np.dtype(DTYPES[type_name]).itemsize


def widen_bf16(bits: Array) -> Any:
    """bf16 bits as fp32 values."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_bf16(values: NDArray[np.float32]) -> Any:
    """fp32 values as bf16 bits, to nearest even."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def truncate_bf16(values: NDArray[np.float32]) -> Any:
    """fp32 values as bf16 bits, toward zero."""
    values = np.ascontiguousarray(values, np.float32)
    kept = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), kept)


def round_tf32(values: NDArray[np.float32], ties_away: bool = True) -> Any:
    """fp32 values with the 10 explicit mantissa bits of tf32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    half = np.uint32(0x1000) if ties_away else np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    finite = (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    return np.where(finite, (bits + half) & np.uint32(0xFFFFE000), bits).astype(np.uint32).view(np.float32)


def to_odd(high: NDArray[np.float64], low: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum high + low (|low| below half a unit of high) rounded to odd: rounding it again is then exact."""
    bits = high.view(np.int64)
    nudge = (low != 0) & (bits & 1 == 0) & np.isfinite(high)
    toward = np.where((low > 0) == (high > 0), 1, -1)
    # A zero sum of a nonzero low part cannot be: low would be the sum.
    return np.where(nudge, bits + toward, bits).view(np.float64)


def exact_sum(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """x + y rounded to odd in fp64, so that one more rounding gives the correctly rounded sum."""
    total = x + y
    part = total - x
    rest = (x - (total - part)) + (y - part)
    return to_odd(total, rest)


def fma_f32(x: Array, y: Array, z: Array) -> Any:
    """x·y + z in one rounding to fp32: the product of two fp32 numbers is exact in fp64."""
    product = np.multiply(x, y, dtype=np.float64)
    total = product + z
    # Rounding twice errs only where the fp64 sum lies halfway between two fp32 numbers, or where fp32 is subnormal.
    doubtful = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    doubtful |= np.abs(total) < 2.0**-126
    if np.count_nonzero(doubtful):
        total = exact_sum(product, np.broadcast_to(np.asarray(z, np.float64), product.shape))
    return total.astype(np.float32)
