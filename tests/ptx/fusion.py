"""Runs of statements that one closure does faster than many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptx.mma import MultiplyRun
from ptx.syntax import Instruction, Register, Vector
from ptx.warp import collective

if TYPE_CHECKING:
    from ptx.machine import Machine

_LONGEST = 64


def fuse(machine: Machine) -> None:
    """Replaces the closures of runs of ``mma.sync`` that do not read each other's results.

    Nothing can jump into a run, and threads that enter it leave it together, so that its inner statements are never
    reached alone.
    """
    code = machine.program.code
    targets = set(machine.program.labels.values())
    start = 0
    while start < len(code):
        if not _can_start(code[start]):
            start += 1
            continue
        end, written = start + 1, _registers(code[start], slice(0, 1))
        while (
            end < len(code)
            and end - start < _LONGEST
            and end not in targets
            and _can_start(code[end])
            and code[end].opcode == code[start].opcode
            and not written & _registers(code[end], slice(None))
        ):
            written |= _registers(code[end], slice(0, 1))
            end += 1
        if end - start > 1:
            try:
                run = MultiplyRun(machine, code[start:end])
            except NotImplementedError:
                pass
            else:
                machine.code[start] = collective(machine, code[start], None, run, following=end)
        start = end


def _can_start(statement: Instruction) -> bool:
    return statement.op == "mma" and statement.guard is None


def _registers(statement: Instruction, part: slice) -> set[str]:
    """The registers that some of the operands name."""
    return {
        item.name
        for operand in statement.args[part]
        for item in (operand.items if isinstance(operand, Vector) else (operand,))
        if isinstance(item, Register)
    }
