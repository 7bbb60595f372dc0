"""Loads, stores, atomics, and the matrix loads and stores of a warp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.floats import decode, encode
from ptx.spaces import space_of
from ptx.syntax import Address, Instruction, Operand, Symbol, Vector
from ptx.table import Closure, Mask, instruction, lanes_of
from ptx.types import DTYPES, UNSIGNED, bytes_of
from ptx.warp import collective

if TYPE_CHECKING:
    from ptx.machine import Machine


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


@instruction("ld", "ldu")
def load(machine: Machine, statement: Instruction) -> Closure:
    kind, space = statement.mods[-1], space_of(statement)
    targets = _items(statement.args[0])
    if space == "param" and _names_parameter(machine, statement.args[1]):
        return _load_parameter(machine, statement, kind, targets)
    size, count = bytes_of(kind), len(targets)
    address = machine.address(statement.args[1])
    writes = [machine.target(target, kind) for target in targets]
    what, threads = f"ld.{space}", machine.threads
    # At most 16 bytes move at a time: wider vectors in several goes.
    chunk = min(size * count, 16)
    per_chunk, chunks = chunk // size, size * count // chunk

    def run(mask: Mask) -> None:
        lanes = lanes_of(mask)
        places = address(lanes)
        for k in range(chunks):
            found = machine.load(space, places + k * chunk if k else places, lanes, chunk, what)
            parts = found.view(DTYPES[kind]).reshape(-1, per_chunk)
            for j in range(per_chunk):
                write = writes[k * per_chunk + j]
                if mask is True:
                    write(parts[:, j], True)
                else:
                    spread = np.empty(threads, parts.dtype)
                    spread[lanes] = parts[:, j]
                    write(spread, mask)

    return run


def _names_parameter(machine: Machine, operand: Operand) -> bool:
    assert isinstance(operand, Address)
    return isinstance(operand.base, Symbol) and operand.base.name in machine.offsets


def _load_parameter(
    machine: Machine, statement: Instruction, kind: str, targets: tuple[Operand, ...]
) -> Closure:
    """Parameters are known before the kernel runs."""
    address = statement.args[1]
    assert isinstance(address, Address) and isinstance(address.base, Symbol)
    start, size = machine.offsets[address.base.name] + address.base.offset + address.offset, bytes_of(kind)
    if start + size * len(targets) > len(machine.params):
        raise NotImplementedError("a parameter read past its end")
    values = (
        np.frombuffer(machine.params, np.uint8)[start : start + size * len(targets)].copy().view(DTYPES[kind])
    )
    writes = [machine.target(target, kind) for target in targets]

    def run(mask: Mask) -> None:
        for write, value in zip(writes, values, strict=True):
            write(value, mask)

    return run


@instruction("st")
def store(machine: Machine, statement: Instruction) -> Closure:
    if "async" in statement.mods:
        raise NotImplementedError(statement.opcode)
    kind, space = statement.mods[-1], space_of(statement)
    sources = [machine.source(item, kind) for item in _items(statement.args[1])]
    size, count = bytes_of(kind), len(sources)
    address = machine.address(statement.args[0])
    what, threads = f"st.{space}", machine.threads
    chunk = min(size * count, 16)
    per_chunk, chunks = chunk // size, size * count // chunk
    scratch = np.empty((chunks, threads, per_chunk), DTYPES[kind])
    packed = scratch.reshape(chunks, threads, per_chunk).view(_CHUNKS[chunk])[..., 0]

    def run(mask: Mask) -> None:
        lanes = lanes_of(mask)
        places = address(lanes)
        for k in range(chunks):
            for j in range(per_chunk):
                scratch[k, :, j] = sources[k * per_chunk + j]
            machine.store(space, places + k * chunk if k else places, lanes, packed[k][lanes], chunk, what)

    return run


_CHUNKS: dict[int, Any] = {**UNSIGNED, 16: np.complex128}

_OPERATIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("atom", "red")
def atomic(machine: Machine, statement: Instruction) -> Closure:
    """Atomics one thread after the other, in a random order if scheduling is random."""
    if "async" in statement.mods:
        raise NotImplementedError(statement.opcode)
    kind, space = statement.mods[-1], space_of(statement)
    operation = next(m for m in statement.mods if m in {*_OPERATIONS, "exch", "cas", "inc", "dec"})
    args = list(statement.args)
    targets = _items(args.pop(0)) if statement.op == "atom" else ()
    address = machine.address(args.pop(0))
    operands = [[machine.source(item, kind) for item in _items(arg)] for arg in args]
    writes = [machine.target(target, kind) for target in targets]
    size, count = bytes_of(kind), len(operands[0])

    def run(mask: Mask) -> None:
        lanes = np.arange(machine.threads) if mask is True else mask.nonzero()[0]
        order = lanes if machine.rng is None else machine.rng.permutation(lanes)
        places = address(slice(None))
        inputs = [[np.broadcast_to(s, (machine.threads,)) for s in sources] for sources in operands]
        old = np.zeros((count, machine.threads), DTYPES[kind])
        for lane in order.tolist():
            one = np.array([lane])
            for k in range(count):
                where = places[one] + k * size
                before = machine.load(space, where, one, size, statement.opcode).view(DTYPES[kind])
                old[k, lane] = before[0]
                after = _update(operation, kind, before, [values[k][one] for values in inputs])
                machine.store(space, where, one, after.view(UNSIGNED[size]), size, statement.opcode)
        for place, write in enumerate(writes):
            write(old[place], mask)

    return run


def _update(operation: str, kind: str, before: Any, values: list[Any]) -> Any:
    """What an atomic leaves in memory."""
    value = values[0]
    if operation == "exch":
        return value
    if operation == "cas":
        return np.where(before == value, values[1], before)
    if operation == "inc":
        return np.where(before >= value, np.zeros_like(before), before + before.dtype.type(1))
    if operation == "dec":
        return np.where((before == 0) | (before > value), value, before - before.dtype.type(1))
    function = _OPERATIONS[operation]
    if "f" in kind:
        return np.ascontiguousarray(encode(function(decode(before, kind), decode(value, kind)), kind))
    return function(before, value)


@instruction("ldmatrix")
def load_matrices(machine: Machine, statement: Instruction) -> Closure:
    """8×8 matrices of 16 bits: row r of matrix i is at the address of lane 8i + r."""
    if statement.mods[-1] != "b16" or "m8n8" not in statement.mods:
        raise NotImplementedError(statement.opcode)
    targets, transposed = _items(statement.args[0]), "trans" in statement.mods
    address, count = machine.address(statement.args[1]), len(_items(statement.args[0]))
    rows = [machine.row(target) for target in targets]
    sources = machine.lane < 8 * count

    def body(mask: Mask) -> None:
        given = sources if mask is True else mask & sources
        (lanes,) = given.nonzero()
        found = machine.load("shared", address(lanes), lanes, 16, "ldmatrix")
        matrices = found.view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            matrices = np.ascontiguousarray(matrices.transpose(0, 1, 3, 2))
        # Lane l holds elements 2(l % 4) and the next of row l // 4.
        fragments = matrices.view(np.uint32).reshape(-1, count, 32)
        if mask is True:
            for place, row in enumerate(rows):
                row.reshape(-1, 32)[:] = fragments[:, place]
        else:
            for place, row in enumerate(rows):
                row[mask] = fragments[:, place].ravel()

    return collective(machine, statement, None, body)


@instruction("stmatrix")
def store_matrices(machine: Machine, statement: Instruction) -> Closure:
    """The reverse of ldmatrix."""
    if statement.mods[-1] != "b16" or "m8n8" not in statement.mods:
        raise NotImplementedError(statement.opcode)
    values, transposed = _items(statement.args[1]), "trans" in statement.mods
    address, count = machine.address(statement.args[0]), len(values)
    rows = [machine.row(value) for value in values]
    sources = machine.lane < 8 * count

    def body(mask: Mask) -> None:
        given = sources if mask is True else mask & sources
        (lanes,) = given.nonzero()
        chosen = [row if mask is True else row[mask] for row in rows]
        fragments = np.stack(chosen).reshape(count, -1, 32).transpose(1, 0, 2)
        matrices = np.ascontiguousarray(fragments).view(np.uint16).reshape(-1, 8, 8)
        if transposed:
            matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
        chunks = matrices.reshape(-1, 8).view(np.complex128)[:, 0]
        machine.store("shared", address(lanes), lanes, chunks, 16, "stmatrix")

    return collective(machine, statement, None, body)


@instruction("movmatrix")
def transpose_matrix(machine: Machine, statement: Instruction) -> Closure:
    source, target = machine.row(statement.args[1]), machine.row(statement.args[0])

    def body(mask: Mask) -> None:
        matrices = source.view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
        moved = np.ascontiguousarray(matrices).reshape(-1, 64).view(np.uint32).ravel()
        np.copyto(target, moved, where=mask)

    return collective(machine, statement, None, body)
