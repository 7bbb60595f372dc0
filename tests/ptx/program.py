"""Reads the text of a PTX module."""

from __future__ import annotations

import re
from functools import lru_cache

from ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Not,
    Operand,
    Pair,
    Program,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
    integer,
)
from ptx.types import bytes_of

_SIZES = {"pred": "pred", 1: "b8", 2: "b16", 4: "b32", 8: "b64", 16: "b128"}
_DECLARED = re.compile(
    r"(?P<linkage>(?:\.(?:extern|visible|weak|common)\s+)*)\.(?P<space>shared|global|const|local)\s+"
    r"(?:\.attribute\([^)]*\)\s+)?(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?P<name>[\w$]+)(?P<dims>(?:\[\d*\])*)\s*(?:=\s*(?P<init>.*))?$",
    re.DOTALL,
)
_STATEMENT = re.compile(
    r"(?:@(?P<neg>!?)(?P<guard>[\w$%]+)\s+)?(?P<op>[a-z][\w.:]*(?:\s+\.[\w.:]+)*)(?:\s+(?P<args>.*))?$",
    re.DOTALL,
)
_DEBUG = re.compile(r"\.(?:loc|file)\s")
_PIECE = re.compile(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+")
_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*):(?!:)")


@lru_cache(maxsize=16)
def parse(ptx: str) -> Program:
    """The program of the only kernel in ``ptx``.

    Raises:
        ValueError: there is not exactly one kernel, or a statement cannot be read; the message has its line.
    """
    text = _without_comments(ptx.replace("\0", " "))
    found = list(re.finditer(r"\.entry\s+([\w$]+)\s*(\((.*?)\))?[^{;]*\{", text, re.DOTALL))
    if len(found) != 1:
        raise ValueError(f"expected one kernel in the PTX, found {[m.group(1) for m in found]}")
    (head,) = found
    program = Program(head.group(1))
    target = re.search(r"\.target\s+(\w+)", text)
    program.target = target.group(1) if target else ""
    _module_variables(text[: head.start()], program)
    for index, param in enumerate(
        re.findall(r"\.param\s[^,]*?([\w$]+)(?:\[\d+\])?\s*(?:,|$)", head.group(3) or "")
    ):
        program.params[param] = index
    _Body(program).read(text, head.end())
    _link_labels(program)
    return program


def _without_comments(text: str) -> str:
    """``text`` with comments blanked: everything else stays where it is."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", lambda m: re.sub(r"[^\n]", " ", m.group(0)), text, flags=re.DOTALL)


def _module_variables(text: str, program: Program) -> None:
    for statement in text.split(";"):
        start = re.search(r"(\.(extern|visible|weak|common)\s+)*\.(shared|global|const)\s", statement)
        if start:
            _declare(statement[start.start() :].strip(), program)


def _declare(text: str, program: Program, rename: str | None = None) -> None:
    found = _DECLARED.match(text)
    if not found:
        raise ValueError(f"cannot read the declaration {text!r}")
    unit = bytes_of(found["type"])
    dims = re.findall(r"\[(\d*)\]", found["dims"])
    size = unit
    for dim in dims:
        size *= int(dim or 0)
    name = rename or found["name"]
    align = int(found["align"] or unit)
    extern = "extern" in found["linkage"] and "" in dims
    program.variables[name] = Variable(name, found["space"], size, align, _data(found["init"], unit), extern)


def _data(init: str | None, unit: int) -> bytes:
    if not init:
        return b""
    values = [v for v in re.split(r"[\s{},]+", init) if v]
    return b"".join((integer(v) & ((1 << 8 * unit) - 1)).to_bytes(unit, "little") for v in values)


class _Scope:
    """What is declared between two braces: registers and variables, and the unique names of labels."""

    def __init__(self) -> None:
        self.names: dict[str, Operand] = {}
        self.labels: dict[str, str] = {}


class _Body:
    """Reads the statements of a kernel, keeping track of nested scopes and lines."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scopes: list[_Scope] = [_Scope()]
        self.fresh = 0

    def read(self, text: str, start: int) -> None:
        position, line = start, text.count("\n", 0, start) + 1
        while True:
            skipped = re.compile(r"\s*").match(text, position)
            assert skipped
            line += skipped.group(0).count("\n")
            position = skipped.end()
            if text[position] == "{":
                self._open(text, position)
                position += 1
            elif text[position] == "}":
                self.scopes.pop()
                position += 1
                if not self.scopes:
                    return
            elif text[position] == ";":
                position += 1
            elif label := _LABEL.match(text, position):
                self.program.labels[self._label(label.group(1))] = len(self.program.code)
                position = label.end()
            else:
                # A line of debug information (.loc, .file) has no semicolon.
                ends = "\n" if _DEBUG.match(text, position) else ";"
                end = text.index(ends, position)
                statement = text[position:end]
                self._statement(" ".join(statement.split()), line, (position, end))
                line += statement.count("\n")
                position = end + (ends == ";")

    def _open(self, text: str, position: int) -> None:
        """A new scope; its labels are known before they are defined, since branches go forward too."""
        scope = _Scope()
        depth, end = 0, position
        for brace in re.compile(r"[{}]").finditer(text, position):
            depth += 1 if brace.group(0) == "{" else -1
            if depth == 0:
                end = brace.start()
                break
        for label in re.findall(r"(?:^|[;{}\n])\s*([A-Za-z_$][\w$]*):(?!:)", text[position:end]):
            if not label.startswith("$L__"):
                self.fresh += 1
                scope.labels.setdefault(label, f"{label}@{self.fresh}")
        self.scopes.append(scope)

    def _label(self, name: str) -> str:
        return next((scope.labels[name] for scope in reversed(self.scopes) if name in scope.labels), name)

    def _statement(self, text: str, line: int, span: tuple[int, int]) -> None:
        if text.startswith(".reg"):
            self._registers(text)
        elif text.startswith((".shared", ".local", ".const", ".global")):
            self._variable(text)
        elif text.startswith(".branchtargets"):
            label = list(self.program.labels)[-1]
            self.program.tables[label] = tuple(self._label(t) for t in re.findall(r"[\w$]+", text)[1:])
        elif not text.startswith((".pragma", ".callprototype")) and not _DEBUG.match(text):
            self._instruction(text, line, span)

    def _registers(self, text: str) -> None:
        found = re.match(r"\.reg\s+(?:\.v\d\s+)?\.(\w+)\s+(.*)$", text)
        assert found, text
        kind = "pred" if found.group(1) == "pred" else _SIZES[bytes_of(found.group(1))]
        for name in re.split(r"\s*,\s*", found.group(2)):
            many = re.match(r"([\w$%]+)<(\d+)>", name)
            if many:
                # A range may be declared in a scope that is opened twice: its names then share rows, which is
                # harmless since scopes never run interleaved within a thread.
                for k in range(int(many.group(2))):
                    self._register(f"{many.group(1)}{k}", kind)
            else:
                self._register(name, kind)

    def _register(self, name: str, kind: str) -> None:
        unique = name
        if len(self.scopes) > 1:
            self.fresh += 1
            unique = f"{name}@{self.fresh}"
        row = self.program.registers.get(kind, 0)
        self.program.registers[kind] = row + 1
        self.scopes[-1].names[name] = Register(unique, kind, row)

    def _variable(self, text: str) -> None:
        found = _DECLARED.match(text)
        assert found, text
        self.fresh += len(self.scopes) > 1
        name = found["name"] if len(self.scopes) == 1 else f"{found['name']}@{self.fresh}"
        self.scopes[-1].names[found["name"]] = Symbol(name)
        _declare(text, self.program, name)

    def _instruction(self, text: str, line: int, span: tuple[int, int]) -> None:
        found = _STATEMENT.match(text)
        if not found:
            raise ValueError(f"line {line}: cannot read {text!r}")
        # Compilers may put spaces before a part of the opcode.
        op, *mods = re.sub(r"\s", "", found["op"]).split(".")
        args = tuple(self._operand(arg) for arg in _split(found["args"] or ""))
        guard = self._operand(found["guard"]) if found["guard"] else None
        assert guard is None or isinstance(guard, Register), text
        index = len(self.program.code)
        self.program.code.append(
            Instruction(index, line, text, op, tuple(mods), args, guard, found["neg"] == "!", span)
        )

    def _operand(self, text: str) -> Operand:
        for scope in reversed(self.scopes):
            if text in scope.names:
                return scope.names[text]
        if text.startswith("{"):
            return Vector(tuple(self._operand(item) for item in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text[1:-1].strip())
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip()), self._operand(second.strip()))
        if text.startswith("!"):
            return Not(self._operand(text[1:].strip()))
        if text == "_":
            return Sink()
        if text.startswith("%"):
            return Special(text)
        if re.match(r"-?\d", text):
            return Immediate(text)
        symbol = re.match(r"([A-Za-z_$][\w$]*)(?:\s*\+\s*(-?\w+))?$", text)
        if not symbol:
            raise ValueError(f"cannot read the operand {text!r}")
        return Symbol(self._label(symbol.group(1)), integer(symbol.group(2) or "0"))

    def _address(self, text: str) -> Address:
        parts = _split(text)
        base = re.match(r"([\w$%.]+)(?:\s*([+-])\s*(-?\w+))?$", parts[0])
        if not base:
            raise ValueError(f"cannot read the address {text!r}")
        offset = integer(base.group(3) or "0") * (-1 if base.group(2) == "-" else 1)
        coordinates = self._operand(parts[1]) if len(parts) > 1 else Vector(())
        items = coordinates.items if isinstance(coordinates, Vector) else (coordinates,)
        return Address(self._operand(base.group(1)), offset, items)


def _split(text: str) -> list[str]:
    """``text`` at its commas that are not within brackets."""
    return [piece.strip() for piece in _PIECE.findall(text) if piece.strip()]


def _link_labels(program: Program) -> None:
    missing = {
        arg.name
        for instruction in program.code
        if instruction.op == "bra"
        for arg in instruction.args
        if isinstance(arg, Symbol) and arg.name not in program.labels
    }
    if missing:
        raise ValueError(f"branches to labels that are nowhere: {sorted(missing)}")
