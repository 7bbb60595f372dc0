"""Branches, exits, block and cluster barriers, and statements that change nothing here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.history import union
from ptx.syntax import Instruction, Symbol
from ptx.table import (
    AGAIN,
    AT_BARRIER,
    AT_CLUSTER_BARRIER,
    DONE,
    MOVED,
    RUNNING,
    Closure,
    Mask,
    instruction,
    lanes_of,
)
from ptx.warp import collective

if TYPE_CHECKING:
    from ptx.machine import Machine


@instruction("bra")
def branch(machine: Machine, statement: Instruction) -> Closure:
    (label,) = statement.args
    assert isinstance(label, Symbol)
    target = machine.program.labels[label.name]
    return lambda mask: target


@instruction("brx.idx")
def branch_table(machine: Machine, statement: Instruction) -> Closure:
    index, table = machine.source(statement.args[0], "u32"), statement.args[1]
    assert isinstance(table, Symbol)
    targets = np.array([machine.program.labels[name] for name in machine.program.tables[table.name]])

    def run(mask: Mask) -> int:
        machine.pc[mask] = targets[index][mask]
        return MOVED

    return run


@instruction("ret", "exit")
def leave(machine: Machine, statement: Instruction) -> Closure:
    def run(mask: Mask) -> int:
        machine.pc[mask] = statement.index
        machine.state[mask] = DONE
        for block in np.unique(machine.block[mask]):
            for barrier in range(16):
                _release(machine, int(block), barrier, None)
        _release_clusters(machine)
        return MOVED

    return run


@instruction("trap")
def trap(machine: Machine, statement: Instruction) -> Closure:
    def run(mask: Mask) -> int | None:
        raise RuntimeError("the kernel ran into a trap")

    return run


@instruction(
    "pragma",
    "membar",
    "fence.acq_rel",
    "fence.sc",
    "fence.acquire",
    "fence.release",
    "fence.mbarrier_init",
    "fence.proxy.alias",
    "fence.proxy.tensormap",
    "fence.proxy.tensormap::generic",
    "fence.proxy.async::generic",
    "setmaxnreg",
    "prefetch",
    "prefetchu",
    "griddepcontrol",
    "nanosleep",
    "cp.async.bulk.prefetch",
    "applypriority",
    "discard",
    "createpolicy",
)
def nothing(machine: Machine, statement: Instruction) -> Closure:
    """Statements whose effect cannot be seen when memory is sequentially consistent and registers are plenty."""
    return lambda mask: None


@instruction("fence.proxy.async")
def fence_proxy(machine: Machine, statement: Instruction) -> Closure:
    if "global" in statement.mods:
        return lambda mask: None
    return lambda mask: machine.history.fence(mask)


# Barriers of a block. A barrier holds the number of threads that have arrived; a thread that waits for one has the
# barrier's number, and its program counter is behind the statement already.


@instruction(
    "bar.sync",
    "barrier.sync",
    "bar.arrive",
    "barrier.arrive",
    "bar.cta",
    "barrier.cta",
    "bar.red",
    "barrier.red",
)
def block_barrier(machine: Machine, statement: Instruction) -> Closure:
    action = next(mod for mod in statement.mods if mod in ("sync", "arrive", "red"))
    aligned = statement.op == "bar" or "aligned" in statement.mods
    args = statement.args[1:] if action == "red" else statement.args
    if action == "red":
        counted = 1 if len(args) == 2 else 2
        args = args[:counted]
    number = machine.source(args[0], "u32")
    count = machine.source(args[1], "u32") if len(args) > 1 else None
    result = _Reduction(machine, statement) if action == "red" else None

    def run(mask: Mask) -> int:
        if aligned and not machine.whole_warps(mask):
            raise RuntimeError("an aligned barrier reached by a part of a warp")
        lanes = np.arange(machine.threads) if mask is True else mask.nonzero()[0]
        numbers = np.broadcast_to(number, (machine.threads,))[lanes].astype(np.int64)
        machine.pc[lanes] = statement.index + 1
        machine.report.barriers += -(-lanes.size // 32)
        if action != "arrive":
            machine.state[lanes] = AT_BARRIER
            machine.barrier[lanes] = numbers
        if result is not None:
            result.contribute(lanes)
        keys = machine.block[lanes] * 16 + numbers
        for key in np.unique(keys).tolist():
            block, barrier = divmod(key, 16)
            mine = lanes[keys == key]
            machine.arrived[block, barrier] += mine.size
            if machine.history.active:
                known = machine.history.publish(np.unique(machine.warp[mine]))
                machine.barrier_known[key] = union(machine.barrier_known.get(key), known)
            expected = None if count is None else int(np.broadcast_to(count, (machine.threads,))[mine[0]])
            if expected is not None and expected % 32:
                raise RuntimeError(f"a barrier for {expected} threads, which is no multiple of 32")
            machine.expected[block, barrier] = 0 if expected is None else expected
            _release(machine, block, barrier, result)
        return MOVED

    return run


def _release(machine: Machine, block: int, barrier: int, result: Any) -> None:
    """Lets the threads at a barrier go if enough have arrived."""
    arrived = int(machine.arrived[block, barrier])
    if arrived == 0:
        return
    part = slice(block * machine.block_width, (block + 1) * machine.block_width)
    expected = int(machine.expected[block, barrier]) or int(np.count_nonzero(machine.state[part] != DONE))
    if arrived < expected:
        return
    if arrived > expected:
        raise RuntimeError(f"{arrived} threads arrived at barrier {barrier}, which is for {expected}")
    waiting = (
        part.start + ((machine.state[part] == AT_BARRIER) & (machine.barrier[part] == barrier)).nonzero()[0]
    )
    machine.state[waiting] = RUNNING
    machine.barrier[waiting] = -1
    machine.arrived[block, barrier] = 0
    machine.history.learn(
        np.unique(machine.warp[waiting]), machine.barrier_known.pop(block * 16 + barrier, None)
    )
    if result is not None:
        result.deliver(waiting)


class _Reduction:
    """The predicate or count that ``bar.red`` gives to all."""

    def __init__(self, machine: Machine, statement: Instruction) -> None:
        self.machine, self.kind = machine, statement.mods[-2] if statement.mods[-2] != "aligned" else "popc"
        self.kind = next(mod for mod in statement.mods if mod in ("popc", "and", "or"))
        self.predicate = machine.predicate(statement.args[-1])
        self.write = machine.target(statement.args[0], "u32" if self.kind == "popc" else "pred")
        self.values: dict[int, bool] = {}

    def contribute(self, lanes: Any) -> None:
        values = np.broadcast_to(self.predicate(), (self.machine.threads,))
        self.values.update(zip(lanes.tolist(), values[lanes].tolist(), strict=True))

    def deliver(self, lanes: Any) -> None:
        values = [self.values.pop(lane) for lane in lanes.tolist()]
        total: Any = {
            "popc": np.uint32(sum(values)),
            "and": np.bool_(all(values)),
            "or": np.bool_(any(values)),
        }[self.kind]
        mask = np.zeros(self.machine.threads, np.bool_)
        mask[lanes] = True
        self.write(total, mask)


@instruction("barrier.cluster.arrive")
def cluster_arrive(machine: Machine, statement: Instruction) -> Closure:
    relaxed = "relaxed" in statement.mods

    def run(mask: Mask) -> int | None:
        if np.any(machine.cluster_arrived[mask]):
            raise RuntimeError("a thread arrived at the cluster barrier twice without waiting")
        machine.cluster_arrived[mask] = True
        lanes = np.arange(machine.threads)[lanes_of(mask)]
        width = machine.block_width * machine.shape.cluster_blocks
        for cluster in np.unique(lanes // width).tolist() if not relaxed else ():
            known = machine.history.publish(np.unique(machine.warp[lanes[lanes // width == cluster]]))
            machine.cluster_known[cluster] = union(machine.cluster_known.get(cluster), known)
        return AGAIN if _release_clusters(machine) else None

    return run


@instruction("barrier.cluster.wait")
def cluster_wait(machine: Machine, statement: Instruction) -> Closure:
    def run(mask: Mask) -> int:
        machine.pc[mask] = statement.index + 1
        machine.state[mask] = np.where(machine.cluster_passed[mask], RUNNING, AT_CLUSTER_BARRIER)
        if not np.all(machine.cluster_arrived[mask] | machine.cluster_passed[mask]):
            raise RuntimeError("a thread waits at the cluster barrier without having arrived")
        for cluster, known in machine.cluster_over.items():
            passed = machine.cluster_passed & (
                machine.cluster_first == cluster * machine.shape.cluster_blocks
            )
            machine.history.learn(np.unique(machine.warp[mask & passed]), known)
        machine.cluster_passed[mask] = False
        return MOVED

    return run


def _release_clusters(machine: Machine) -> bool:
    """Lets go the clusters all of whose threads have arrived; whether any did."""
    width = machine.block_width * machine.shape.cluster_blocks
    live = (machine.state != DONE).reshape(-1, width)
    arrived = machine.cluster_arrived.reshape(-1, width)
    complete = live.any(1) & (arrived | ~live).all(1) & (arrived & live).any(1)
    if not complete.any():
        return False
    for cluster in complete.nonzero()[0].tolist():
        part = slice(cluster * width, (cluster + 1) * width)
        waiting = machine.state[part] == AT_CLUSTER_BARRIER
        machine.cluster_arrived[part] = False
        machine.cluster_passed[part] = live[cluster] & ~waiting
        machine.state[part][waiting] = RUNNING
        known = machine.cluster_known.pop(cluster, None)
        machine.cluster_over[cluster] = known
        machine.history.learn(np.unique(machine.warp[part][waiting]), known)
    return True


@instruction("bar.warp.sync")
def warp_barrier(machine: Machine, statement: Instruction) -> Closure:
    return collective(machine, statement, statement.args[0], lambda mask: None)
