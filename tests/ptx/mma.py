"""mma.sync: the matrix instructions of a warp."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.syntax import Instruction, Register, Vector
from ptx.table import Closure, Mask, instruction
from ptx.warp import collective

if TYPE_CHECKING:
    from ptx.machine import Machine


def decode_pairs(registers: Any, kind: str) -> Any:
    """32-bit registers as fp32 values, with a last axis of two for 16-bit types and of one for tf32."""
    bits = np.ascontiguousarray(registers)
    if kind == "bf16":
        both = np.empty((*bits.shape, 2), np.uint32)
        np.left_shift(bits, np.uint32(16), out=both[..., 0])
        np.bitwise_and(bits, np.uint32(0xFFFF0000), out=both[..., 1])
        return both.view(np.float32)
    if kind == "f16":
        return bits.view(np.float16).reshape(*bits.shape, 2).astype(np.float32)
    if kind == "tf32":
        # Tensor cores ignore the lower 13 bits.
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    raise NotImplementedError(f"matrix operands of type {kind}")


class Fragments:
    """How the matrices of one ``mma`` shape lie in the registers of a warp.

    Lane l = 4g + t holds rows g and g + 8, and in each group of columns those at t. Registers of A alternate
    between the two halves of rows first, then between groups of columns; those of B walk down the rows.
    """

    def __init__(self, shape: str, kind: str) -> None:
        found = re.fullmatch(r"m16n8k(\d+)", shape)
        if not found:
            raise NotImplementedError(f"mma shape {shape}")
        self.k, self.kind = int(found.group(1)), kind
        self.per_register = 1 if kind == "tf32" else 2
        self.group = 4 * self.per_register
        self.a_count, self.b_count = 2 * self.k // self.group, self.k // self.group

    def a(self, registers: Any) -> Any:
        """(registers, warps, 32) → (warps, 16, k)."""
        pairs = decode_pairs(registers, self.kind)
        count, warps = registers.shape[:2]
        # register = (column group, row half), lane = (row, column pair)
        x = pairs.reshape(count // 2, 2, warps, 8, self.group)
        return x.transpose(2, 1, 3, 0, 4).reshape(warps, 16, self.k)

    def b(self, registers: Any) -> Any:
        """(registers, warps, 32) → (warps, k, 8)."""
        pairs = decode_pairs(registers, self.kind)
        count, warps = registers.shape[:2]
        x = pairs.reshape(count, warps, 8, self.group)
        return x.transpose(1, 0, 3, 2).reshape(warps, self.k, 8)


def load_accumulators(registers: Any, kind: str) -> Any:
    """(registers, warps, 32) → (warps, 16, 8) in fp32."""
    if kind == "f16":
        count, warps = registers.shape[:2]
        values = decode_pairs(registers, "f16").reshape(count, warps, 8, 8)
        return values.transpose(1, 0, 2, 3).reshape(warps, 16, 8)
    values = registers.view(np.float32)
    warps = registers.shape[1]
    x = values.reshape(2, 2, warps, 8, 4)
    # register = (row half, column of a pair), lane = (row, pair)
    return x.transpose(2, 0, 3, 4, 1).reshape(warps, 16, 8)


def store_accumulators(values: Any, kind: str) -> Any:
    """The reverse of :func:`load_accumulators`: (registers, warps, 32) of 32-bit registers."""
    warps = values.shape[0]
    if kind == "f16":
        x = np.ascontiguousarray(values.astype(np.float16).reshape(warps, 2, 8, 8).transpose(1, 0, 2, 3))
        return x.view(np.uint32).reshape(2, warps, 32)
    x = values.reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    return np.ascontiguousarray(x).view(np.uint32).reshape(4, warps, 32)


def registers_of(machine: Machine, operand: Any) -> list[int]:
    """Rows of the 32-bit register file that a vector operand names."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    rows = []
    for item in items:
        if not isinstance(item, Register) or item.type != "b32":
            raise NotImplementedError(f"matrix operand {item}")
        rows.append(item.row)
    return rows


class MultiplyRun:
    """Consecutive multiplications that do not depend on each other, as one.

    Where they combine each of some A with each of some B, as the inner loop of a product does, they are one larger
    product for each warp.
    """

    def __init__(self, machine: Machine, statements: list[Instruction]) -> None:
        first = statements[0]
        shape = next((mod for mod in first.mods if mod.startswith("m")), "")
        self.d_kind, a_kind, b_kind, self.c_kind = first.mods[-4:]
        if a_kind != b_kind or {self.d_kind, self.c_kind} - {"f32", "f16"} or "row" not in first.mods:
            raise NotImplementedError(first.opcode)
        self.machine, self.statements, self.opcode = machine, statements, first.opcode
        self.fragments = Fragments(shape, a_kind)
        d, a, b, c = ([tuple(registers_of(machine, s.args[place])) for s in statements] for place in range(4))
        self.a_rows, self.a_of = _distinct(a)
        self.b_rows, self.b_of = _distinct(b)
        self.c_rows, self.d_rows = np.array(c).T, np.array(d).T
        self.grid = len(self.a_rows.T) * len(self.b_rows.T) == len(statements)

    def __call__(self, mask: Mask) -> None:
        file, count, k = self.machine.files["b32"], len(self.statements), self.fragments.k
        x = file.reshape(len(file), -1, 32)
        part = slice(None) if mask is True else mask.reshape(-1, 32)[:, 0].nonzero()[0]
        a, b, c = (_rows(x, rows, part) for rows in (self.a_rows, self.b_rows, self.c_rows))
        warps = c.shape[1] // count
        left = self.fragments.a(a).reshape(-1, warps, 16, k)
        right = self.fragments.b(b).reshape(-1, warps, k, 8)
        if self.grid and count > 1:
            tall = left.transpose(1, 0, 2, 3).reshape(warps, -1, k)
            wide = right.transpose(1, 2, 0, 3).reshape(warps, k, -1)
            blocks = np.matmul(tall, wide).reshape(warps, len(left), 16, len(right), 8)
            product = blocks.transpose(1, 3, 0, 2, 4)[self.a_of, self.b_of].reshape(-1, 16, 8)
        else:
            product = np.matmul(left[self.a_of], right[self.b_of]).reshape(-1, 16, 8)
        product += load_accumulators(c, self.c_kind)
        result = store_accumulators(product, self.d_kind).reshape(*self.d_rows.shape, warps, 32)
        if mask is True:
            x[self.d_rows] = result
        else:
            x[self.d_rows[..., None], part] = result
        report, counts = self.machine.report, self.machine.counts
        report.flops += 2 * 16 * 8 * k * warps * count
        report.mma[self.opcode] += warps * count
        for statement in self.statements[1:]:
            counts[statement.index] += warps


def _rows(x: Any, rows: Any, part: Any) -> Any:
    """Registers (place, operand) of the warps of ``part``, as (place, operand · warp, 32)."""
    found = x[rows] if isinstance(part, slice) else x[rows[..., None], part]
    return found.reshape(len(rows), -1, 32)


def _distinct(operands: list[tuple[int, ...]]) -> tuple[Any, Any]:
    """The different operands as columns of rows, and which of them each is."""
    different = list(dict.fromkeys(operands))
    return np.array(different).T, np.array([different.index(operand) for operand in operands])


@instruction("mma.sync")
def multiply(machine: Machine, statement: Instruction) -> Closure:
    """D = A·B + C in fp32; accumulators of type f16 are rounded at the end."""
    return collective(machine, statement, None, MultiplyRun(machine, [statement]))
