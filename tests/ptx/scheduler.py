"""Which threads run next: all in lockstep, or warps at random; and what happens when none can."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.table import AGAIN, ASLEEP, AT_BARRIER, AT_CLUSTER_BARRIER, DONE, MOVED, RUNNING, Mask

if TYPE_CHECKING:
    from ptx.machine import Machine

_NEVER = 1 << 60
_RUN = 200
"""Jumps after which a group of threads that spins lets others run."""

_BUDGETS = (2, 20, 200, 2000)
"""Statements that a random group may run before the next choice: short ones interleave, long ones run ahead."""


class Deadlock(RuntimeError):
    """No thread can go on; the message says where each warp stands."""


class Scheduler:
    """Runs the threads of a machine until all have exited.

    Threads of a warp reconverge by running those at the smallest program counter first. In lockstep the same rule
    holds for all warps together. With a random generator, a warp chosen at random runs for a random while, together
    with some of those at the same place.
    """

    def __init__(self, machine: Machine, max_steps: int) -> None:
        self.machine, self.max_steps = machine, max_steps
        self.steps = 0
        self.timeouts = 0

    def run(self) -> None:
        """Until every thread has exited.

        Raises:
            Deadlock: threads wait for what nobody will do.
        """
        machine = self.machine
        spun: Mask | None = None
        while True:
            live = machine.state == RUNNING
            if not np.count_nonzero(live):
                if (machine.state == DONE).all():
                    break
                self._idle()
                continue
            if machine.rng is not None:
                self._stir()
            waits_turn = live if spun is None else live & ~spun
            pc, mask, stop, budget = self._choose(waits_turn if np.count_nonzero(waits_turn) else live, live)
            spun = self._run_group(pc, mask, stop, budget)
        for unit in machine.units.values():
            unit.finish()

    def _run_group(self, pc: int, mask: Mask, stop: int, budget: int) -> Mask | None:
        """Runs threads at ``pc`` until they part, meet others at ``stop``, wait, or use up their budget; those that
        spent it all in loops are returned."""
        machine, code, counts = self.machine, self.machine.code, self.machine.counts
        warps = machine.warps if mask is True else int(mask.reshape(-1, 32).any(1).sum())
        left, steps, random = budget, 0, machine.rng is not None
        try:
            while pc < stop and left > 0:
                counts[pc] += warps
                steps += 1
                machine.index = pc
                result = code[pc](mask)
                if random:
                    left -= 1
                if result is None:
                    pc += 1
                elif result >= 0:
                    left -= result <= pc
                    pc = result
                elif result == MOVED:
                    return None
                else:
                    assert result == AGAIN
                    machine.pc[mask] = pc + 1
                    return None
        except Exception as error:
            raise _located(error, machine.program.code[pc].where) from error
        finally:
            self.steps += steps
        machine.pc[mask] = pc
        if self.steps > self.max_steps:
            raise Deadlock(f"still running after {self.steps} steps\n{self._places()}")
        return mask if left <= 0 and not random else None

    def _choose(self, candidates: Any, live: Any) -> tuple[int, Mask, int, int]:
        """Program counter and mask of the threads to run, where to stop, and for how long at most."""
        machine = self.machine
        pc = machine.pc
        if machine.rng is None:
            place = int(pc[candidates].min())
            mask = candidates & (pc == place)
            others = live & ~mask
            later = pc[others & (pc > place)]
            stop = int(later.min()) if later.size else _NEVER
            count = np.count_nonzero(mask)
            return place, True if count == machine.threads else mask, stop, _RUN
        rng = machine.rng
        places = np.where(candidates, pc, _NEVER).reshape(-1, 32).min(1)
        ready = (places < _NEVER).nonzero()[0]
        place = int(places[ready[rng.integers(ready.size)]])
        same = places == place
        if rng.random() < 0.5:
            same &= rng.random(machine.warps) < 0.5
            if not same.any():
                same[ready[(places[ready] == place).argmax()]] = True
        here = np.repeat(same, 32)
        mask = candidates & here & (pc == place)
        later = pc[live & here & ~mask & (pc > place)]
        stop = int(later.min()) if later.size else _NEVER
        count = np.count_nonzero(mask)
        budget = _BUDGETS[rng.integers(len(_BUDGETS))]
        return place, True if count == machine.threads else mask, stop, budget

    def _stir(self) -> None:
        """Lets asynchronous work in flight end at a random time."""
        rng = self.machine.rng
        assert rng is not None
        if self.machine.late is None and rng.random() < 0.1:
            for unit in self.machine.units.values():
                unit.advance(rng)

    def _idle(self) -> None:
        """Every thread waits: ends a piece of asynchronous work, or lets waits time out; else this is a deadlock."""
        machine = self.machine
        if any(unit.advance(machine.rng) for unit in machine.units.values()):
            self.timeouts = 0
            return
        asleep = machine.state == ASLEEP
        barriers = machine.units.get("Barriers")
        # A try_wait may give up after a while: a kernel may count on that once, when it only looks ahead.
        if asleep.any() and barriers is not None and barriers.time_out(asleep):
            return
        raise Deadlock(f"every thread waits and nothing is in flight\n{self._places()}")

    def _places(self) -> str:
        """Where each warp stands and what it waits for."""
        machine = self.machine
        kinds = (
            "runs",
            "has exited",
            "waits at a barrier",
            "waits for an mbarrier",
            "waits for its other threads",
            "waits for its cluster",
        )
        lines: Counter[str] = Counter()
        warps: dict[str, list[int]] = {}
        for warp in range(machine.warps):
            part = slice(32 * warp, 32 * warp + 32)
            seen = sorted(set(zip(machine.pc[part].tolist(), machine.state[part].tolist(), strict=True)))
            for pc, state in seen:
                if state == DONE:
                    continue
                # Threads at a barrier have their counter behind it.
                statement = machine.program.code[pc - 1 if state in (AT_BARRIER, AT_CLUSTER_BARRIER) else pc]
                lanes = int(((machine.pc[part] == pc) & (machine.state[part] == state)).sum())
                text = f"{kinds[state]} at {statement.where}" + ("" if lanes == 32 else f" ({lanes} threads)")
                lines[text] += 1
                warps.setdefault(text, []).append(warp)
        return "\n".join(f"  warps {_ranges(warps[text])}: {text}" for text in lines)


def _located(error: Exception, where: str) -> Exception:
    """``error`` with the statement's text in its message."""
    message = f"{error} — {where}"
    try:
        return type(error)(message)
    except Exception:
        return RuntimeError(message)


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
