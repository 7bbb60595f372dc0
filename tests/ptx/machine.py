"""The state of the resident blocks, and operands as arrays over all of their threads."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmuon.kernels.gpu.binary import TensorMap
from ptx.history import History
from ptx.memory import Local, Memory, Shared
from ptx.program import (
    Address,
    Immediate,
    Instruction,
    Not,
    Operand,
    Program,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
    integer,
)
from ptx.report import Report
from ptx.table import Closure, Mask, close, lanes_of
from ptx.types import DTYPES, UNSIGNED, Array, bytes_of

WARP = 32

# What a thread is doing.
RUNNING, DONE, AT_BARRIER, ASLEEP, HELD, AT_CLUSTER_BARRIER = range(6)

# Generic addresses: which window is in the upper bits, above every address of a process.
GENERIC_SHARED, GENERIC_LOCAL, GENERIC_PARAM = (k << 60 for k in (1, 2, 3))
_WINDOW = 60
_OFFSET = (1 << 60) - 1

Write = Callable[[Any, Mask], None]
Addresses = Callable[[Any], NDArray[np.int64]]


@dataclass(frozen=True)
class Shape:
    """Threads of a block in x, y and z, blocks of a cluster, and clusters that run at a time."""

    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    resident: int

    @property
    def block_threads(self) -> int:
        return int(np.prod(self.block))

    @property
    def cluster_blocks(self) -> int:
        return int(np.prod(self.cluster))


class Machine:
    """Some clusters of a grid, resident together: registers, program counters, shared memory, barriers.

    The threads of all blocks lie on one axis; each block starts at a multiple of 32. The arrays that closures hold
    stay the same objects for the life of a machine; :meth:`start` fills them anew for other clusters.
    """

    def __init__(
        self,
        program: Program,
        shape: Shape,
        grid: tuple[int, int, int],
        shared_bytes: int,
        memory: Memory,
        params: bytes,
        offsets: dict[str, int],
        tensor_maps: dict[int, TensorMap],
        rng: np.random.Generator | None,
        late: bool | None,
        races: bool,
        report: Report,
    ) -> None:
        self.program, self.shape, self.grid, self.memory, self.report = program, shape, grid, memory, report
        self.params, self.offsets, self.tensor_maps = params, offsets, tensor_maps
        self.rng, self.late = rng, late
        self.blocks = shape.resident * shape.cluster_blocks
        # Whole warpgroups where those act together; the threads that are too many never start.
        unit = 4 * WARP if any(statement.op == "wgmma" for statement in program.code) else WARP
        self.block_width = -(-shape.block_threads // unit) * unit
        self.threads = self.blocks * self.block_width
        self.warps = self.threads // WARP
        axis = np.arange(self.threads)
        self.lane = (axis % WARP).astype(np.uint32)
        self.warp = axis // WARP
        self.block = axis // self.block_width
        self.cluster_first = self.block // shape.cluster_blocks * shape.cluster_blocks
        self.rank = (self.block - self.cluster_first).astype(np.uint32)
        self._lay_out(shared_bytes)
        self.files = {
            kind: np.zeros((max(count, 1), self.threads), DTYPES[kind])
            for kind, count in {
                **dict.fromkeys(("pred", "b8", "b16", "b32", "b64", "b128"), 0),
                **program.registers,
            }.items()
        }
        self.specials = self._special_registers()
        self.pc = np.zeros(self.threads, np.int64)
        self.state = np.zeros(self.threads, np.uint8)
        self.counts = [0] * len(program.code)
        self._together: dict[int, Mask] = {}
        # Named barriers of each block: threads that have arrived, and threads that wait at which.
        self.arrived = np.zeros((self.blocks, 16), np.int64)
        self.expected = np.zeros((self.blocks, 16), np.int64)
        self.barrier_known: dict[int, Any] = {}
        self.barrier = np.full(self.threads, -1, np.int64)
        self.cluster_arrived = np.zeros(self.threads, np.bool_)
        self.cluster_passed = np.zeros(self.threads, np.bool_)
        # What the threads that arrived at a barrier had done; for a cluster's, also of the last one that is over.
        self.cluster_known: dict[int, Any] = {}
        self.cluster_over: dict[int, Any] = {}
        self.index = 0
        self.history = History(self, races)
        self.units: dict[str, Any] = {}
        self.code: list[Closure] = [close(self, statement) for statement in program.code]
        self._fuse()

    def _fuse(self) -> None:
        """Runs of independent statements that one closure does faster; see :mod:`ptx.fusion`."""
        from ptx.fusion import fuse

        fuse(self)

    # Layout of memory

    def _lay_out(self, dynamic: int) -> None:
        """Addresses of all variables: static shared ones first, then the dynamic one."""
        self.symbols: dict[str, int] = {}
        top, stack = Shared.BASE, 0
        variables = list(self.program.variables.values())
        for variable in variables:
            if variable.space == "shared" and not variable.extern:
                top = -(-top // variable.align) * variable.align
                self.symbols[variable.name] = top
                top += variable.size
            elif variable.space == "local":
                stack = -(-stack // variable.align) * variable.align
                self.symbols[variable.name] = Local.BASE + stack
                stack += variable.size
            elif variable.space in ("global", "const"):
                self.symbols[variable.name] = self._module_variable(variable)
        for variable in variables:
            if variable.extern and variable.space == "shared":
                top = -(-top // variable.align) * variable.align
                self.symbols[variable.name] = top
        self.dynamic_bytes = dynamic
        self.shared = Shared(self.blocks, top - Shared.BASE + dynamic)
        self.local = Local(self.threads, stack)

    def _module_variable(self, variable: Variable) -> int:
        data = np.zeros(variable.size, np.uint8)
        data[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
        return self.memory.add(data)

    # Starting clusters

    def _special_registers(self) -> dict[str, Array]:
        shape = self.shape
        x, y, _ = shape.block
        thread = np.arange(self.threads, dtype=np.uint32) % self.block_width
        values: dict[str, Any] = {
            "%tid.x": thread % x,
            "%tid.y": thread // x % y,
            "%tid.z": thread // (x * y),
            "%laneid": self.lane.copy(),
            "%warpid": thread // WARP,
            "%nwarpid": -(-shape.block_threads // WARP),
            "%smid": 0,
            "%nsmid": 1,
            "%dynamic_smem_size": self.dynamic_bytes,
            "%total_smem_size": self.shared.size,
            "%lanemask_eq": np.uint32(1) << self.lane,
            "%lanemask_lt": (np.uint32(1) << self.lane) - np.uint32(1),
            "%lanemask_le": np.uint32(0xFFFFFFFF) >> (np.uint32(31) - self.lane),
            "%lanemask_gt": ~(np.uint32(0xFFFFFFFF) >> (np.uint32(31) - self.lane)),
            "%lanemask_ge": np.uint32(0xFFFFFFFF) << self.lane,
            "%cluster_ctarank": self.rank,
            "%cluster_nctarank": self.shape.cluster_blocks,
            "%is_explicit_cluster": int(self.shape.cluster_blocks > 1),
            "%clock": 0,
            "%clock_hi": 0,
        }
        ranks = self.rank
        for axis, name in enumerate("xyz"):
            size = self.shape.cluster[axis]
            values[f"%ntid.{name}"] = self.shape.block[axis]
            values[f"%nctaid.{name}"] = self.grid[axis]
            values[f"%ctaid.{name}"] = 0
            values[f"%cluster_nctaid.{name}"] = size
            values[f"%cluster_ctaid.{name}"] = ranks % np.uint32(size)
            values[f"%nclusterid.{name}"] = self.grid[axis] // size
            values[f"%clusterid.{name}"] = 0
            ranks = ranks // np.uint32(size)
        filled = {
            name: np.ascontiguousarray(np.broadcast_to(np.asarray(value, np.uint32), (self.threads,))).copy()
            for name, value in values.items()
        }
        for name in ("%clock64", "%globaltimer"):
            filled[name] = np.zeros(self.threads, np.uint64)
        return filled

    def start(self, clusters: list[tuple[int, int, int]]) -> None:
        """Puts ``clusters`` (indices in x, y, z) in place; slots beyond them stay empty."""
        self.pc[:] = 0
        self.state[:] = RUNNING
        thread = np.arange(self.threads) % self.block_width
        self.state[thread >= self.shape.block_threads] = DONE
        self.state[self.block // self.shape.cluster_blocks >= len(clusters)] = DONE
        for axis, name in enumerate("xyz"):
            places = np.array(
                [cluster[axis] for cluster in clusters] + [0] * (self.shape.resident - len(clusters))
            )
            mine = places[self.block // self.shape.cluster_blocks]
            self.specials[f"%clusterid.{name}"][:] = mine
            offset = self.specials[f"%cluster_ctaid.{name}"]
            self.specials[f"%ctaid.{name}"][:] = mine * self.shape.cluster[axis] + offset
        x, y, _ = (size // part for size, part in zip(self.grid, self.shape.cluster, strict=True))
        numbers = [1 + c[0] + x * (c[1] + y * c[2]) for c in clusters]
        numbers += [0] * (self.shape.resident - len(clusters))
        self.cluster_number = np.array(numbers, np.int32)[self.block // self.shape.cluster_blocks]
        self.arrived[:] = 0
        self.barrier[:] = -1
        self.barrier_known.clear()
        self.cluster_arrived[:] = False
        self.cluster_passed[:] = False
        self.cluster_known.clear()
        self.cluster_over.clear()
        self.shared.reset()
        self.local.reset()
        for kind, file in self.files.items():
            # What is read before it is written must not pass for a zero.
            file.view(np.uint8)[:] = 0 if kind == "pred" else 0xFF
        self.history.reset()
        for unit in self.units.values():
            unit.reset()

    def unit(self, kind: type[Any]) -> Any:
        """The machine's only object of ``kind``: an engine for asynchronous work, made when first needed."""
        return (
            self.units.setdefault(kind.__name__, kind(self))
            if kind.__name__ not in self.units
            else self.units[kind.__name__]
        )

    def postponed(self) -> bool:
        """Whether a piece of asynchronous work just issued is to be done as late as possible, rather than now."""
        if self.late is not None or self.rng is None:
            return self.late is not False
        return bool(self.rng.random() < 0.5)

    # Operands

    def row(self, register: Operand | None) -> Array:
        """A register of all threads."""
        assert isinstance(register, Register), register
        return self.files[register.type][register.row]

    def source(self, operand: Operand, type_name: str) -> Any:
        """A live view of the operand's values as ``type_name``: an array over threads, or a scalar."""
        dtype = np.dtype(DTYPES[type_name])
        if isinstance(operand, Register):
            return _low(self.row(operand), dtype)
        if isinstance(operand, Special):
            if operand.name not in self.specials:
                raise NotImplementedError(f"no special register {operand.name}")
            return _low(self.specials[operand.name], dtype)
        if isinstance(operand, Symbol):
            return self._symbol(operand, dtype)
        if isinstance(operand, Immediate):
            return literal(operand.text, type_name)
        raise NotImplementedError(f"operand {operand} as a value of type {type_name}")

    def _symbol(self, operand: Symbol, dtype: np.dtype[Any]) -> Any:
        if operand.name == "WARP_SZ":
            return dtype.type(WARP)
        if operand.name in self.offsets:
            return dtype.type(GENERIC_PARAM + self.offsets[operand.name] + operand.offset)
        if operand.name not in self.symbols:
            raise NotImplementedError(f"unknown symbol {operand.name}")
        address = self.symbols[operand.name] + operand.offset
        if self.program.variables[operand.name].space == "shared" and self.shape.cluster_blocks > 1:
            return (address + (self.rank.astype(np.int64) << Shared.RANK_SHIFT)).astype(dtype)
        return dtype.type(address)

    def predicate(self, operand: Operand) -> Any:
        """Like :meth:`source`, for predicates, which may be negated: then a function gives the values."""
        if isinstance(operand, Not):
            inner = self.predicate(operand.predicate)
            return lambda: ~inner()
        if isinstance(operand, Immediate):
            value = np.bool_(integer(operand.text) != 0)
            return lambda: value
        row = self.row(operand)
        return lambda: row

    def target(self, operand: Operand, type_name: str) -> Write:
        """A function that writes values of ``type_name`` (an array over all threads, or a scalar) under a mask."""
        if isinstance(operand, Sink):
            return lambda values, mask: None
        row = self.row(operand)
        dtype = np.dtype(DTYPES[type_name])
        if row.dtype == np.bool_ or row.itemsize == dtype.itemsize:
            view = row.view(dtype)

            def write(values: Any, mask: Mask) -> None:
                np.copyto(view, values, where=mask, casting="same_kind")

            return write
        if row.itemsize < dtype.itemsize:
            raise NotImplementedError(f"a value of type {type_name} for the narrower register {operand}")
        wide = row.view(_extended(dtype, row.itemsize))

        def write_extended(values: Any, mask: Mask) -> None:
            np.copyto(
                wide, np.asarray(values, dtype).view(_as_integer(dtype)), where=mask, casting="same_kind"
            )

        return write_extended

    def exact_row(self, operand: Operand, type_name: str) -> Array | None:
        """The operand's register as ``type_name``, if it has just that width: a place to compute into."""
        if isinstance(operand, Register):
            row, dtype = self.row(operand), np.dtype(DTYPES[type_name])
            if row.itemsize == dtype.itemsize:
                return row.view(dtype)
        return None

    def address(self, operand: Operand) -> Addresses:
        """A function from an index of threads to the addresses that they name."""
        assert isinstance(operand, Address), operand
        offset = operand.offset
        if isinstance(operand.base, (Register, Special)):
            row = (
                self.row(operand.base)
                if isinstance(operand.base, Register)
                else self.specials[operand.base.name]
            )
            if row.itemsize == 8:
                wide = row.view(np.int64)
                return lambda lanes: wide[lanes] + offset
            return lambda lanes: row[lanes].astype(np.int64) + offset
        base = self.source(operand.base, "s64")
        everywhere = np.array(np.broadcast_to(base + offset, (self.threads,)), np.int64)
        return lambda lanes: everywhere[lanes]

    # Memory

    def space_of(self, statement: Instruction) -> str:
        """Which state space a load or store names; ``"generic"`` for none."""
        for mod in statement.mods:
            space = mod.split("::")[0]
            if space in ("shared", "global", "local", "param", "const"):
                return space
        return "generic"

    def shared_places(
        self, addresses: NDArray[np.int64], lanes: Any, size: int, what: str
    ) -> tuple[Any, Any]:
        """Shared addresses (of any block of the threads' clusters) as (blocks, places in items)."""
        ranks = addresses >> Shared.RANK_SHIFT
        if self.shape.cluster_blocks == 1:
            if np.count_nonzero(ranks):
                raise IndexError(f"{what} at {int(addresses[ranks != 0][0]):#x}, which is no shared address")
            return self.block[lanes], self.shared.places(addresses, size, what)
        if int(ranks.max()) >= self.shape.cluster_blocks or int(ranks.min()) < 0:
            raise IndexError(
                f"{what} at {int(addresses[ranks.argmax()]):#x}, which is no shared address of the cluster"
            )
        offsets = addresses & ((1 << Shared.RANK_SHIFT) - 1)
        return self.cluster_first[lanes] + ranks, self.shared.places(offsets, size, what)

    def load(self, space: str, addresses: NDArray[np.int64], lanes: Any, size: int, what: str) -> Array:
        """Items of ``size`` bytes, one for each thread of ``lanes``."""
        if space == "shared":
            blocks, places = self.shared_places(addresses, lanes, size, what)
            self.history.read(blocks, places * size, size, lanes)
            return self.shared.views[size][blocks, places]
        if space in ("global", "const"):
            return self.memory.load(addresses, size, what, self._cluster(lanes, what))
        if space == "local":
            places = self.local.places(addresses & 0xFFFFFFFF, size, what)
            return self.local.views[size][np.arange(self.threads)[lanes], places]
        if space == "param":
            return np.frombuffer(self.params, np.uint8)[
                (addresses & _OFFSET)[:, None] + np.arange(size)
            ].view(UNSIGNED[size])[:, 0]
        return self._by_window(addresses, lanes, lambda s, a, k, part: self.load(s, a, k, size, what))

    def store(
        self, space: str, addresses: NDArray[np.int64], lanes: Any, values: Array, size: int, what: str
    ) -> None:
        """Writes items of ``size`` bytes, one for each thread of ``lanes``."""
        if space == "shared":
            blocks, places = self.shared_places(addresses, lanes, size, what)
            self.shared.views[size][blocks, places] = values
            self.history.write(blocks, places * size, size, lanes)
        elif space == "global":
            self.memory.store(addresses, values, size, what, self._cluster(lanes, what))
        elif space == "local":
            places = self.local.places(addresses & 0xFFFFFFFF, size, what)
            self.local.views[size][np.arange(self.threads)[lanes], places] = values
        elif space == "generic":
            self._by_window(
                addresses, lanes, lambda s, a, k, part: self.store(s, a, k, values[part], size, what)
            )
        else:
            raise NotImplementedError(f"stores to {space}")

    def _cluster(self, lanes: Any, what: str) -> Any:
        """Who accesses global memory; atomics go unwatched."""
        return None if what.startswith(("atom", "red")) else self.cluster_number[lanes]

    def _by_window(self, addresses: NDArray[np.int64], lanes: Any, access: Any) -> Any:
        """``access`` for each window that the generic ``addresses`` lie in."""
        windows = addresses >> _WINDOW
        names = ("global", "shared", "local", "param")
        first = int(windows[0])
        if (windows == first).all():
            return access(names[first], addresses & _OFFSET, lanes, slice(None))
        index, result = np.arange(self.threads)[lanes], None
        for window in np.unique(windows).tolist():
            (part,) = (windows == window).nonzero()
            values = access(names[window], addresses[part] & _OFFSET, index[part], part)
            if values is not None:
                result = np.empty(addresses.size, values.dtype) if result is None else result
                result[part] = values
        return result

    # Convergence

    def whole_warps(self, mask: Mask) -> bool:
        """Whether every warp of the mask takes part with all of its threads that have not exited."""
        if mask is True:
            return True
        warps = mask.reshape(-1, WARP)
        live = (self.state != DONE).reshape(-1, WARP)
        return bool((warps.any(1)[:, None] & live & ~warps).any() == False)  # noqa: E712

    def gather(self, mask: Mask, index: int, width: int, following: int, members: Any = None) -> Mask | None:
        """Threads that can run a collective statement together: those of the mask, and those held there before.

        Args:
            mask: who arrives now.
            index: the statement.
            width: threads that must take part together: a warp, or a warpgroup.
            following: the statement after it.
            members: who must take part, one bool for each thread; everyone who has not exited if ``None``.

        Returns:
            The mask to run; ``None`` if nobody can yet. Then, and if only some can, the others are held, and all
            program counters are set: the closure must return MOVED.
        """
        if mask is True or (members is None and self._together.get(width) is mask):
            return mask
        needed = self.state != DONE
        if members is not None:
            needed &= members
        here = mask | ((self.state == HELD) & (self.pc == index))
        groups = here.reshape(-1, width)
        complete = groups.any(1) & ~(needed.reshape(-1, width) & ~groups).any(1)
        ready = np.repeat(complete, width) & here
        if np.array_equal(ready, mask):
            if members is None:
                # Threads only ever leave a group by exiting: what is whole stays whole.
                self._together[width] = mask
            return mask
        waiting = mask & ~ready
        self.state[waiting] = HELD
        self.pc[waiting] = index
        if not ready.any():
            return None
        self.state[ready] = RUNNING
        self.pc[ready] = following
        return ready


def literal(text: str, type_name: str) -> Any:
    """A literal as a numpy scalar of the type."""
    dtype = np.dtype(DTYPES[type_name])
    if text[:2].lower() == "0f":
        return (
            np.frombuffer(struct.pack("<I", int(text[2:], 16)), np.float32)
            .astype(np.float64 if type_name == "f64" else np.float32)
            .view(dtype)[0]
        )
    if text[:2].lower() == "0d":
        value = np.frombuffer(struct.pack("<Q", int(text[2:], 16)), np.float64)
        return value.view(dtype)[0] if dtype.itemsize == 8 else value.astype(np.float32).view(dtype)[0]
    if type_name == "pred":
        return np.bool_(integer(text) != 0)
    if dtype.kind == "f" and dtype.itemsize > 2:
        return dtype.type(float(text))
    bits = integer(text) & ((1 << 8 * dtype.itemsize) - 1)
    return np.frombuffer(bits.to_bytes(dtype.itemsize, "little"), dtype)[0]


def _low(row: Array, dtype: np.dtype[Any]) -> Array:
    """The low part of a register as a narrower type (little-endian: every so many items)."""
    if row.dtype == np.bool_:
        return row
    if row.itemsize == dtype.itemsize:
        return row.view(dtype)
    if row.itemsize < dtype.itemsize:
        raise NotImplementedError(f"a {row.itemsize}-byte register read as {dtype}")
    return row.view(dtype)[:: row.itemsize // dtype.itemsize]


def _as_integer(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(dtype if dtype.kind in "iu" else UNSIGNED[dtype.itemsize])


def _extended(dtype: np.dtype[Any], size: int) -> np.dtype[Any]:
    """The integer type that a value is extended to in a wider register: with its sign if it has one."""
    return np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{size}")


__all__ = ["Machine", "Shape", "Vector", "bytes_of", "lanes_of", "literal"]
