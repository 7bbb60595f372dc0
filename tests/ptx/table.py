"""The instruction table: what each opcode does, as a function that turns a statement into a closure.

A *handler* is called once for each statement, with the machine and the statement. It returns a closure that runs the
statement for the threads of a mask — ``True`` for all threads of the machine, else a boolean for each — and returns

* ``None`` to go on with the next statement,
* a place in the program, to go there,
* :data:`AGAIN` to let the scheduler choose anew, or
* :data:`MOVED` if it has set the threads' program counters itself (branches that diverge, barriers, exits).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ptx.machine import Machine
    from ptx.syntax import Instruction

# What a thread is doing.
RUNNING, DONE, AT_BARRIER, ASLEEP, HELD, AT_CLUSTER_BARRIER = range(6)

Mask = Any
"""``True``, or one bool for each thread."""

Closure = Callable[[Mask], "int | None"]
Handler = Callable[["Machine", "Instruction"], Closure]

AGAIN = -2
MOVED = -1

HANDLERS: dict[str, Handler] = {}
"""By opcode, or by its first parts: ``cp.async.bulk`` wins over ``cp.async``."""


def instruction(*opcodes: str) -> Callable[[Handler], Handler]:
    """Registers a handler for opcodes that begin with ``opcodes`` (whole parts)."""

    def register(handler: Handler) -> Handler:
        for opcode in opcodes:
            assert opcode not in HANDLERS, opcode
            HANDLERS[opcode] = handler
        return handler

    return register


@cache
def handler_of(opcode: str) -> Handler | None:
    """The handler with the longest opcode that this one begins with."""
    parts = opcode.split(".")
    for count in range(len(parts), 0, -1):
        found = HANDLERS.get(".".join(parts[:count]))
        if found is not None:
            return found
    return None


def close(machine: Machine, statement: Instruction) -> Closure:
    """The closure of a statement, its guard included. One that is not understood raises when it is run."""
    handler = handler_of(statement.opcode)
    try:
        if handler is None:
            raise NotImplementedError(f"no instruction {statement.opcode}")
        closure = handler(machine, statement)
    except NotImplementedError as error:
        return _not_implemented(str(error))
    if statement.guard is None:
        return closure
    return _guarded(machine, statement, closure)


def _not_implemented(message: str) -> Closure:
    def run(mask: Mask) -> int | None:
        raise NotImplementedError(message)

    return run


def _guarded(machine: Machine, statement: Instruction, closure: Closure) -> Closure:
    predicate = machine.row(statement.guard)
    negated, following, threads = statement.negated, statement.index + 1, machine.threads
    scratch = np.empty(threads, np.bool_)

    def run(mask: Mask) -> int | None:
        if negated:
            np.greater(mask, predicate, out=scratch)
        else:
            np.logical_and(mask, predicate, out=scratch)
        count = np.count_nonzero(scratch)
        if count == 0:
            return None
        if count == threads:
            return closure(True)
        chosen = scratch.copy()
        result = closure(chosen)
        if result is None or result == AGAIN:
            return result
        rest = np.logical_not(chosen) if mask is True else np.greater(mask, chosen)
        if result >= 0:
            if not np.count_nonzero(rest):
                return result
            machine.pc[chosen] = result
        machine.pc[rest] = following
        return MOVED

    return run


def lanes_of(mask: Mask) -> slice | NDArray[np.intp]:
    """An index of the threads of a mask."""
    return slice(None) if mask is True else mask.nonzero()[0]
