"""Operands as arrays over all threads: registers, symbols, literals, addresses."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx.layout import WARP, WARPGROUP, Layout, Shape
from ptx.memory import Local, Memory, Shared
from ptx.syntax import (
    Address,
    Immediate,
    Not,
    Operand,
    Program,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    integer,
)
from ptx.table import Mask
from ptx.types import DTYPES, UNSIGNED, Array

# Generic addresses: which window is in the upper bits, above every address of a process.
WINDOW = 60
GENERIC_SHARED, GENERIC_LOCAL, GENERIC_PARAM = (k << WINDOW for k in (1, 2, 3))

Write = Callable[[Any, Mask], None]
Addresses = Callable[[Any], NDArray[np.int64]]


class Operands(Layout):
    """A program's registers and symbols, for the threads of a layout.

    Args:
        program: whose names these are.
        shape: of blocks and clusters.
        grid: of the launch.
        dynamic: bytes of dynamic shared memory.
        memory: where the module's own variables go.
        params: the parameter buffer.
        offsets: where each parameter is in it.
    """

    def __init__(
        self,
        program: Program,
        shape: Shape,
        grid: tuple[int, int, int],
        dynamic: int,
        memory: Memory,
        params: bytes,
        offsets: dict[str, int],
    ) -> None:
        # Whole warpgroups where those act together; the threads that are too many never start.
        grouped = any(statement.op == "wgmma" for statement in program.code)
        super().__init__(shape, grid, WARPGROUP if grouped else WARP)
        self.program, self.memory, self.params, self.offsets = program, memory, params, offsets
        counts = {**dict.fromkeys(("pred", "b8", "b16", "b32", "b64", "b128"), 0), **program.registers}
        self.files = {
            kind: np.zeros((max(count, 1), self.threads), DTYPES[kind]) for kind, count in counts.items()
        }
        self.symbols: dict[str, int] = {}
        static = self._lay_out()
        self.shared = Shared(self.blocks, static + dynamic)
        self.specials = self.special_registers(dynamic, self.shared.size)

    def _lay_out(self) -> int:
        """Addresses of all variables; bytes of static shared memory, which the dynamic one follows."""
        top, stack = Shared.BASE, 0
        variables = list(self.program.variables.values())
        for variable in variables:
            if variable.space == "shared" and not variable.extern:
                top = -(-top // variable.align) * variable.align
                self.symbols[variable.name] = top
                top += variable.size
            elif variable.space == "local":
                stack = -(-stack // variable.align) * variable.align
                self.symbols[variable.name] = Local.BASE + stack
                stack += variable.size
            elif variable.space in ("global", "const"):
                self.symbols[variable.name] = self._module_variable(variable)
        for variable in variables:
            if variable.extern and variable.space == "shared":
                top = -(-top // variable.align) * variable.align
                self.symbols[variable.name] = top
        self.local = Local(self.threads, stack)
        return top - Shared.BASE

    def _module_variable(self, variable: Variable) -> int:
        data = np.zeros(variable.size, np.uint8)
        data[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
        return self.memory.add(data)

    def poison(self) -> None:
        """Makes every register what no kernel may count on: not zero."""
        for kind, file in self.files.items():
            file.view(np.uint8)[:] = 0 if kind == "pred" else 0xFF

    def row(self, register: Operand | None) -> Any:
        """A register of all threads."""
        assert isinstance(register, Register), register
        return self.files[register.type][register.row]

    def source(self, operand: Operand, type_name: str) -> Any:
        """A live view of the operand's values as ``type_name``: an array over threads, or a scalar."""
        dtype = np.dtype(DTYPES[type_name])
        if isinstance(operand, Register):
            return _low(self.row(operand), dtype)
        if isinstance(operand, Special):
            if operand.name not in self.specials:
                raise NotImplementedError(f"no special register {operand.name}")
            return _low(self.specials[operand.name], dtype)
        if isinstance(operand, Symbol):
            return self._symbol(operand, dtype)
        if isinstance(operand, Immediate):
            return literal(operand.text, type_name)
        raise NotImplementedError(f"operand {operand} as a value of type {type_name}")

    def _symbol(self, operand: Symbol, dtype: np.dtype[Any]) -> Any:
        if operand.name == "WARP_SZ":
            return dtype.type(WARP)
        if operand.name in self.offsets:
            return dtype.type(GENERIC_PARAM + self.offsets[operand.name] + operand.offset)
        if operand.name not in self.symbols:
            raise NotImplementedError(f"unknown symbol {operand.name}")
        address = self.symbols[operand.name] + operand.offset
        if self.program.variables[operand.name].space == "shared" and self.shape.cluster_blocks > 1:
            return (address + (self.rank.astype(np.int64) << Shared.RANK_SHIFT)).astype(dtype)
        return dtype.type(address)

    def predicate(self, operand: Operand) -> Any:
        """Like :meth:`source`, for predicates, which may be negated: then a function gives the values."""
        if isinstance(operand, Not):
            inner = self.predicate(operand.predicate)
            return lambda: ~inner()
        if isinstance(operand, Immediate):
            value = np.bool_(integer(operand.text) != 0)
            return lambda: value
        row = self.row(operand)
        return lambda: row

    def target(self, operand: Operand, type_name: str) -> Write:
        """A function that writes values of ``type_name`` (an array over all threads, or a scalar) under a mask."""
        if isinstance(operand, Sink):
            return lambda values, mask: None
        row = self.row(operand)
        dtype = np.dtype(DTYPES[type_name])
        if row.dtype == np.bool_ or row.itemsize == dtype.itemsize:
            view = row.view(dtype)

            def write(values: Any, mask: Mask) -> None:
                np.copyto(view, values, where=mask, casting="same_kind")

            return write
        if row.itemsize < dtype.itemsize:
            raise NotImplementedError(f"a value of type {type_name} for the narrower register {operand}")
        wide = row.view(_extended(dtype, row.itemsize))

        def write_extended(values: Any, mask: Mask) -> None:
            np.copyto(
                wide, np.asarray(values, dtype).view(_as_integer(dtype)), where=mask, casting="same_kind"
            )

        return write_extended

    def exact_row(self, operand: Operand, type_name: str) -> Any:
        """The operand's register as ``type_name``, if it has just that width: a place to compute into."""
        if isinstance(operand, Register):
            row, dtype = self.row(operand), np.dtype(DTYPES[type_name])
            if row.itemsize == dtype.itemsize:
                return row.view(dtype)
        return None

    def address(self, operand: Operand) -> Addresses:
        """A function from an index of threads to the addresses that they name."""
        assert isinstance(operand, Address), operand
        offset = operand.offset
        if isinstance(operand.base, (Register, Special)):
            row = (
                self.row(operand.base)
                if isinstance(operand.base, Register)
                else self.specials[operand.base.name]
            )
            if row.itemsize == 8:
                wide = row.view(np.int64)
                return lambda lanes: wide[lanes] + offset
            return lambda lanes: row[lanes].astype(np.int64) + offset
        base = self.source(operand.base, "s64")
        everywhere = np.array(np.broadcast_to(base + offset, (self.threads,)), np.int64)
        return lambda lanes: everywhere[lanes]


def literal(text: str, type_name: str) -> Any:
    """A literal as a numpy scalar of the type."""
    dtype = np.dtype(DTYPES[type_name])
    if text[:2].lower() == "0f":
        return (
            np.frombuffer(struct.pack("<I", int(text[2:], 16)), np.float32)
            .astype(np.float64 if type_name == "f64" else np.float32)
            .view(dtype)[0]
        )
    if text[:2].lower() == "0d":
        value = np.frombuffer(struct.pack("<Q", int(text[2:], 16)), np.float64)
        return value.view(dtype)[0] if dtype.itemsize == 8 else value.astype(np.float32).view(dtype)[0]
    if type_name == "pred":
        return np.bool_(integer(text) != 0)
    if dtype.kind == "f" and dtype.itemsize > 2:
        return dtype.type(float(text))
    bits = integer(text) & ((1 << 8 * dtype.itemsize) - 1)
    return np.frombuffer(bits.to_bytes(dtype.itemsize, "little"), dtype)[0]


def _low(row: Array, dtype: np.dtype[Any]) -> Array:
    """The low part of a register as a narrower type (little-endian: every so many items)."""
    if row.dtype == np.bool_:
        return row
    if row.itemsize == dtype.itemsize:
        return row.view(dtype)
    if row.itemsize < dtype.itemsize:
        raise NotImplementedError(f"a {row.itemsize}-byte register read as {dtype}")
    return row.view(dtype)[:: row.itemsize // dtype.itemsize]


def _as_integer(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(dtype if dtype.kind in "iu" else UNSIGNED[dtype.itemsize])


def _extended(dtype: np.dtype[Any], size: int) -> np.dtype[Any]:
    """The integer type that a value is extended to in a wider register: with its sign if it has one."""
    return np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{size}")
