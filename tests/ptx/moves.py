"""Moves, selections, comparisons and conversions of addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.floats import decode
from ptx.memory import Shared
from ptx.operands import GENERIC_LOCAL, GENERIC_SHARED, WINDOW
from ptx.syntax import Instruction, Pair, Register, Vector
from ptx.table import Closure, Mask, instruction
from ptx.types import DTYPES, UNSIGNED, bytes_of

if TYPE_CHECKING:
    from ptx.machine import Machine


@instruction("mov")
def move(machine: Machine, statement: Instruction) -> Closure:
    kind = statement.mods[-1]
    target, value = statement.args
    if isinstance(value, Vector):
        return _pack(machine, kind, target, value)
    if isinstance(target, Vector):
        return _unpack(machine, kind, target, value)
    if kind == "pred":
        x, row = machine.predicate(value), machine.row(target)

        def run_predicate(mask: Mask) -> None:
            np.copyto(row, x(), where=mask)

        return run_predicate
    bits = f"b{8 * bytes_of(kind)}"
    source, write = (
        machine.source(value, kind if kind[0] == "f" else bits),
        machine.target(target, kind if kind[0] == "f" else bits),
    )
    exact = machine.exact_row(target, bits)
    if exact is not None and isinstance(value, Register):
        source = machine.source(value, bits)

        def run_copy(mask: Mask) -> None:
            np.copyto(exact, source, where=mask)

        return run_copy

    def run(mask: Mask) -> None:
        write(source, mask)

    return run


def _pack(machine: Machine, kind: str, target: Any, value: Vector) -> Closure:
    size = bytes_of(kind) // len(value.items)
    sources = [machine.source(item, f"b{8 * size}") for item in value.items]
    write = machine.target(target, kind)
    scratch = np.empty((machine.threads, len(sources)), UNSIGNED[size])
    packed = scratch.view(DTYPES[kind])[:, 0]

    def run(mask: Mask) -> None:
        for place, source in enumerate(sources):
            scratch[:, place] = source
        write(packed, mask)

    return run


def _unpack(machine: Machine, kind: str, target: Vector, value: Any) -> Closure:
    size = bytes_of(kind) // len(target.items)
    source = machine.source(value, kind)
    writes = [machine.target(item, f"b{8 * size}") for item in target.items]

    def run(mask: Mask) -> None:
        whole = np.array(np.broadcast_to(source, (machine.threads,)))
        parts = whole.view(UNSIGNED[size]).reshape(machine.threads, -1)
        for place, write in enumerate(writes):
            write(parts[:, place], mask)

    return run


@instruction("selp")
def select(machine: Machine, statement: Instruction) -> Closure:
    kind = statement.mods[-1]
    x, y = (machine.source(arg, kind) for arg in statement.args[1:3])
    chosen, write = machine.predicate(statement.args[3]), machine.target(statement.args[0], kind)

    def run(mask: Mask) -> None:
        write(np.where(chosen(), x, y), mask)

    return run


_COMPARE: dict[str, Any] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_COMBINE: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(name: str, floating: bool) -> Callable[[Any, Any], Any]:
    """A comparison by its PTX name; for floats, those on ``nan`` and the unordered ones too."""
    if floating and name in ("num", "nan"):
        return lambda x, y: (np.isnan(x) | np.isnan(y)) == (name == "nan")
    if floating and name[-1] == "u" and name[:-1] in _COMPARE:
        ordered = _COMPARE[name[:-1]]
        return lambda x, y: ordered(x, y) | np.isnan(x) | np.isnan(y)
    if floating and name == "ne":
        return lambda x, y: (x != y) & ~(np.isnan(x) | np.isnan(y))
    return _COMPARE[name]  # type: ignore[no-any-return]


def set_predicates(machine: Machine, statement: Instruction, operation: Any, sources: list[Any]) -> Closure:
    """setp with an optional second destination and an optional predicate combined in."""
    combine = next((_COMBINE[mod] for mod in statement.mods[1:-1] if mod in _COMBINE), None)
    other = machine.predicate(statement.args[3]) if combine is not None else None
    target = statement.args[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    write = machine.target(first, "pred")
    write_second = machine.target(second, "pred") if second is not None else None
    x, y = sources
    row = machine.row(first) if isinstance(first, Register) else None
    if combine is None and write_second is None and row is not None and isinstance(operation, np.ufunc):

        def run_simple(mask: Mask) -> None:
            operation(x, y, out=row, where=mask)

        return run_simple

    def run(mask: Mask) -> None:
        result = operation(x, y)
        inverse = ~result
        if combine is not None and other is not None:
            extra = np.array(other())
            result, inverse = combine(result, extra), combine(inverse, extra)
        write(result, mask)
        if write_second is not None:
            write_second(inverse, mask)

    return run


def _half_comparison(machine: Machine, statement: Instruction) -> Closure:
    """setp on half types: one predicate, or one of each half."""
    kind = statement.mods[-1]
    compare = comparison(statement.mods[0], True)
    x, y = (machine.source(arg, kind) for arg in statement.args[1:3])
    if not kind.endswith("x2"):
        return set_predicates(
            machine, statement, lambda a, b: compare(decode(a, kind), decode(b, kind)), [x, y]
        )
    first, second = statement.args[0].first, statement.args[0].second  # type: ignore[union-attr]
    writes = machine.target(first, "pred"), machine.target(second, "pred")

    def run(mask: Mask) -> None:
        result = np.broadcast_to(compare(decode(x, kind), decode(y, kind)), (machine.threads, 2))
        for place, write in enumerate(writes):
            write(result[:, place], mask)

    return run


@instruction("setp")
def set_predicate(machine: Machine, statement: Instruction) -> Closure:
    kind = statement.mods[-1]
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return _half_comparison(machine, statement)
    operation = comparison(statement.mods[0], kind[0] == "f")
    sources = [machine.source(arg, kind) for arg in statement.args[1:3]]
    return set_predicates(machine, statement, operation, sources)


@instruction("cvta")
def convert_address(machine: Machine, statement: Instruction) -> Closure:
    space = next(mod.split("::")[0] for mod in statement.mods if mod != "to" and not mod.startswith("u"))
    base = {"shared": GENERIC_SHARED, "local": GENERIC_LOCAL}.get(space, 0)
    source, write = machine.source(statement.args[1], "s64"), machine.target(statement.args[0], "s64")
    # A parameter's symbol already is a generic address.
    shift = np.int64(-base if "to" in statement.mods else base)

    def run(mask: Mask) -> None:
        write(source + shift, mask)

    return run


@instruction("isspacep")
def is_space(machine: Machine, statement: Instruction) -> Closure:
    window = {"global": 0, "shared": 1, "local": 2, "param": 3}[statement.mods[0].split("::")[0]]
    source, write = machine.source(statement.args[1], "s64"), machine.target(statement.args[0], "pred")

    def run(mask: Mask) -> None:
        write((source >> np.int64(WINDOW)) == window, mask)

    return run


@instruction("mapa")
def map_address(machine: Machine, statement: Instruction) -> Closure:
    """The address of a shared variable in another block of the cluster."""
    kind = f"s{statement.mods[-1][1:]}"
    symbol, rank = machine.source(statement.args[1], kind), machine.source(statement.args[2], "u32")
    write = machine.target(statement.args[0], kind)
    base = 0 if "shared::cluster" in statement.mods else GENERIC_SHARED

    def run(mask: Mask) -> None:
        inside = (np.asarray(symbol).astype(np.int64) - base) & ((1 << Shared.RANK_SHIFT) - 1)
        moved = inside + (np.asarray(rank).astype(np.int64) << Shared.RANK_SHIFT) + base
        write(moved.astype(DTYPES[kind]), mask)

    return run


@instruction("getctarank")
def rank_of_address(machine: Machine, statement: Instruction) -> Closure:
    source, write = (
        machine.source(statement.args[1], "s64" if statement.mods[-1] == "u64" else "s32"),
        machine.target(statement.args[0], "u32"),
    )

    def run(mask: Mask) -> None:
        write(
            ((np.asarray(source).astype(np.int64) & 0xFFFFFFFF) >> Shared.RANK_SHIFT).astype(np.uint32), mask
        )

    return run
