"""wgmma: matrix instructions of a warpgroup that run until they are waited for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.layout import WARPGROUP
from ptx.mma import Fragments, decode_pairs, registers_of
from ptx.syntax import Immediate, Instruction, Register, Vector, integer
from ptx.table import Closure, Mask, instruction
from ptx.tensors import swizzled
from ptx.warp import collective

if TYPE_CHECKING:
    from ptx.machine import Machine
    from ptx.types import Array


@dataclass(frozen=True)
class _Operand:
    """How a matrix lies in shared memory: (rows, k) elements of ``item`` bytes; rows are M or N."""

    rows: int
    k: int
    item: int
    by_k: bool

    def chunks(self, descriptor: int) -> Any:
        """Offsets of the 16-byte chunks: (rows, chunks of k), or (k, chunks of rows) if rows are contiguous.

        In units of 16 bytes, from CUTLASS's canonical layouts; a swizzle of 16·w bytes makes lines of w chunks:
        by k ((8, rows/8), 2) : ((w, stride), 1), and by rows ((w, n), (8, k/8)) : ((1, leading), (w, stride)).
        Without swizzle, leading and stride change places.
        """
        start = (descriptor & 0x3FFF) << 4
        leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        swizzle = (0, 128, 64, 32)[descriptor >> 62]
        if descriptor >> 49 & 7:
            raise NotImplementedError("a wgmma descriptor with a base offset")
        width = max(swizzle // 16, 1)
        per_chunk = 16 // self.item
        if self.by_k:
            row, chunk = np.arange(self.rows)[:, None], np.arange(self.k // per_chunk)
            along = 16 if swizzle else leading
            offsets = row % 8 * 16 * width + row // 8 * stride + chunk * along
        else:
            line, chunk = np.arange(self.k)[:, None], np.arange(self.rows // per_chunk)
            far, deep = (leading, stride) if swizzle else (stride, leading)
            offsets = line % 8 * 16 * width + line // 8 * deep + chunk % width * 16 + chunk // width * far
        return swizzled(start + offsets, swizzle)


@dataclass
class _Multiply:
    """One wgmma.mma_async in flight."""

    a: Any
    b: Any
    scale_d: bool
    negate: int
    accumulators: tuple[int, ...]


class TensorCores:
    """The tensor cores: what each warpgroup has in flight, oldest group first."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.reset()

    def reset(self) -> None:
        self.groups: dict[int, list[list[_Multiply]]] = {}
        # How many groups each warpgroup has committed.
        self.committed: dict[int, int] = {}
        # Which warpgroups have executed wgmma.fence since they last waited; what that left in which registers.
        self.fenced: set[int] = set()
        self.left: dict[int, tuple[tuple[int, ...], Any]] = {}

    def of(self, warpgroup: int) -> list[list[_Multiply]]:
        return self.groups.setdefault(warpgroup, [[]])

    def run(self, warpgroup: int, group: list[_Multiply]) -> None:
        """Performs a group's multiplications in order."""
        file = self.machine.files["b32"]
        part = slice(warpgroup * WARPGROUP, (warpgroup + 1) * WARPGROUP)
        held: tuple[int, ...] = ()
        total: Any = None
        for work in group:
            if work.accumulators != held:
                if held:
                    _put(file, held, part, total)
                held = work.accumulators
                total = _take(file, held, part)
            product = work.a() @ work.b().T
            if work.negate < 0:
                product = -product
            total = total + product if work.scale_d else product
        if held:
            _put(file, held, part, total)
            self.left[warpgroup] = held, file[list(held), part]

    def check_fence(self, warpgroup: int, accumulators: tuple[int, ...], used: bool) -> None:
        """Raise if the accumulators were written by other instructions without a ``wgmma.fence`` since."""
        if warpgroup in self.fenced or any(self.of(warpgroup)):
            return
        part = slice(warpgroup * WARPGROUP, (warpgroup + 1) * WARPGROUP)
        registers, values = self.left.get(warpgroup, ((), None))
        file = self.machine.files["b32"]
        if registers != accumulators or (used and not np.array_equal(values, file[list(registers), part])):
            raise RuntimeError("wgmma uses accumulators that were written without a wgmma.fence since")

    def note(self, warpgroup: int, block: int, grains: Any) -> None:
        """Records that the open group reads ``grains`` of the block's shared memory."""
        history = self.machine.history
        warps = np.arange(4 * warpgroup, 4 * warpgroup + 4)
        tick = self.committed.get(warpgroup, 0) + 1
        history.actor_reads(block, grains, warps, history.tensor_first + warpgroup, tick, "wgmma")

    def waited(self, warpgroup: int) -> None:
        """The warpgroup's warps come after all groups that are no longer in flight."""
        history = self.machine.history
        done = self.committed.get(warpgroup, 0) - (len(self.of(warpgroup)) - 1)
        history.knows(np.arange(4 * warpgroup, 4 * warpgroup + 4), history.tensor_first + warpgroup, done)
        self.fenced.discard(warpgroup)

    def advance(self, rng: Any) -> bool:
        return False

    def finish(self) -> None:
        for warpgroup, groups in self.groups.items():
            if any(groups):
                raise RuntimeError(f"warpgroup {warpgroup} exits with wgmma that it never waited for")


def _take(file: Any, registers: tuple[int, ...], part: slice) -> Any:
    """Accumulators as a (64, N) matrix: lane 4g + t of warp w has rows 16w + g and + 8, columns 8j + 2t and + 1."""
    values = file[list(registers), part].view(np.float32)
    columns = len(registers) // 4
    x = values.reshape(columns, 2, 2, 4, 8, 4)
    # register = (column group, row half, column of a pair); thread = (warp, row, pair)
    return x.transpose(3, 1, 4, 0, 5, 2).reshape(64, 8 * columns)


def _put(file: Any, registers: tuple[int, ...], part: slice, matrix: Any) -> None:
    columns = len(registers) // 4
    x = matrix.astype(np.float32).reshape(4, 2, 8, columns, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    file[list(registers), part] = np.ascontiguousarray(x).reshape(len(registers), WARPGROUP).view(np.uint32)


def _values(chunks: Any, kind: str) -> Any:
    """16-byte chunks (lines, chunks) as fp32 (lines, elements)."""
    bits = np.ascontiguousarray(chunks).view(np.uint32)
    values = decode_pairs(bits, kind)
    return values.reshape(bits.shape[0], -1)


class _Reader:
    """Reads one operand of a statement, wherever its descriptor points."""

    def __init__(self, machine: Machine, operand: _Operand, kind: str) -> None:
        self.machine, self.operand, self.kind = machine, operand, kind
        self.tensor: TensorCores = machine.unit(TensorCores)
        # Kernels go round the same few buffers.
        self.known: dict[int, tuple[Any, Any]] = {}

    def issue(self, warpgroup: int, descriptor: int) -> Callable[[], Any]:
        """Notes the access; a function that reads the matrix (rows, k) when it runs."""
        machine, block = self.machine, int(self.machine.block[warpgroup * WARPGROUP])
        if descriptor not in self.known:
            offsets = self.operand.chunks(descriptor)
            places = machine.shared.places(offsets.ravel(), 16, "wgmma").reshape(offsets.shape)
            self.known[descriptor] = places, machine.history.grains(offsets, 16).ravel()
        places, grains = self.known[descriptor]
        self.tensor.note(warpgroup, block, grains)

        def read() -> Any:
            values = _values(machine.shared.views[16][block, places], self.kind)
            return values if self.operand.by_k else values.T

        return read


@instruction("wgmma.mma_async")
def multiply(machine: Machine, statement: Instruction) -> Closure:
    shape = next(mod for mod in statement.mods if mod.startswith("m64"))
    found = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    d_kind, a_kind, b_kind = statement.mods[-3:]
    item = {"bf16": 2, "f16": 2, "tf32": 4}.get(a_kind)
    if found is None or d_kind != "f32" or a_kind != b_kind or item is None:
        raise NotImplementedError(statement.opcode)
    n, k = int(found.group(1)), int(found.group(2))
    tensor: TensorCores = machine.unit(TensorCores)
    file = machine.files["b32"]
    accumulators = tuple(registers_of(machine, statement.args[0]))
    assert len(accumulators) == n // 2, statement.text
    a_arg, b_arg, scale_arg, *immediates = statement.args[1:]
    flags = [integer(arg.text) for arg in immediates if isinstance(arg, Immediate)]
    scale_a, scale_b = (*flags, 1, 1)[:2]
    transposed = flags[2:]
    from_registers = isinstance(a_arg, Vector)
    a_registers = registers_of(machine, a_arg) if from_registers else []
    a_transposed = bool(transposed[0]) if transposed and not from_registers else False
    b_transposed = bool(transposed[-1]) if transposed else False
    a_descriptor: Any = None if from_registers else machine.source(a_arg, "u64")
    b_descriptor = machine.source(b_arg, "u64")
    scale_d = machine.predicate(scale_arg) if isinstance(scale_arg, (Register, Immediate)) else None
    if scale_d is None:
        raise NotImplementedError(statement.opcode)
    a_reader = _Reader(machine, _Operand(64, k, item, not a_transposed), a_kind)
    b_reader = _Reader(machine, _Operand(n, k, item, not b_transposed), b_kind)
    opcode, flops = statement.opcode, 2 * 64 * n * k

    def registers_reader(part: slice) -> Any:
        """A from registers, as mma.sync lays it out: 16 rows for each warp."""
        fragments = Fragments(f"m16n8k{k}", a_kind)

        def read() -> Any:
            values = file[a_registers, part].reshape(len(a_registers), 4, 32)
            return fragments.a(values).reshape(64, k)

        return read

    def body(mask: Mask) -> None:
        here = _warpgroups(machine, mask)
        for warpgroup in here.tolist():
            first = warpgroup * WARPGROUP
            b = b_reader.issue(warpgroup, int(np.broadcast_to(b_descriptor, (machine.threads,))[first]))
            if from_registers:
                a = registers_reader(slice(first, first + WARPGROUP))
            else:
                a = a_reader.issue(warpgroup, int(np.broadcast_to(a_descriptor, (machine.threads,))[first]))
            scale = bool(np.broadcast_to(scale_d(), (machine.threads,))[first])
            work = _Multiply(a, b, scale, scale_a * scale_b, accumulators)
            tensor.check_fence(warpgroup, accumulators, scale)
            groups = tensor.of(warpgroup)
            if machine.postponed() or any(groups):
                # In order: what is issued later never runs before.
                groups[-1].append(work)
            else:
                tensor.run(warpgroup, [work])
            machine.report.mma[opcode] += 1
            machine.report.flops += flops

    return collective(machine, statement, None, body, WARPGROUP)


def _warpgroups(machine: Machine, mask: Mask) -> Array:
    """Those that a mask has threads of."""
    if mask is True:
        return np.arange(machine.threads // WARPGROUP)
    return np.unique(mask.nonzero()[0] // WARPGROUP)


@instruction("wgmma.fence")
def fence(machine: Machine, statement: Instruction) -> Closure:
    tensor: TensorCores = machine.unit(TensorCores)

    def body(mask: Mask) -> None:
        here = _warpgroups(machine, mask)
        tensor.fenced.update(here.tolist())

    return collective(machine, statement, None, body, WARPGROUP)


@instruction("wgmma.commit_group")
def commit(machine: Machine, statement: Instruction) -> Closure:
    tensor: TensorCores = machine.unit(TensorCores)

    def body(mask: Mask) -> None:
        here = _warpgroups(machine, mask)
        for warpgroup in here.tolist():
            tensor.of(warpgroup).append([])
            tensor.committed[warpgroup] = tensor.committed.get(warpgroup, 0) + 1

    return collective(machine, statement, None, body, WARPGROUP)


@instruction("wgmma.wait_group")
def wait(machine: Machine, statement: Instruction) -> Closure:
    tensor: TensorCores = machine.unit(TensorCores)
    if isinstance(statement.args[-1], Immediate):
        left = integer(statement.args[-1].text)
    else:
        raise NotImplementedError(statement.opcode)

    def body(mask: Mask) -> None:
        here = _warpgroups(machine, mask)
        for warpgroup in here.tolist():
            groups = tensor.of(warpgroup)
            while len(groups) - 1 > left:
                tensor.run(warpgroup, groups.pop(0))
            tensor.waited(warpgroup)

    return collective(machine, statement, None, body, WARPGROUP)
