"""mbarriers: counted phases in shared memory that copies and threads arrive at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.copies import Copies
from ptx.history import union
from ptx.syntax import Instruction, Pair, Sink
from ptx.table import AGAIN, ASLEEP, MOVED, RUNNING, Closure, Mask, instruction

if TYPE_CHECKING:
    from ptx.machine import Machine


@dataclass
class MBarrier:
    """The state of one barrier: arrivals per phase, those and the bytes still missing, completed phases."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0
    actor: int = -1
    gathering: Any = None
    published: Any = None


class Barriers:
    """All mbarriers of the resident blocks, by block and offset."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.reset()

    def reset(self) -> None:
        self.all: dict[tuple[int, int], MBarrier] = {}
        # Threads whose wait timed out since anything last happened.
        self.given_up: dict[tuple[int, int], int] = {}
        self.expired = np.zeros(self.machine.threads, np.bool_)

    def at(self, block: int, offset: int) -> MBarrier:
        barrier = self.all.get((block, offset))
        if barrier is None:
            raise RuntimeError(f"shared address {offset:#x} of block {block} holds no initialised mbarrier")
        return barrier

    def places(self, addresses: Any, lanes: Any) -> tuple[Any, Any]:
        blocks, places = self.machine.shared_places(addresses, lanes, 8, "mbarrier")
        return blocks, places * 8

    def arrive(self, barrier: MBarrier, count: int, warps: Any, relaxed: bool = False) -> bool:
        """Whether the phase ended."""
        if barrier.pending < count:
            raise RuntimeError(f"{count} arrivals at an mbarrier that expects {barrier.pending} more")
        if self.machine.history.active and not relaxed:
            barrier.gathering = union(barrier.gathering, self.machine.history.publish(warps))
        barrier.pending -= count
        return self.settle(barrier)

    def complete_bytes(self, block: int, offset: int, count: int) -> bool:
        barrier = self.at(block, offset)
        barrier.bytes -= count
        return self.settle(barrier)

    def settle(self, barrier: MBarrier) -> bool:
        """Ends the phase if nothing is missing; then threads that sleep look again."""
        if barrier.pending or barrier.bytes:
            return False
        barrier.phase += 1
        barrier.pending = barrier.count
        barrier.published, barrier.gathering = union(barrier.published, barrier.gathering), None
        if barrier.actor >= 0:
            # The bytes of all phases so far are there.
            reached = np.zeros(barrier.actor + 1, np.int32)
            reached[barrier.actor] = barrier.phase
            barrier.published = union(barrier.published, reached)
        machine = self.machine
        machine.state[machine.state == ASLEEP] = RUNNING
        self.given_up.clear()
        return True

    def time_out(self, asleep: Any) -> bool:
        """Lets every waiting thread's try_wait return false; ``False`` if they have all been through that."""
        pcs = self.machine.pc
        lanes = asleep.nonzero()[0]
        keys = [(lane, int(pcs[lane])) for lane in lanes.tolist()]
        if all(self.given_up.get(key, 0) >= 2 for key in keys):
            return False
        for key in keys:
            self.given_up[key] = self.given_up.get(key, 0) + 1
        self.expired[lanes] = True
        self.machine.state[lanes] = RUNNING
        return True

    def advance(self, rng: Any) -> bool:
        return False

    def finish(self) -> None:
        return


def _flat(machine: Machine, value: Any, lanes: Any) -> Any:
    return np.broadcast_to(value, (machine.threads,))[lanes]


@instruction("mbarrier.init")
def init(machine: Machine, statement: Instruction) -> Closure:
    barriers: Barriers = machine.unit(Barriers)
    address, count = machine.address(statement.args[0]), machine.source(statement.args[1], "u32")

    def run(mask: Mask) -> None:
        lanes = np.arange(machine.threads) if mask is True else mask.nonzero()[0]
        blocks, offsets = barriers.places(address(lanes), lanes)
        for block, offset, number in zip(
            blocks.tolist(), offsets.tolist(), _flat(machine, count, lanes).tolist(), strict=True
        ):
            barriers.all[block, offset] = MBarrier(number, number)

    return run


@instruction("mbarrier.inval")
def invalidate(machine: Machine, statement: Instruction) -> Closure:
    barriers: Barriers = machine.unit(Barriers)
    address = machine.address(statement.args[0])

    def run(mask: Mask) -> None:
        lanes = np.arange(machine.threads) if mask is True else mask.nonzero()[0]
        blocks, offsets = barriers.places(address(lanes), lanes)
        for block, offset in zip(blocks.tolist(), offsets.tolist(), strict=True):
            barriers.at(block, offset)
            del barriers.all[block, offset]

    return run


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def expect_bytes(machine: Machine, statement: Instruction) -> Closure:
    barriers: Barriers = machine.unit(Barriers)
    address, count = machine.address(statement.args[0]), machine.source(statement.args[1], "u32")
    sign = 1 if statement.mods[0] == "expect_tx" else -1

    def run(mask: Mask) -> int | None:
        lanes = np.arange(machine.threads) if mask is True else mask.nonzero()[0]
        blocks, offsets = barriers.places(address(lanes), lanes)
        woke = False
        for block, offset, number in zip(
            blocks.tolist(), offsets.tolist(), _flat(machine, count, lanes).tolist(), strict=True
        ):
            barrier = barriers.at(block, offset)
            barrier.bytes += sign * number
            woke |= sign < 0 and barriers.settle(barrier)
        return AGAIN if woke else None

    return run


@instruction("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(machine: Machine, statement: Instruction) -> Closure:
    barriers: Barriers = machine.unit(Barriers)
    args = list(statement.args)
    has_state = len(args) > 1 and not hasattr(args[0], "base")
    state = args.pop(0) if has_state else None
    address = machine.address(args.pop(0))
    count = machine.source(args[0], "u32") if args else np.uint32(1)
    relaxed = "relaxed" in statement.mods
    expects, drops = "expect_tx" in statement.mods, statement.mods[0] == "arrive_drop"
    write = machine.target(state, "b64") if state is not None and not isinstance(state, Sink) else None

    def run(mask: Mask) -> int | None:
        lanes = np.arange(machine.threads) if mask is True else mask.nonzero()[0]
        blocks, offsets = barriers.places(address(lanes), lanes)
        numbers = _flat(machine, count, lanes)
        states = np.zeros(machine.threads, np.uint64)
        woke = False
        for block, offset in set(zip(blocks.tolist(), offsets.tolist(), strict=True)):
            mine = (blocks == block) & (offsets == offset)
            barrier = barriers.at(block, offset)
            # The state is that of the phase arrived in.
            states[lanes[mine]] = barrier.phase
            if drops:
                barrier.count -= int(mine.sum())
            if expects:
                barrier.bytes += int(numbers[mine].sum())
            arrivals = int(mine.sum()) if expects else int(numbers[mine].sum())
            woke |= barriers.arrive(barrier, arrivals, np.unique(machine.warp[lanes[mine]]), relaxed)
        if write is not None:
            write(states, mask)
        return AGAIN if woke else None

    return run


@instruction("cp.async.mbarrier.arrive")
def arrive_after_copies(machine: Machine, statement: Instruction) -> Closure:
    """Arrives when the thread's copies so far have ended: here, ends them."""
    barriers: Barriers = machine.unit(Barriers)
    copies: Copies = machine.unit(Copies)
    address, increments = machine.address(statement.args[0]), "noinc" not in statement.mods

    def run(mask: Mask) -> int | None:
        lanes = np.arange(machine.threads) if mask is True else mask.nonzero()[0]
        copies.complete(np.where(mask, copies.open + 1, 0))
        blocks, offsets = barriers.places(address(lanes), lanes)
        woke = False
        for block, offset in set(zip(blocks.tolist(), offsets.tolist(), strict=True)):
            mine = (blocks == block) & (offsets == offset)
            barrier = barriers.at(block, offset)
            if increments:
                barrier.pending += int(mine.sum())
            woke |= barriers.arrive(barrier, int(mine.sum()), np.unique(machine.warp[lanes[mine]]))
        return AGAIN if woke else None

    return run


@instruction("mbarrier.test_wait", "mbarrier.try_wait")
def wait(machine: Machine, statement: Instruction) -> Closure:
    """test_wait looks once; try_wait sleeps until the phase is over, or until nothing else can happen."""
    barriers: Barriers = machine.unit(Barriers)
    target = statement.args[0]
    assert not isinstance(target, Pair)
    address = machine.address(statement.args[1])
    by_parity, sleeps = "parity" in statement.mods, statement.mods[0] == "try_wait"
    phase = machine.source(statement.args[2], "u32" if by_parity else "u64")
    write = machine.target(target, "pred")

    def run(mask: Mask) -> int | None:
        lanes = np.arange(machine.threads) if mask is True else mask.nonzero()[0]
        blocks, offsets = barriers.places(address(lanes), lanes)
        wanted = _flat(machine, phase, lanes).astype(np.int64)
        over = np.zeros(lanes.size, np.bool_)
        for block, offset in set(zip(blocks.tolist(), offsets.tolist(), strict=True)):
            mine = (blocks == block) & (offsets == offset)
            barrier = barriers.at(block, offset)
            # A parity names the current phase or the one before: the latter is over.
            over[mine] = (
                (barrier.phase & 1) != (wanted[mine] & 1) if by_parity else barrier.phase > wanted[mine]
            )
            passed = lanes[mine & over]
            if machine.history.active and passed.size:
                machine.history.learn(np.unique(machine.warp[passed]), barrier.published)
        spread = np.zeros(machine.threads, np.bool_)
        spread[lanes] = over
        if not sleeps or over.all():
            write(spread, mask)
            return None
        expired = lanes[~over & barriers.expired[lanes]]
        sleeping = lanes[~over & ~barriers.expired[lanes]]
        barriers.expired[expired] = False
        going = spread.copy()
        going[expired] = True
        write(spread, going)
        machine.pc[going] = statement.index + 1
        machine.pc[sleeping] = statement.index
        machine.state[sleeping] = ASLEEP
        return MOVED

    return run


@instruction("mbarrier.pending_count")
def pending_count(machine: Machine, statement: Instruction) -> Closure:
    raise NotImplementedError(statement.opcode)
