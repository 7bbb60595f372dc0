"""Instructions by which the threads of a warp exchange values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.syntax import Instruction, Operand, Pair
from ptx.table import MOVED, Closure, Mask, instruction
from ptx.types import DTYPES

if TYPE_CHECKING:
    from ptx.machine import Machine


def collective(
    machine: Machine,
    statement: Instruction,
    members: Operand | None,
    body: Callable[[Mask], None],
    width: int = 32,
    following: int | None = None,
) -> Closure:
    """A closure that runs ``body`` once all threads that must take part are here.

    Args:
        members: the operand with the mask of lanes that take part; all if ``None``.
        width: threads that must be together, 32 or 128.
        following: the statement to go on with, if it is not the next.
    """
    lane_bits = machine.source(members, "u32") if members is not None else None
    if lane_bits is not None and np.ndim(lane_bits) == 0 and int(lane_bits) == 0xFFFFFFFF:
        lane_bits = None
    lane = machine.lane
    behind = statement.index + 1 if following is None else following

    def run(mask: Mask) -> int | None:
        if mask is True:
            body(True)
            return following
        wanted = None if lane_bits is None else (lane_bits >> lane & np.uint32(1)) == 1
        if lane_bits is not None and np.ndim(lane_bits):
            # The lanes' own operand; those that are not here yet may not have it.
            first = np.where(mask, lane_bits, 0).reshape(-1, 32).max(1)
            wanted = (np.repeat(first, 32) >> lane & np.uint32(1)) == 1
        ready = machine.gather(mask, statement.index, width, behind, wanted)
        if ready is None:
            return MOVED
        body(ready)
        return following if ready is mask else MOVED

    return run


@instruction("shfl.sync")
def shuffle(machine: Machine, statement: Instruction) -> Closure:
    mode = statement.mods[1]
    target = statement.args[0]
    value_to, predicate_to = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    source = machine.source(statement.args[1], "b32")
    distance, clamp = (machine.source(arg, "u32") for arg in statement.args[2:4])
    write = machine.target(value_to, "b32")
    write_predicate = machine.target(predicate_to, "pred") if predicate_to is not None else None
    lane, base = machine.lane.astype(np.int64), np.arange(machine.threads) // 32 * 32

    def body(mask: Mask) -> None:
        b = np.asarray(distance).astype(np.int64) & 31
        c = np.asarray(clamp).astype(np.int64)
        segment, limit = c >> 8 & 31, c & 31
        highest = (lane & segment) | (limit & ~segment)
        lowest = lane & segment
        if mode == "up":
            place = lane - b
            inside = place >= highest
        elif mode == "down":
            place = lane + b
            inside = place <= highest
        elif mode == "bfly":
            place = lane ^ b
            inside = place <= highest
        else:
            place = lowest | (b & ~segment)
            inside = place <= highest
        place = np.where(inside, place, lane)
        values = np.broadcast_to(source, (machine.threads,))[base + place]
        write(values, mask)
        if write_predicate is not None:
            write_predicate(inside, mask)

    return collective(machine, statement, statement.args[4], body)


@instruction("elect.sync")
def elect(machine: Machine, statement: Instruction) -> Closure:
    target = statement.args[0]
    assert isinstance(target, Pair)
    write, write_predicate = machine.target(target.first, "u32"), machine.target(target.second, "pred")

    def body(mask: Mask) -> None:
        here = np.broadcast_to(np.asarray(mask), (machine.threads,)).reshape(-1, 32)
        leader = np.repeat(here.argmax(1), 32).astype(np.uint32)
        write(leader, mask)
        write_predicate(machine.lane == leader, mask)

    return collective(machine, statement, statement.args[1], body)


@instruction("activemask")
def active_mask(machine: Machine, statement: Instruction) -> Closure:
    write = machine.target(statement.args[0], "b32")

    def run(mask: Mask) -> None:
        write(_ballot(machine, np.broadcast_to(np.asarray(mask), (machine.threads,))), mask)

    return run


def _ballot(machine: Machine, bits: Any) -> Any:
    """The bits of a warp as a number, for each of its threads."""
    weights = np.uint32(1) << np.arange(32, dtype=np.uint32)
    totals = (bits.reshape(-1, 32) * weights).sum(1, dtype=np.uint32)
    return np.repeat(totals, 32)


@instruction("vote.sync")
def vote(machine: Machine, statement: Instruction) -> Closure:
    mode = statement.mods[1]
    predicate = machine.predicate(statement.args[1])
    write = machine.target(statement.args[0], "b32" if mode == "ballot" else "pred")

    def body(mask: Mask) -> None:
        here = np.broadcast_to(np.asarray(mask), (machine.threads,))
        true = here & predicate()
        if mode == "ballot":
            write(_ballot(machine, true), mask)
            return
        some, every = true.reshape(-1, 32).any(1), (true | ~here).reshape(-1, 32).all(1)
        result = {"any": some, "all": every, "uni": every | ~some}[mode]
        write(np.repeat(result, 32), mask)

    return collective(machine, statement, statement.args[2], body)


@instruction("match.any.sync", "match.all.sync")
def match(machine: Machine, statement: Instruction) -> Closure:
    kind, every = statement.mods[-1], statement.mods[0] == "all"
    target = statement.args[0]
    value_to, predicate_to = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    source, write = machine.source(statement.args[1], kind), machine.target(value_to, "b32")
    write_predicate = machine.target(predicate_to, "pred") if predicate_to is not None else None

    def body(mask: Mask) -> None:
        values = np.broadcast_to(source, (machine.threads,)).reshape(-1, 32)
        here = np.broadcast_to(np.asarray(mask), (machine.threads,)).reshape(-1, 32)
        equal = (values[:, :, None] == values[:, None, :]) & here[:, None, :]
        weights = np.uint32(1) << np.arange(32, dtype=np.uint32)
        bits = (equal * weights).sum(2, dtype=np.uint32).ravel()
        if every:
            same = (equal | ~here[:, None, :]).all(2).ravel()
            bits = np.where(same, bits, np.uint32(0))
            if write_predicate is not None:
                write_predicate(same, mask)
        write(bits, mask)

    return collective(machine, statement, statement.args[2], body)


@instruction("redux.sync")
def reduce_warp(machine: Machine, statement: Instruction) -> Closure:
    operation, kind = statement.mods[1], statement.mods[-1]
    functions: dict[str, Any] = {
        "add": np.add,
        "min": np.fmin if kind == "f32" else np.minimum,
        "max": np.fmax if kind == "f32" else np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    function = functions[operation]
    source, write = machine.source(statement.args[1], kind), machine.target(statement.args[0], kind)
    dtype = np.dtype(DTYPES[kind])
    if operation in ("min", "max"):
        limits: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
        neutral = limits.max if operation == "min" else limits.min
    else:
        neutral = -1 if operation == "and" else 0
    neutral_value = np.array(neutral, np.int64 if dtype.kind != "f" else dtype).astype(dtype)

    def body(mask: Mask) -> None:
        here = np.broadcast_to(np.asarray(mask), (machine.threads,))
        values = np.where(here, source, neutral_value).reshape(-1, 32)
        write(np.repeat(function.reduce(values, axis=1, dtype=dtype), 32), mask)

    return collective(machine, statement, statement.args[2], body)
