"""What a compiled kernel is, and what one launch of it is: plain data, the same for every DSL.

A *spec* says what to compile, a *binary* is the result, and a *launch* is a grid with one value for each kernel
parameter. A launch holds addresses, not tensors, so the same one runs on a GPU through the driver
(:mod:`dmuon.kernels.gpu.driver`) and, on addresses of CPU tensors, in the tests' PTX interpreter.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Unsupported(Exception):
    """A kernel cannot serve this call; the message says why (arch, dtype, alignment, size). Another backend can."""


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to compile: everything that is fixed at compile time.

    Args:
        dsl: ``"triton"``, ``"tilelang"`` or ``"cute"``.
        module: the module with ``build(spec) -> Binary``, relative to ``dmuon.kernels.gpu``, such as
            ``"triton_kernels.symmetric_kernel"``. Only compiler processes import it.
        arch: a name of :data:`~dmuon.kernels.gpu.arch.ARCHS`.
        options: JSON values: tiles, stages, dtypes, layouts.
    """

    dsl: str
    module: str
    arch: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Canonical JSON; equal specs have equal texts."""
        value = {"dsl": self.dsl, "module": self.module, "arch": self.arch, "options": dict(self.options)}
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> KernelSpec:
        """The inverse of :attr:`text`."""
        return cls(**json.loads(text))

    def __hash__(self) -> int:
        return hash(self.text)


@dataclass(frozen=True)
class Param:
    """Where a kernel parameter lies in the parameter buffer, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Args:
        spec: what it was compiled from.
        entry: the kernel's name in the PTX and the cubin.
        threads: of a block.
        shared_bytes: dynamic shared memory to ask for at launch.
        params: the kernel's parameters in order.
        ptx: the assembly that ``cubin`` was made of.
        cubin: the machine code.
        cluster: blocks of a cluster, (1, 1, 1) for none.
        extra: JSON values that the kernel's host code needs at launch.
    """

    spec: KernelSpec
    entry: str
    threads: int
    shared_bytes: int
    params: tuple[Param, ...]
    ptx: str
    cubin: bytes
    cluster: tuple[int, int, int] = (1, 1, 1)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor before it is encoded: a box moved between global and shared memory.

    Dimensions are fastest first; elements out of bounds read as zero and are not written.

    Args:
        address: of the first element, a multiple of 16.
        dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        shape: elements of each dimension.
        strides: bytes from one element to the next in dimensions 1 and up, multiples of 16.
        box: elements of the box in each dimension, at most 256.
        swizzle: 0, 32, 64 or 128 bytes.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Launch:
    """One launch: ``args`` has one value for each of the binary's params, as bytes or as a tensor map."""

    grid: tuple[int, int, int]
    args: tuple[bytes | TensorMap, ...]


def i32(value: int) -> bytes:
    """A 32-bit signed argument."""
    return struct.pack("<i", value)


def i64(value: int) -> bytes:
    """A 64-bit signed argument."""
    return struct.pack("<q", value)


def pointer(address: int) -> bytes:
    """An address as an argument."""
    return struct.pack("<Q", address)


def f32(value: float) -> bytes:
    """A 32-bit float argument."""
    return struct.pack("<f", value)


def pack(binary: Binary, launch: Launch, encode: Any) -> bytes:
    """The parameter buffer of ``launch``. ``encode(tensor_map) -> bytes`` makes the 128 bytes of a descriptor.

    Raises:
        ValueError: the number or the size of the arguments is not what the binary takes.
    """
    if len(launch.args) != len(binary.params):
        raise ValueError(f"{binary.entry} takes {len(binary.params)} arguments, got {len(launch.args)}")
    end = max((param.offset + param.size for param in binary.params), default=0)
    buffer = bytearray(end)
    for index, (param, arg) in enumerate(zip(binary.params, launch.args, strict=True)):
        data = arg if isinstance(arg, bytes) else encode(arg)
        if len(data) != param.size:
            raise ValueError(f"argument {index} of {binary.entry} has {param.size} bytes, got {len(data)}")
        buffer[param.offset : param.offset + param.size] = data
    return bytes(buffer)
