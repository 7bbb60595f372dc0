"""Tensor maps: the boxes that TMA moves, and where they lie in global and shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dmuon.kernels.gpu.binary import TensorMap
from ptx.floats import decode, encode
from ptx.memory import Memory
from ptx.owners import Who

_ITEM = {"bf16": 2, "fp16": 2, "fp32": 4}


def check_tensor_map(tensor_map: TensorMap) -> None:
    """Raise unless the driver would encode it.

    Raises:
        ValueError: naming the field and what it should be.
    """
    item, rank = _ITEM[tensor_map.dtype], len(tensor_map.shape)
    inner = tensor_map.box[0] * item

    def require(holds: bool, text: str) -> None:
        if not holds:
            raise ValueError(f"tensor map {tensor_map}: {text}")

    require(1 <= rank <= 5, "it must have 1 to 5 dimensions")
    require(len(tensor_map.strides) == rank - 1, "strides must be those of all dimensions but the first")
    require(len(tensor_map.box) == rank, "the box must have as many dimensions as the tensor")
    require(tensor_map.address % 16 == 0, "the address must be a multiple of 16")
    require(all(1 <= size <= 1 << 32 for size in tensor_map.shape), "sizes must be from 1 to 2^32")
    require(
        all(s % 16 == 0 and 0 < s < 1 << 40 for s in tensor_map.strides),
        "strides must be positive multiples of 16 below 2^40",
    )
    require(all(1 <= size <= 256 for size in tensor_map.box), "box sizes must be from 1 to 256")
    require(inner % 16 == 0, "the box's rows must be multiples of 16 bytes")
    require(tensor_map.swizzle in (0, 32, 64, 128), "the swizzle must be 0, 32, 64 or 128")
    require(
        tensor_map.swizzle == 0 or inner <= tensor_map.swizzle,
        "the box's rows must not be longer than the swizzle",
    )


def swizzled(addresses: Any, swizzle: int) -> Any:
    """Shared addresses after swizzling: bits 4-6 are XORed with bits 7-9, as many as the pattern has."""
    return addresses ^ (((addresses >> 7) & (swizzle // 16 - 1)) << 4) if swizzle else addresses


@dataclass
class Box:
    """The part of a box that lies within its tensor."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    first: int

    @property
    def empty(self) -> bool:
        return any(low >= high for low, high in zip(self.low, self.high, strict=True))


class Tensor:
    """A tensor map with its memory."""

    def __init__(self, memory: Memory, tensor_map: TensorMap) -> None:
        check_tensor_map(tensor_map)
        self.map, self.item = tensor_map, _ITEM[tensor_map.dtype]
        self.strides = (self.item, *tensor_map.strides)
        self.memory = memory
        self.box_bytes = int(np.prod(tensor_map.box)) * self.item
        self.dtype = np.uint16 if self.item == 2 else np.uint32

    def clip(self, coordinates: tuple[int, ...]) -> Box:
        low = tuple(max(0, -c) for c in coordinates)
        high = tuple(
            min(box, size - c) for c, box, size in zip(coordinates, self.map.box, self.map.shape, strict=True)
        )
        first = self.map.address + sum(
            (c + skip) * stride for c, skip, stride in zip(coordinates, low, self.strides, strict=True)
        )
        return Box(low, high, first)

    def addresses(self, box: Box) -> Any:
        """Of every element within, slowest dimension first."""
        total: Any = np.zeros((), np.int64)
        for axis, (low, high) in enumerate(zip(box.low, box.high, strict=True)):
            steps = np.arange(high - low, dtype=np.int64) * self.strides[axis]
            total = steps.reshape(-1, *[1] * axis) + total
        return (total + box.first).ravel()

    def part(self, box: Box) -> tuple[slice, ...]:
        """The index of the part within, in an array of the box (slowest dimension first)."""
        return tuple(slice(low, high) for low, high in zip(box.low[::-1], box.high[::-1], strict=True))

    def read(self, coordinates: tuple[int, ...]) -> Any:
        """The box as 16-byte chunks; zeros outside of the tensor."""
        values = np.zeros(self.map.box[::-1], self.dtype)
        box = self.clip(coordinates)
        if not box.empty:
            found = self.memory.load(self.addresses(box), self.item, "TMA load")
            values[self.part(box)] = found.reshape(values[self.part(box)].shape)
        return values.reshape(-1, 16 // self.item).view(np.complex128)[:, 0]

    def write(self, coordinates: tuple[int, ...], chunks: Any, reduce: str | None) -> None:
        box = self.clip(coordinates)
        if box.empty:
            return
        values = (
            np.ascontiguousarray(chunks).view(self.dtype).reshape(self.map.box[::-1])[self.part(box)].ravel()
        )
        addresses = self.addresses(box)
        if reduce is not None:
            values = self._reduced(addresses, values, reduce)
        self.memory.store(addresses, values, self.item, "TMA store")

    def claim(self, coordinates: tuple[int, ...], stored: bool, who: Who) -> None:
        """Notes that the box will be read or written."""
        box = self.clip(coordinates)
        if not box.empty:
            what = "TMA store" if stored else "TMA load"
            self.memory.claim(self.addresses(box), self.item, stored, what, who)

    def _reduced(self, addresses: Any, values: Any, reduce: str) -> Any:
        if reduce != "add":
            raise NotImplementedError(f"TMA reduction {reduce}")
        kind = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}[self.map.dtype]
        old = self.memory.load(addresses, self.item, "TMA reduction")
        if kind == "f32":
            return (old.view(np.float32) + values.view(np.float32)).view(np.uint32)
        return encode(decode(old, kind) + decode(values, kind), kind)
