"""Kernels with one fault put in, to show that a test would notice."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dmuon.kernels.gpu.binary import Binary
from ptx.program import parse
from ptx.syntax import Instruction


@dataclass(frozen=True)
class Mutant:
    """A binary with one statement changed.

    Args:
        kind: a key of :data:`KINDS`.
        line: of the PTX.
        before: the statement as it was.
        after: as it is now; empty if it was dropped.
        binary: to run.
    """

    kind: str
    line: int
    before: str
    after: str
    binary: Binary

    def __str__(self) -> str:
        return f"{self.kind}, line {self.line}: {self.before} → {self.after or '(dropped)'}"


Edit = Callable[[Instruction], "str | None"]
"""The statement's replacement, ``""`` to drop it, or ``None`` if the mutation does not apply to it."""


def _drop(*opcodes: str) -> Edit:
    def edit(statement: Instruction) -> str | None:
        return "" if any(f"{statement.opcode}.".startswith(f"{opcode}.") for opcode in opcodes) else None

    return edit


def _ready(statement: Instruction) -> str | None:
    """A wait for an mbarrier that does not wait."""
    if statement.op != "mbarrier" or statement.mods[0] not in ("try_wait", "test_wait"):
        return None
    target = re.search(r"b64\s+([\w%$]+)\s*,", statement.text)
    assert target, statement.text
    return f"setp.eq.u32 {target.group(1)}, 0, 0"


_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
_BOUNDARY = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}


def _comparison(changes: dict[str, str]) -> Edit:
    def edit(statement: Instruction) -> str | None:
        changed = changes.get(statement.mods[0]) if statement.op == "setp" else None
        return statement.text.replace(f"setp.{statement.mods[0]}", f"setp.{changed}", 1) if changed else None

    return edit


def _guard(statement: Instruction) -> str | None:
    if statement.guard is None:
        return None
    text = statement.text
    return text.replace("@!", "@", 1) if statement.negated else text.replace("@", "@!", 1)


def _descriptor(change: str) -> Edit:
    """A wgmma with ``change`` made to the descriptor of its last shared operand."""

    def edit(statement: Instruction) -> str | None:
        if not statement.opcode.startswith("wgmma.mma_async"):
            return None
        operands = re.search(
            r"\},\s*((?:\{[^}]*\}|[\w%$]+)\s*,\s*)?([\w%$]+)\s*,\s*([\w%$]+)\s*(,|$)", statement.text
        )
        assert operands, statement.text
        # Accumulators, A, B, scale: B is last but one of what was matched.
        name = operands.group(2)
        start, end = operands.span(2)
        changed = f"{statement.text[:start]}%mutant{statement.text[end:]}"
        return f"{{ .reg .b64 %mutant; {change.format(name)}; {changed}; }}"

    return edit


def _offset(*opcodes: str) -> Edit:
    """A shared address 16 bytes further on."""

    def edit(statement: Instruction) -> str | None:
        if _drop(*opcodes)(statement) is None:
            return None
        return re.sub(
            r"\[([\w%$]+)(?:\+(-?\d+))?\]",
            lambda m: f"[{m.group(1)}+{int(m.group(2) or 0) + 16}]",
            statement.text,
            count=1,
        )

    return edit


def _unfilled(statement: Instruction) -> str | None:
    """A cp.async that copies its full size wherever it is."""
    if statement.op != "cp" or statement.mods[1:2] not in (("ca",), ("cg",)) or len(statement.args) < 4:
        return None
    return statement.text.rsplit(",", 1)[0]


KINDS: dict[str, Edit] = {
    "barrier": _drop("bar.sync", "barrier.sync"),
    "cluster barrier": _drop("barrier.cluster.wait"),
    "copy wait": _drop("cp.async.wait_group", "cp.async.wait_all"),
    "copy commit": _drop("cp.async.commit_group"),
    "bulk wait": _drop("cp.async.bulk.wait_group"),
    "wgmma wait": _drop("wgmma.wait_group"),
    "wgmma fence": _drop("wgmma.fence"),
    "proxy fence": _drop("fence.proxy.async"),
    "mbarrier wait": _ready,
    "mbarrier arrive": _drop("mbarrier.arrive"),
    "comparison": _comparison(_OPPOSITE),
    "boundary": _comparison(_BOUNDARY),
    "guard": _guard,
    "descriptor address": _descriptor("add.s64 %mutant, {}, 2"),
    "descriptor stride": _descriptor("xor.b64 %mutant, {}, 68719476736"),
    "descriptor swizzle": _descriptor("xor.b64 %mutant, {}, 0x4000000000000000"),
    "ldmatrix address": _offset("ldmatrix"),
    "stmatrix address": _offset("stmatrix"),
    "zero fill": _unfilled,
}
"""What can be changed."""

SYNCHRONISATION = (
    "barrier",
    "cluster barrier",
    "copy wait",
    "copy commit",
    "bulk wait",
    "wgmma wait",
    "wgmma fence",
    "proxy fence",
    "mbarrier wait",
    "mbarrier arrive",
)
"""The kinds that drop a wait, a fence or an arrival."""


def mutants(binary: Binary, *kinds: str) -> Iterator[Mutant]:
    """Every single change of ``kinds`` (all if none is named) that applies to a statement of ``binary``."""
    text = binary.ptx.replace("\0", " ")
    for kind in kinds or KINDS:
        for statement in parse(binary.ptx).code:
            after = KINDS[kind](statement)
            if after is None:
                continue
            start, end = statement.span
            changed = replace(binary, ptx=text[:start] + after + text[end:])
            yield Mutant(kind, statement.line, statement.text, after, changed)


def survivors(
    binary: Binary, check: Callable[[Binary], None], *kinds: str, every: int = 1, offset: int = 0
) -> list[Mutant]:
    """The mutants that ``check`` does not notice, by raising an exception.

    Args:
        binary: must pass ``check``.
        check: runs a binary on fresh tensors, under several seeds, and compares.
        kinds: as for :func:`mutants`.
        every: take one of so many, beginning with number ``offset``.
    """
    check(binary)
    lived = []
    for place, mutant in enumerate(mutants(binary, *kinds)):
        if place % every != offset % every:
            continue
        try:
            check(mutant.binary)
        except Exception:  # Whatever went wrong was noticed.
            continue
        lived.append(mutant)
    return lived
