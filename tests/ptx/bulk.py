"""Bulk and tensor copies (TMA): loads that arrive at an mbarrier, stores in groups of a thread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.mbarriers import Barriers
from ptx.operands import GENERIC_PARAM
from ptx.owners import Who
from ptx.syntax import Address, Instruction
from ptx.table import AGAIN, Closure, Mask, instruction
from ptx.tensors import Tensor, swizzled

if TYPE_CHECKING:
    from ptx.machine import Machine


@dataclass
class _Load:
    """A load in flight: into these blocks, at an offset, then arriving at barriers of the same blocks."""

    read: Any
    claim: Any
    swizzle: int
    offset: int
    blocks: list[int]
    barriers: list[tuple[int, int]]
    size: int
    thread: int
    what: str


@dataclass
class _Store:
    """A store in flight, from a block's shared memory at an offset."""

    write: Any
    claim: Any
    swizzle: int
    offset: int
    block: int
    size: int
    taken: Any = None
    waited: bool = False


class Engine:
    """All bulk copies in flight."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.barriers: Barriers = machine.unit(Barriers)
        self.tensors = {
            offset: Tensor(machine.memory, tensor) for offset, tensor in machine.tensor_maps.items()
        }
        self.reset()

    def reset(self) -> None:
        self.loads: list[_Load] = []
        self.groups: dict[int, list[list[_Store]]] = {}
        self.committed: dict[int, int] = {}

    # Loads

    def load(self, load: _Load) -> bool:
        """Issues a load; whether a barrier's phase ended."""
        machine, history = self.machine, self.machine.history
        machine.report.tma_bytes += load.size * len(load.blocks)
        for block, (owner, offset) in zip(load.blocks, load.barriers, strict=True):
            barrier = self.barriers.at(owner, offset)
            barrier.actor = history.load_actor(owner, offset)
            warp = int(machine.warp[load.thread])
            history.load_writes(block, load.offset, load.size, warp, barrier.actor, barrier.phase + 1)
        first = self.barriers.at(*load.barriers[0])
        who = machine.who(load.thread)
        load.claim(replace(who, actor=np.int32(first.actor), tick=np.int32(first.phase + 1)))
        if machine.postponed():
            self.loads.append(load)
            return False
        return self._land(load)

    def _land(self, load: _Load) -> bool:
        shared, chunks = self.machine.shared, load.read()
        places = self._chunks(load.offset, load.size, load.swizzle, load.what)
        woke = False
        for block, (owner, barrier) in zip(load.blocks, load.barriers, strict=True):
            shared.views[16][block, places] = chunks
            woke |= self.barriers.complete_bytes(owner, barrier, load.size)
        return woke

    def _chunks(self, offset: int, size: int, swizzle: int, what: str) -> Any:
        """Where the 16-byte chunks of a box lie in shared memory."""
        addresses = swizzled(offset + 16 * np.arange(size // 16), swizzle)
        return self.machine.shared.places(addresses, 16, what)

    # Stores

    def store(self, thread: int, store: _Store) -> None:
        self.machine.report.tma_bytes += store.size
        store.claim(self.machine.who(thread))
        self.groups.setdefault(thread, [[]])[-1].append(store)
        self._note(thread, store.block, self._chunks(store.offset, store.size, store.swizzle, "TMA store"))
        if not self.machine.postponed():
            self._take(store)

    def _take(self, store: _Store) -> None:
        """Reads the source."""
        if store.taken is None:
            places = self._chunks(store.offset, store.size, store.swizzle, "TMA store")
            store.taken = self.machine.shared.views[16][store.block, places]

    def _note(self, thread: int, block: int, places: Any) -> None:
        """Records that the open group of the thread reads 16-byte chunks."""
        history, warp = self.machine.history, int(self.machine.warp[thread])
        tick = self.committed.get(thread, 0) + 1
        actor = history.bulk_first + warp
        grains = history.grains(places * 16, 16).ravel()
        history.actor_reads(block, grains, np.array([warp]), actor, tick, "a bulk store")

    def commit(self, thread: int) -> None:
        self.groups.setdefault(thread, [[]]).append([])
        self.committed[thread] = self.committed.get(thread, 0) + 1

    def wait(self, thread: int, left: int, reading: bool) -> None:
        """Until at most ``left`` groups of the thread are in flight (or still read, if ``reading``)."""
        groups = self.groups.setdefault(thread, [[]])
        over = len(groups) - 1 - left
        for group in groups[: max(over, 0)]:
            for store in group:
                self._take(store)
                store.waited = True
                if not reading:
                    store.write(store.taken)
        if not reading and over > 0:
            del groups[:over]
        history, warp = self.machine.history, int(self.machine.warp[thread])
        history.knows(warp, history.bulk_first + warp, self.committed.get(thread, 0) - left)

    # Time

    def advance(self, rng: Any) -> bool:
        """Ends one load; whether there was one."""
        if not self.loads:
            return False
        self._land(self.loads.pop(0 if rng is None else int(rng.integers(len(self.loads)))))
        return True

    def finish(self) -> None:
        if self.loads:
            raise RuntimeError(f"{len(self.loads)} bulk loads are still in flight when the block exits")
        for thread, groups in self.groups.items():
            for group in groups:
                for store in group:
                    if not store.waited:
                        raise RuntimeError(
                            "the block exits while bulk stores may still read its shared memory"
                        )
                    # Being written they may outlive it.
                    store.write(store.taken)
            self.groups[thread] = [[]]


def _is_load(statement: Instruction) -> bool:
    spaces = [mod for mod in statement.mods if mod.startswith(("shared", "global"))]
    return spaces[0].startswith("shared")


@instruction("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def tensor_copy(machine: Machine, statement: Instruction) -> Closure:
    if any(mod.startswith(("im2col", "cta_group", "tile::")) for mod in statement.mods):
        raise NotImplementedError(statement.opcode)
    engine: Engine = machine.unit(Engine)
    rank = int(next(mod for mod in statement.mods if mod[:1].isdigit())[0])
    loading = _is_load(statement)
    tensor, place = (
        (statement.args[1], statement.args[0]) if loading else (statement.args[0], statement.args[1])
    )
    assert isinstance(tensor, Address)
    descriptor = machine.address(Address(tensor.base, tensor.offset))
    coordinates = [machine.source(c, "s32") for c in tensor.coordinates]
    assert len(coordinates) == rank, statement.text
    shared = machine.address(place)
    barrier = machine.address(statement.args[2]) if loading else None
    cast = _Multicast(machine, statement, 3)
    reduce = next(
        (m for m in statement.mods if m in ("add", "min", "max", "and", "or", "xor", "inc", "dec")), None
    )

    def run(mask: Mask) -> int | None:
        woke = False
        for lane in range(machine.threads) if mask is True else mask.nonzero()[0].tolist():
            one = np.array([lane])
            source = engine.tensors.get(int(descriptor(one)[0]) - GENERIC_PARAM)
            if source is None:
                raise RuntimeError(
                    f"the descriptor at {int(descriptor(one)[0]):#x} is no tensor map of this launch"
                )
            if source.map.box and len(source.map.shape) != rank:
                raise RuntimeError(
                    f"a {rank}-dimensional copy of a tensor of {len(source.map.shape)} dimensions"
                )
            at = tuple(int(np.broadcast_to(c, (machine.threads,))[lane]) for c in coordinates)
            blocks, places = machine.shared_places(shared(one), one, 16, "TMA")
            block, offset = int(blocks[0]), int(places[0]) * 16
            if offset % 128:
                raise RuntimeError(f"a TMA box at shared address {offset:#x}, which is no multiple of 128")
            if barrier is not None:
                owners, barriers = engine.barriers.places(barrier(one), one)
                targets = cast.targets(lane, block, int(owners[0]), int(barriers[0]))
                woke |= engine.load(
                    _Load(
                        lambda s=source, c=at: s.read(c),
                        lambda who, s=source, c=at: s.claim(c, False, who),
                        source.map.swizzle,
                        offset,
                        *targets,
                        source.box_bytes,
                        lane,
                        statement.text,
                    )
                )
            else:
                engine.store(
                    lane,
                    _Store(
                        lambda v, s=source, c=at: s.write(c, v, reduce),
                        # Like atomics, reductions are not watched.
                        lambda who, s=source, c=at: None if reduce else s.claim(c, True, who),
                        source.map.swizzle,
                        offset,
                        block,
                        source.box_bytes,
                    ),
                )
        return AGAIN if woke else None

    return run


class _Multicast:
    """The blocks of a cluster that a load writes to, each at the same offset, with the barrier at the same offset."""

    def __init__(self, machine: Machine, statement: Instruction, place: int) -> None:
        self.machine = machine
        spread = any(mod.startswith("multicast") for mod in statement.mods)
        self.bits = machine.source(statement.args[place], "u16") if spread else None

    def targets(
        self, lane: int, block: int, owner: int, barrier: int
    ) -> tuple[list[int], list[tuple[int, int]]]:
        if self.bits is None:
            return [block], [(owner, barrier)]
        bits = int(np.broadcast_to(self.bits, (self.machine.threads,))[lane])
        first = int(self.machine.cluster_first[lane])
        size = self.machine.shape.cluster_blocks
        if bits >> size or not bits:
            raise RuntimeError(f"multicast to the blocks {bits:#b} of a cluster of {size}")
        blocks = [first + rank for rank in range(size) if bits >> rank & 1]
        return blocks, [(block, barrier) for block in blocks]


@instruction("cp.async.bulk", "cp.reduce.async.bulk")
def bulk_copy(machine: Machine, statement: Instruction) -> Closure:
    """A run of bytes between global and shared memory, or to the shared memory of another block."""
    if statement.op == "cp" and statement.mods[1] == "bulk" and "shared" not in statement.opcode:
        raise NotImplementedError(statement.opcode)
    if "reduce" in statement.mods:
        raise NotImplementedError(statement.opcode)
    engine: Engine = machine.unit(Engine)
    spaces = [mod.split("::")[0] for mod in statement.mods if mod.startswith(("shared", "global"))]
    target, source = machine.address(statement.args[0]), machine.address(statement.args[1])
    size = machine.source(statement.args[2], "u32")
    barrier = machine.address(statement.args[3]) if "bulk_group" not in statement.mods else None
    cast = _Multicast(machine, statement, 4)

    def run(mask: Mask) -> int | None:
        woke = False
        for lane in range(machine.threads) if mask is True else mask.nonzero()[0].tolist():
            one = np.array([lane])
            count = int(np.broadcast_to(size, (machine.threads,))[lane])
            if count % 16:
                raise RuntimeError(f"a bulk copy of {count} bytes, which is no multiple of 16")
            if barrier is None:
                blocks, places = machine.shared_places(source(one), one, 16, "bulk store")
                line = int(target(one)[0]) + 16 * np.arange(count // 16)

                def write(values: Any, line: Any = line) -> None:
                    machine.memory.store(line, values, 16, "bulk store")

                claim = partial(machine.memory.claim, line, 16, True, "bulk store")
                engine.store(lane, _Store(write, claim, 0, int(places[0]) * 16, int(blocks[0]), count))
                continue
            blocks, places = machine.shared_places(target(one), one, 16, "bulk load")
            owners, barriers = engine.barriers.places(barrier(one), one)
            targets = cast.targets(lane, int(blocks[0]), int(owners[0]), int(barriers[0]))
            if spaces[1] == "global":
                line = int(source(one)[0]) + 16 * np.arange(count // 16)

                def read(line: Any = line) -> Any:
                    return machine.memory.load(line, 16, "bulk load")

                claim = partial(machine.memory.claim, line, 16, False, "bulk load")
            else:
                read, claim = _shared_reader(machine, source(one), one, count), partial(_nothing)
            woke |= engine.load(
                _Load(read, claim, 0, int(places[0]) * 16, *targets, count, lane, statement.text)
            )
        return AGAIN if woke else None

    return run


def _nothing(who: Who) -> None:
    """The claim of a copy that touches no global memory."""


def _shared_reader(machine: Machine, address: Any, lane: Any, count: int) -> Any:
    blocks, places = machine.shared_places(address, lane, 16, "bulk copy")
    chunks = int(places[0]) + np.arange(count // 16)

    def read() -> Any:
        return machine.shared.views[16][int(blocks[0]), chunks].copy()

    return read


@instruction("cp.async.bulk.commit_group")
def commit(machine: Machine, statement: Instruction) -> Closure:
    engine: Engine = machine.unit(Engine)

    def run(mask: Mask) -> None:
        for lane in range(machine.threads) if mask is True else mask.nonzero()[0].tolist():
            if lane in engine.groups:
                engine.commit(lane)

    return run


@instruction("cp.async.bulk.wait_group")
def wait(machine: Machine, statement: Instruction) -> Closure:
    engine: Engine = machine.unit(Engine)
    left, reading = int(machine.source(statement.args[0], "s32")), "read" in statement.mods

    def run(mask: Mask) -> None:
        for lane in range(machine.threads) if mask is True else mask.nonzero()[0].tolist():
            if lane in engine.groups:
                engine.wait(lane, left, reading)

    return run
