"""Memory spaces with bounds: global memory of registered tensors, shared memory of resident blocks, local memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from ptx.owners import Owners, Who
from ptx.types import Array

_UNITS: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
    16: np.complex128,
}
"""A type of each access size; what is moved is bits, never values."""

POISON = 0xFF
"""Every byte of memory that nothing has written: NaN in every floating-point type, -1 as an integer."""


def typed_views(data: NDArray[np.uint8]) -> dict[int, Array]:
    """The last axis of ``data`` (a multiple of 16 bytes) seen as items of 1 to 16 bytes."""
    return {size: data.view(dtype) for size, dtype in _UNITS.items()}


def check_aligned(addresses: NDArray[np.int64], size: int, what: str) -> None:
    """Raise unless all addresses are multiples of ``size``."""
    if size > 1 and int(np.bitwise_or.reduce(addresses)) & (size - 1):
        bad = int(addresses[(addresses & (size - 1)) != 0][0])
        raise IndexError(f"{what} of {size} bytes at {bad:#x}, which is not a multiple of {size}")


@dataclass
class Region:
    """One stretch of global memory.

    Args:
        base: its address, a multiple of 16.
        data: its bytes.
        valid: 1 for the bytes that may be touched; ``None`` if all may.
        tensors: index, first and last address + 1 of each tensor within.
    """

    base: int
    data: NDArray[np.uint8]
    valid: NDArray[np.uint8] | None
    tensors: list[tuple[int, int, int]]
    owners: Owners | None = None
    views: dict[int, Array] = field(init=False)
    valid_views: dict[int, Array] = field(init=False)

    def __post_init__(self) -> None:
        self.views = typed_views(self.data)
        if self.valid is not None:
            self.valid_views = {size: self.valid.view(dtype) for size, dtype in _UNITS.items() if size < 16}

    def allows(self, places: NDArray[np.int64], size: int) -> bool:
        """Whether items of ``size`` bytes at ``places`` (in items) lie within tensors."""
        if self.valid is None:
            return True
        if size == 16:
            return self.allows(2 * places, 8) and self.allows(2 * places + 1, 8)
        ones = int.from_bytes(b"\1" * size, "little")
        return bool((self.valid_views[size][places] == ones).all())


class Memory:
    """Global memory: the elements of registered CPU tensors, at their real addresses.

    Anything else is out of bounds: canaries around a tensor, and gaps between its rows.
    """

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.tensors: list[torch.Tensor] = []
        self.loaded: list[int] = []
        self.stored: list[int] = []

    @classmethod
    def of(cls, *tensors: torch.Tensor) -> Memory:
        """Of these tensors; a :class:`~ptx.report.Report` counts the bytes moved of each, in this order."""
        memory = cls()
        by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ValueError(f"tensors must be on the CPU, got one on {tensor.device}")
            memory.tensors.append(tensor)
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        for address, views in by_storage.items():
            memory._register(address, views)
        memory.loaded, memory.stored = [0] * len(tensors), [0] * len(tensors)
        return memory

    def _register(self, address: int, views: list[torch.Tensor]) -> None:
        storage = views[0].untyped_storage()
        base, end = address // 16 * 16, -(-(address + storage.nbytes()) // 16) * 16
        valid = np.zeros(end - base, np.uint8)
        spans = []
        for view in views:
            if view.numel() == 0:
                continue
            mask = np.lib.stride_tricks.as_strided(
                valid[view.data_ptr() - base :],
                (*view.shape, view.element_size()),
                (*(stride * view.element_size() for stride in view.stride()), 1),
            )
            mask[...] = 1
            last = view.data_ptr() + view.element_size() * sum(
                (size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)
            )
            index = next(k for k, tensor in enumerate(self.tensors) if tensor is view)
            spans.append((index, view.data_ptr(), last + view.element_size()))
        self.regions.append(Region(base, _bytes_at(base, end - base), None if valid.all() else valid, spans))

    def add(self, data: NDArray[np.uint8]) -> int:
        """Registers ``data`` (a module's own variable); its address."""
        padded = np.zeros(-(-data.size // 16) * 16 + 16, np.uint8)
        shift = -padded.ctypes.data % 16
        region = padded[shift : shift + data.size // 16 * 16 + 16 * (data.size % 16 > 0)]
        region[: data.size] = data
        self.regions.append(Region(region.ctypes.data, region, None, []))
        return region.ctypes.data

    def watch(self, races: bool) -> None:
        """Begins a launch: counts from zero, and keeps (or not) who touches what."""
        self.loaded, self.stored = [0] * len(self.tensors), [0] * len(self.tensors)
        for region in self.regions:
            region.owners = Owners(region.data.size) if races else None

    def load(
        self, addresses: NDArray[np.int64], size: int, what: str = "load", who: Who | None = None
    ) -> Array:
        """The items of ``size`` bytes at ``addresses``, read by ``who``."""
        if addresses.size == 0:
            return np.empty(0, _UNITS[size])
        check_aligned(addresses, size, what)
        values: Array = np.empty(addresses.size, _UNITS[size])
        for part, region in self._parts(addresses, size, what):
            places = (addresses[part] - region.base) // size
            if region.owners is not None and who is not None:
                region.owners.read(places, size, who.part(part))
            self._count(region, addresses[part], size, self.loaded)
            if isinstance(part, slice):
                return region.views[size][places]
            values[part] = region.views[size][places]
        return values

    def store(
        self,
        addresses: NDArray[np.int64],
        values: Array,
        size: int,
        what: str = "store",
        who: Who | None = None,
    ) -> None:
        """Writes items of ``size`` bytes, on behalf of ``who``."""
        if addresses.size == 0:
            return
        check_aligned(addresses, size, what)
        for part, region in self._parts(addresses, size, what):
            places = (addresses[part] - region.base) // size
            if region.owners is not None and who is not None:
                region.owners.write(places, size, who.part(part))
            region.views[size][places] = values[part]
            self._count(region, addresses[part], size, self.stored)

    def claim(self, addresses: NDArray[np.int64], size: int, stored: bool, what: str, who: Who) -> None:
        """Notes an access that happens later, without counting it."""
        check_aligned(addresses, size, what)
        for part, region in self._parts(addresses, size, what) if addresses.size else ():
            if region.owners is not None:
                note = region.owners.write if stored else region.owners.read
                note((addresses[part] - region.base) // size, size, who.part(part))

    def _region(self, addresses: NDArray[np.int64], size: int) -> Region | None:
        """The region that holds all of ``addresses``, if one does."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        for region in self.regions:
            if region.base <= low and high <= region.base + region.data.size:
                return region
        return None

    def _parts(
        self, addresses: NDArray[np.int64], size: int, what: str
    ) -> list[tuple[Array | slice, Region]]:
        """Which of the addresses lie in which region."""
        region = self._region(addresses, size)
        if region is not None:
            if not region.allows((addresses - region.base) // size, size):
                self._refuse(addresses, size, what)
            return [(slice(None), region)]
        parts: list[tuple[Array | slice, Region]] = []
        found = 0
        for region in self.regions:
            inside = (addresses >= region.base) & (addresses + size <= region.base + region.data.size)
            (part,) = inside.nonzero()
            if part.size:
                found += part.size
                if not region.allows((addresses[part] - region.base) // size, size):
                    self._refuse(addresses, size, what)
                parts.append((part, region))
        if found < addresses.size:
            self._refuse(addresses, size, what)
        return parts

    def _refuse(self, addresses: NDArray[np.int64], size: int, what: str) -> None:
        for lane, address in enumerate(addresses.tolist()):
            regions = [
                r for r in self.regions if r.base <= address and address + size <= r.base + r.data.size
            ]
            if not regions or not regions[0].allows(np.array([(address - regions[0].base) // size]), size):
                raise IndexError(
                    f"{what} of {size} bytes at {address:#x} (access {lane} of {addresses.size}) "
                    f"is out of bounds{self._nearest(address)}"
                )
        raise AssertionError("nothing to refuse")

    def _nearest(self, address: int) -> str:
        spans = [span for region in self.regions for span in region.tensors]
        if not spans:
            return ": no tensor is registered"
        index, low, high = min(spans, key=lambda span: max(span[1] - address, address - span[2] + 1, 0))
        if low <= address < high:
            return f": in a gap of tensor {index}, {address - low} bytes after its first element"
        return f": the nearest tensor is {index}, from {low:#x} to {high:#x}"

    @staticmethod
    def _count(region: Region, addresses: NDArray[np.int64], size: int, counts: list[int]) -> None:
        if len(region.tensors) == 1:
            counts[region.tensors[0][0]] += addresses.size * size
        else:
            for index, low, high in region.tensors:
                counts[index] += size * int(np.count_nonzero((addresses >= low) & (addresses < high)))


def _bytes_at(address: int, size: int) -> NDArray[np.uint8]:
    """The memory of this process as an array. Its ends may reach up to 15 bytes past an allocation, within the
    same 16-byte line; those bytes are never valid."""
    return (
        np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        if size
        else np.empty(0, np.uint8)
    )


class Shared:
    """The shared memory of all resident blocks, one row each."""

    BASE = 1024
    """The first address of a block's window, as on a GPU where the system keeps the first kilobyte."""

    RANK_SHIFT = 24
    """An address in a cluster's window has the block's rank from this bit on, as on a GPU."""

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self.data = np.full((blocks, -(-(self.BASE + size) // 16) * 16), POISON, np.uint8)
        self.views = typed_views(self.data)

    def reset(self) -> None:
        self.data[:] = POISON

    def places(self, addresses: NDArray[np.int64], size: int, what: str) -> NDArray[np.int64]:
        """Addresses within a window as places in its typed view, checked."""
        check_aligned(addresses, size, what)
        # As unsigned numbers those below the base are large.
        if int((addresses - self.BASE).view(np.uint64).max()) + size > self.size:
            bad = int(addresses[(addresses < self.BASE) | (addresses + size > self.BASE + self.size)][0])
            raise IndexError(
                f"{what} of {size} bytes at shared address {bad:#x}: the block has "
                f"{self.BASE:#x} to {self.BASE + self.size:#x}"
            )
        return addresses // size


class Local:
    """Local memory: a stack for each thread."""

    BASE = 1 << 24
    """The address of the first byte, as a number that is no shared address."""

    def __init__(self, threads: int, size: int) -> None:
        self.size = size
        self.data = np.full((threads, max(16, -(-size // 16) * 16)), POISON, np.uint8)
        self.views = typed_views(self.data)

    def reset(self) -> None:
        self.data[:] = POISON

    def places(self, addresses: NDArray[np.int64], size: int, what: str) -> NDArray[np.int64]:
        check_aligned(addresses, size, what)
        offsets = addresses - self.BASE
        if int(offsets.min()) < 0 or int(offsets.max()) + size > self.size:
            raise IndexError(
                f"{what} of {size} bytes outside of a thread's {self.size} bytes of local memory"
            )
        return offsets // size
