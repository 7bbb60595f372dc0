"""Integer, logic and predicate arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.syntax import Instruction
from ptx.table import Closure, Handler, Mask, instruction
from ptx.types import DTYPES, UNSIGNED, bytes_of

if TYPE_CHECKING:
    from ptx.machine import Machine


def compute(
    machine: Machine,
    statement: Instruction,
    type_name: str,
    operation: Callable[..., Any],
    count: int = 2,
    result: str = "",
) -> Closure:
    """``args[0] = operation(args[1], …)`` on operands of one type; the result's may differ."""
    sources = [machine.source(arg, type_name) for arg in statement.args[1 : 1 + count]]
    target, result = statement.args[0], result or type_name
    row = machine.exact_row(target, result)
    if isinstance(operation, np.ufunc) and row is not None and result == type_name:
        if count == 2:
            x, y = sources

            def run_two(mask: Mask) -> None:
                operation(x, y, out=row, where=mask)

            return run_two
        (z,) = sources

        def run_one(mask: Mask) -> None:
            operation(z, out=row, where=mask)

        return run_one
    write = machine.target(target, result)

    def run(mask: Mask) -> None:
        write(operation(*sources), mask)

    return run


def _type(statement: Instruction) -> str:
    return statement.mods[-1]


def _integer(*opcodes: str) -> Callable[[Handler], Handler]:
    """Registers a handler that leaves floating-point types to the modules of those."""
    return instruction(*(f"{opcode}.{kind}" for opcode in opcodes for kind in _INTEGERS))


_INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64", "b16", "b32", "b64", "pred")
_SIMPLE: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@_integer(*_SIMPLE)
def simple(machine: Machine, statement: Instruction) -> Closure:
    kind = _type(statement)
    operation = _SIMPLE[statement.op]
    if kind == "pred":
        return _predicate_logic(machine, statement, operation)
    return compute(machine, statement, kind, operation)


def _predicate_logic(machine: Machine, statement: Instruction, operation: Any) -> Closure:
    x, y = (machine.predicate(arg) for arg in statement.args[1:3])
    row = machine.row(statement.args[0])

    def run(mask: Mask) -> None:
        operation(x(), y(), out=row, where=mask)

    return run


@_integer("neg", "abs", "not", "cnot")
def unary(machine: Machine, statement: Instruction) -> Closure:
    kind = _type(statement)
    if kind == "pred":
        x, row = machine.predicate(statement.args[1]), machine.row(statement.args[0])

        def run(mask: Mask) -> None:
            np.logical_not(x(), out=row, where=mask)

        return run
    if statement.op == "cnot":
        return compute(machine, statement, kind, lambda x: (x == 0).astype(DTYPES[kind]), 1)
    operations = {"neg": np.negative, "abs": np.absolute, "not": np.invert}
    return compute(machine, statement, kind, operations[statement.op], 1)


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


def _high(x: Any, y: Any, kind: str) -> Any:
    """The upper half of a product."""
    bits = int(kind[1:])
    if bits < 64:
        wide = DTYPES[_wide(kind)]
        product = np.multiply(x, y, dtype=wide)
        return (product >> product.dtype.type(bits)).astype(DTYPES[kind])
    a, b = np.asarray(x).astype(object), np.asarray(y).astype(object)
    products = np.atleast_1d((a * b) >> 64)
    high = np.array([p & 0xFFFFFFFFFFFFFFFF for p in products.ravel()], np.uint64)
    return high.view(DTYPES[kind])


@instruction("mul.lo", "mul.hi", "mul.wide", "mad.lo", "mad.hi", "mad.wide", "mul24.lo", "mad24.lo")
def multiply(machine: Machine, statement: Instruction) -> Closure:
    kind, part = _type(statement), statement.mods[0]
    result = _wide(kind) if part == "wide" else kind
    dtype = DTYPES[result]
    x, y = (machine.source(arg, kind) for arg in statement.args[1:3])
    z = machine.source(statement.args[3], result) if statement.op.startswith("mad") else None
    row = machine.exact_row(statement.args[0], result)
    if row is None:
        raise NotImplementedError(f"{statement.opcode} with operands of another width")
    if part == "hi":

        def run_high(mask: Mask) -> None:
            product = _high(x, y, kind)
            np.copyto(row, product if z is None else product + z, where=mask)

        return run_high
    if z is None:

        def run(mask: Mask) -> None:
            np.multiply(x, y, out=row, where=mask, dtype=dtype)

        return run

    def run_add(mask: Mask) -> None:
        np.add(np.multiply(x, y, dtype=dtype), z, out=row, where=mask)

    return run_add


@_integer("div", "rem")
def divide(machine: Machine, statement: Instruction) -> Closure:
    kind = _type(statement)

    def operation(x: Any, y: Any) -> Any:
        x, y = np.broadcast_arrays(x, y)
        safe = np.where(y == 0, y.dtype.type(1), y)
        quotient = x // safe
        if kind[0] == "s":
            # numpy rounds down, PTX toward zero.
            quotient = quotient + ((x % safe != 0) & ((x < 0) != (safe < 0))).astype(x.dtype)
        remainder = x - quotient * safe
        value = quotient if statement.op == "div" else remainder
        return np.where(y == 0, x.dtype.type(-1 if kind[0] == "s" else np.iinfo(x.dtype).max), value)

    return compute(machine, statement, kind, operation)


@instruction("shl", "shr")
def shift(machine: Machine, statement: Instruction) -> Closure:
    kind = _type(statement)
    bits = 8 * bytes_of(kind)
    left = statement.op == "shl"
    x, n = machine.source(statement.args[1], kind), machine.source(statement.args[2], "u32")
    write = machine.target(statement.args[0], kind)
    dtype = np.dtype(DTYPES[kind])
    function = np.left_shift if left else np.right_shift
    if np.ndim(n) == 0:
        amount = int(n)
        if amount < bits:
            row, count = machine.exact_row(statement.args[0], kind), dtype.type(amount)
            if row is not None:

                def run_constant(mask: Mask) -> None:
                    function(x, count, out=row, where=mask)

                return run_constant
        n = np.uint32(min(amount, bits))

    def run(mask: Mask) -> None:
        small = np.minimum(n, np.uint32(bits - 1)).astype(dtype)
        shifted = function(x, small)
        over = np.asarray(n) >= bits
        if over.any() and not (kind[0] == "s" and not left):
            shifted = np.where(over, dtype.type(0), shifted)
        write(shifted, mask)

    return run


@instruction("shf")
def funnel_shift(machine: Machine, statement: Instruction) -> Closure:
    direction, mode = statement.mods[0], statement.mods[1]
    low, high, n = (machine.source(arg, "u32") for arg in statement.args[1:4])
    write = machine.target(statement.args[0], "u32")

    def run(mask: Mask) -> None:
        amount = np.asarray(n) & np.uint32(31) if mode == "wrap" else np.minimum(n, np.uint32(32))
        both = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | np.asarray(low).astype(np.uint64)
        wide = amount.astype(np.uint64)
        both = (both << wide) >> np.uint64(32) if direction == "l" else both >> wide
        write(both.astype(np.uint32), mask)

    return run


@instruction("lop3")
def lop3(machine: Machine, statement: Instruction) -> Closure:
    table = int(machine.source(statement.args[4], "u32"))
    a, b, c = (machine.source(arg, "b32") for arg in statement.args[1:4])
    write = machine.target(statement.args[0], "b32")

    def run(mask: Mask) -> None:
        result = np.uint32(0)
        for row in range(8):
            if table >> row & 1:
                result = result | (
                    (a if row & 4 else np.invert(a))
                    & (b if row & 2 else np.invert(b))
                    & (c if row & 1 else np.invert(c))
                )
        write(result, mask)

    return run


@instruction("prmt")
def permute_bytes(machine: Machine, statement: Instruction) -> Closure:
    if statement.mods != ("b32",):
        raise NotImplementedError(statement.opcode)
    a, b, selector = (machine.source(arg, "b32") for arg in statement.args[1:4])
    write = machine.target(statement.args[0], "b32")

    def run(mask: Mask) -> None:
        both = np.asarray(a).astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
        result = np.zeros((), np.uint32)
        for k in range(4):
            nibble = np.asarray(selector) >> np.uint32(4 * k) & np.uint32(15)
            byte = (both >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(
                np.uint32
            ) & np.uint32(255)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            result = result | np.where(nibble & np.uint32(8), sign, byte).astype(np.uint32) << np.uint32(
                8 * k
            )
        write(result.astype(np.uint32), mask)

    return run


@instruction("bfe")
def extract_bits(machine: Machine, statement: Instruction) -> Closure:
    kind = _type(statement)
    bits = 8 * bytes_of(kind)
    x = machine.source(statement.args[1], kind)
    start, length = (machine.source(arg, "u32") for arg in statement.args[2:4])
    write = machine.target(statement.args[0], kind)

    def run(mask: Mask) -> None:
        first = np.asarray(start).astype(np.int64) & 255
        count = np.asarray(length).astype(np.int64) & 255
        values = np.asarray(x).view(UNSIGNED[bits // 8])
        wide = values.astype(np.uint64)
        kept = np.where(first < 64, wide >> np.minimum(first, 63).astype(np.uint64), np.uint64(0))
        ones = np.where(
            count >= 64,
            ~np.uint64(0),
            (np.uint64(1) << np.minimum(count, 63).astype(np.uint64)) - np.uint64(1),
        )
        kept = kept & ones
        if kind[0] == "s":
            last = np.minimum(first + count - 1, bits - 1)
            sign = (wide >> np.maximum(last, 0).astype(np.uint64)) & np.uint64(1)
            kept = np.where((sign == 1) & (count > 0), kept | ~ones, kept)
            # Bits past the end of the value repeat its sign.
            past = (first + count > bits) & (sign == 1) & (count > 0)
            real = np.where(first < bits, np.maximum(bits - first, 0), 0).astype(np.uint64)
            kept = np.where(past, kept | (~np.uint64(0) << np.minimum(real, np.uint64(63))), kept)
        write(kept.astype(UNSIGNED[bits // 8]).view(DTYPES[kind]), mask)

    return run


@instruction("bfi")
def insert_bits(machine: Machine, statement: Instruction) -> Closure:
    kind = _type(statement)
    bits = 8 * bytes_of(kind)
    a, b = (machine.source(arg, kind) for arg in statement.args[1:3])
    start, length = (machine.source(arg, "u32") for arg in statement.args[3:5])
    write = machine.target(statement.args[0], kind)

    def run(mask: Mask) -> None:
        first = np.asarray(start).astype(np.uint64) & np.uint64(255)
        count = np.minimum(np.asarray(length).astype(np.uint64) & np.uint64(255), np.uint64(bits))
        ones = np.where(
            count >= 64, ~np.uint64(0), (np.uint64(1) << np.minimum(count, np.uint64(63))) - np.uint64(1)
        )
        field = np.where(first < bits, ones << np.minimum(first, np.uint64(63)), np.uint64(0))
        moved = np.where(
            first < bits, np.asarray(a).astype(np.uint64) << np.minimum(first, np.uint64(63)), np.uint64(0)
        )
        result = (np.asarray(b).astype(np.uint64) & ~field) | (moved & field)
        write(result.astype(DTYPES[kind]), mask)

    return run


@instruction("popc", "clz", "brev", "bfind", "ffs")
def count_bits(machine: Machine, statement: Instruction) -> Closure:
    kind = _type(statement)
    size = bytes_of(kind)
    x = machine.source(statement.args[1], f"b{8 * size}")
    write = machine.target(statement.args[0], kind if statement.op == "brev" else "u32")

    def run(mask: Mask) -> None:
        values = np.atleast_1d(np.asarray(x))
        big = np.ascontiguousarray(values).astype(f">u{size}").view(np.uint8).reshape(values.size, size)
        bits = np.unpackbits(big, axis=1)
        if statement.op == "popc":
            write(bits.sum(1).astype(np.uint32), mask)
        elif statement.op == "brev":
            packed = np.ascontiguousarray(np.packbits(bits[:, ::-1].copy(), axis=1))
            write(packed.view(f">u{size}")[:, 0].astype(UNSIGNED[size]), mask)
        else:
            if statement.op == "bfind" and kind[0] == "s":
                bits = np.where(bits[:, :1] == 1, 1 - bits, bits)
            zeros = np.where(bits.any(1), bits.argmax(1), 8 * size)
            if statement.op == "bfind" and "shiftamt" not in statement.mods:
                zeros = 8 * size - 1 - zeros
            write(zeros.astype(np.int64).astype(np.uint32), mask)

    return run
