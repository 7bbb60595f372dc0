"""A PTX program as data: operands, instructions, variables."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Register:
    """A register after scoping: a class of registers of one width, and a row of its file."""

    name: str
    type: str
    row: int


@dataclass(frozen=True)
class Special:
    """A read-only register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A variable, parameter or label, by name, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Immediate:
    """A literal as written."""

    text: str


@dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """``a|b``, two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """``!p``."""

    predicate: Operand


@dataclass(frozen=True)
class Address:
    """``[base + offset]``, or ``[base, {coordinates}]`` for tensors."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Sink:
    """``_``, a destination that is thrown away."""


Operand = Register | Special | Symbol | Immediate | Vector | Pair | Not | Address | Sink


@dataclass(frozen=True)
class Instruction:
    """One statement.

    Args:
        index: its place in the program.
        line: of the PTX text, from 1.
        text: as written, on one line.
        op: the first part of the opcode, such as ``"cp"``.
        mods: the other parts, such as ``("async", "cg", "shared", "global")``.
        args: the operands.
        guard: the predicate in front, if any.
        negated: whether it is ``@!``.
        span: where it starts and ends in the PTX text.
    """

    index: int
    line: int
    text: str
    op: str
    mods: tuple[str, ...]
    args: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    span: tuple[int, int]

    @property
    def opcode(self) -> str:
        return ".".join((self.op, *self.mods))

    @property
    def where(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass(frozen=True)
class Variable:
    """A module or function variable: state space, bytes (0 if ``extern`` leaves it open), alignment, contents."""

    name: str
    space: str
    size: int
    align: int
    data: bytes = b""
    extern: bool = False


@dataclass
class Program:
    """A parsed kernel."""

    entry: str
    params: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    target: str = ""

    @property
    def opcodes(self) -> set[str]:
        return {instruction.opcode for instruction in self.code}


def integer(text: str) -> int:
    """The value of an integer literal."""
    text = text.rstrip("U")
    if re.fullmatch(r"-?0[0-7]+", text):
        return int(text, 8)
    return int(text, 0)
