"""cp.async of sm_80: copies that end when their group is waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.syntax import Immediate, Instruction, integer
from ptx.table import Closure, Mask, instruction

if TYPE_CHECKING:
    from ptx.machine import Machine

_FOREVER = 1 << 60


@dataclass
class _Copy:
    """One statement's copies: of these threads, from these global addresses to these shared ones."""

    lanes: Any
    group: Any
    source: Any
    target: Any
    size: int
    read: Any
    landed: bool = False


class Copies:
    """All copies in flight; each thread numbers its groups."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.reset()

    def reset(self) -> None:
        self.pending: list[_Copy] = []
        self.open = np.zeros(self.machine.threads, np.int64)

    def issue(self, copy: _Copy) -> None:
        self._write(copy, slice(None))
        if not self.machine.postponed():
            self._land(copy, slice(None))
            copy.landed = True
        self.pending.append(copy)

    def complete(self, limit: Any) -> None:
        """Ends the copies of groups below each thread's ``limit``."""
        kept = []
        for copy in self.pending:
            over = copy.group < limit[copy.lanes]
            count = np.count_nonzero(over)
            if count:
                self._end(copy, slice(None) if count == over.size else over)
            if count < over.size:
                rest = ~over
                kept.append(
                    _Copy(
                        copy.lanes[rest],
                        copy.group[rest],
                        copy.source[rest],
                        copy.target[rest],
                        copy.size,
                        copy.read[rest],
                        copy.landed,
                    )
                )
        self.pending = kept

    def _end(self, copy: _Copy, part: Any) -> None:
        """Whenever it landed, nobody may count on it before now."""
        if copy.landed:
            self._write(copy, part)
        else:
            self._land(copy, part)

    def _write(self, copy: _Copy, part: Any) -> None:
        """Notes the write without doing it."""
        machine, lanes = self.machine, copy.lanes[part]
        blocks, places = machine.shared_places(copy.target[part], lanes, copy.size, "cp.async")
        machine.history.write(blocks, places * copy.size, copy.size, lanes)

    def _land(self, copy: _Copy, part: Any) -> None:
        machine, size = self.machine, copy.size
        lanes, read = copy.lanes[part], copy.read[part]
        source, target = copy.source[part], copy.target[part]
        full = read == size
        if np.count_nonzero(full) == full.size:
            values = machine.load("global", source, lanes, size, "cp.async")
        else:
            data = np.zeros((lanes.size, size), np.uint8)
            if full.any():
                data[full] = (
                    machine.load("global", source[full], lanes[full], size, "cp.async")
                    .view(np.uint8)
                    .reshape(-1, size)
                )
            # Parts of a line are read byte by byte: what is past them may be out of bounds.
            for place in ((read > 0) & ~full).nonzero()[0].tolist():
                count = int(read[place])
                data[place, :count] = machine.load(
                    "global", source[place] + np.arange(count), lanes[place : place + 1], 1, "cp.async"
                )
            values = data.view({4: np.uint32, 8: np.uint64, 16: np.complex128}[size])[:, 0]
        machine.store("shared", target, lanes, values, size, "cp.async")

    def advance(self, rng: Any) -> bool:
        """Copies end at waits only; nobody waits for them asleep."""
        if rng is not None and self.pending and rng.random() < 0.5:
            copy = self.pending[int(rng.integers(len(self.pending)))]
            if not copy.landed:
                self._land(copy, slice(None))
                copy.landed = True
        return False

    def finish(self) -> None:
        self.complete(np.full(self.machine.threads, _FOREVER))


@instruction("cp.async")
def copy_async(machine: Machine, statement: Instruction) -> Closure:
    if statement.mods[1] not in ("ca", "cg"):
        raise NotImplementedError(statement.opcode)
    copies: Copies = machine.unit(Copies)
    target, source = (machine.address(arg) for arg in statement.args[:2])
    assert isinstance(statement.args[2], Immediate)
    size = integer(statement.args[2].text)
    given = None
    ignore = None
    for extra in statement.args[3:]:
        if getattr(extra, "type", None) == "pred":
            ignore = machine.predicate(extra)
        elif "cache_hint" not in statement.opcode or extra is not statement.args[-1]:
            given = machine.source(extra, "u32")

    def run(mask: Mask) -> None:
        lanes = np.arange(machine.threads) if mask is True else mask.nonzero()[0]
        if given is None:
            read = np.full(lanes.size, size)
        else:
            read = np.broadcast_to(given, (machine.threads,))[lanes].astype(np.int64)
            if read.max() > size:
                raise RuntimeError(f"cp.async of {int(read.max())} bytes into {size}")
        if ignore is not None:
            read = np.where(ignore()[lanes], 0, read)
        copies.issue(_Copy(lanes, copies.open[lanes], source(lanes), target(lanes), size, read))

    return run


@instruction("cp.async.commit_group")
def commit(machine: Machine, statement: Instruction) -> Closure:
    copies: Copies = machine.unit(Copies)

    def run(mask: Mask) -> None:
        copies.open[mask] += 1

    return run


@instruction("cp.async.wait_group", "cp.async.wait_all")
def wait(machine: Machine, statement: Instruction) -> Closure:
    copies: Copies = machine.unit(Copies)
    everything = statement.mods[1] == "wait_all"
    left = 0 if everything else int(machine.source(statement.args[0], "s32"))

    def run(mask: Mask) -> None:
        if everything:
            copies.open[mask] += 1
        limit = np.where(mask, copies.open - left, 0)
        copies.complete(limit)

    return run
