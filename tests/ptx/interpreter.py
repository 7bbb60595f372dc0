"""Running a compiled kernel's PTX on the CPU."""

from __future__ import annotations

import re

import numpy as np

from dmuon.kernels.gpu.arch import ARCHS, Arch
from dmuon.kernels.gpu.binary import Binary, Launch, TensorMap, pack
from ptx import alu, bulk, control, conversions, copies, data, floats, mbarriers, mma, moves, warp, wgmma
from ptx.layout import Shape
from ptx.machine import Machine
from ptx.memory import Memory
from ptx.program import parse
from ptx.report import Report
from ptx.scheduler import Scheduler
from ptx.syntax import Program

_HANDLERS = (alu, bulk, control, conversions, copies, data, floats, mbarriers, mma, moves, warp, wgmma)
"""Imported for the instructions that they register."""

_WIDTH = 1024
"""Threads to run at a time when they run in lockstep: wider arrays cost little more."""


def run(
    binary: Binary,
    launch: Launch,
    memory: Memory,
    *,
    seed: int | None = None,
    late: bool | None = None,
    races: bool = True,
    resident: int | None = None,
    max_steps: int = 3_000_000,
) -> Report:
    """Performs ``launch`` on the tensors of ``memory``.

    Args:
        binary: its ``ptx``, ``threads``, ``shared_bytes``, ``params`` and ``cluster`` are used, not its machine code.
        launch: as the driver would get it.
        memory: all that the kernel may touch.
        seed: of the order of blocks, of the interleaving of warps, and of when asynchronous work happens; with
            ``None`` blocks run in order, all warps in lockstep, and asynchronous work as late as it may.
        late: whether asynchronous work happens as late (``True``) or as early (``False``) as it may, whatever the
            seed.
        races: whether accesses that nothing orders are errors: of warps in shared memory, of clusters in global
            memory. Kernels that synchronise through memory need ``False``; atomics are left out.
        resident: clusters (blocks) that run at a time; kernels whose blocks wait for each other need all of them.
        max_steps: statements of groups of warps after which a kernel is taken to hang.

    Returns:
        What was executed and moved.

    Raises:
        IndexError: an access out of bounds or not aligned, with address and statement.
        ptx.Race: two accesses to the same memory, one a write, with nothing that orders them.
        ptx.Deadlock: threads wait for what nobody does.
        NotImplementedError: a statement that is not understood was reached.
        RuntimeError: a rule of PTX was broken.
        ValueError: arguments do not fit the kernel, or the launch exceeds what the arch has.
    """
    program = parse(binary.ptx)
    maps = {
        param.offset: arg
        for param, arg in zip(binary.params, launch.args, strict=False)
        if isinstance(arg, TensorMap)
    }
    params = pack(binary, launch, lambda tensor_map: bytes(128))
    if len(program.params) != len(binary.params):
        raise ValueError(f"the PTX has {len(program.params)} parameters, the binary {len(binary.params)}")
    offsets = {name: binary.params[index].offset for name, index in program.params.items()}
    if any(size % part for size, part in zip(launch.grid, binary.cluster, strict=True)):
        raise ValueError(f"the grid {launch.grid} is no multiple of the cluster {binary.cluster}")
    rng = None if seed is None else np.random.default_rng(seed)
    clusters = [
        (x, y, z)
        for z in range(launch.grid[2] // binary.cluster[2])
        for y in range(launch.grid[1] // binary.cluster[1])
        for x in range(launch.grid[0] // binary.cluster[0])
    ]
    if rng is not None:
        clusters = [clusters[k] for k in rng.permutation(len(clusters))]
    report = Report()
    memory.watch(races)
    shape = _shape(binary, program, len(clusters), resident, rng is not None)
    regions = len(memory.regions)
    try:
        with np.errstate(all="ignore"):
            machine = Machine(
                program,
                shape,
                launch.grid,
                binary.shared_bytes,
                memory,
                params,
                offsets,
                maps,
                rng,
                late,
                races,
                report,
            )
            _check_limits(binary, launch, machine)
            for first in range(0, len(clusters), shape.resident):
                part = clusters[first : first + shape.resident]
                machine.start(part)
                Scheduler(machine, max_steps).run()
                report.blocks += len(part) * shape.cluster_blocks
    finally:
        # A module's own variables die with the launch.
        del memory.regions[regions:]
    for statement, count in zip(program.code, machine.counts, strict=True):
        if count:
            report.executed[statement.opcode] += count
    report.loaded, report.stored = list(memory.loaded), list(memory.stored)
    return report


def _check_limits(binary: Binary, launch: Launch, machine: Machine) -> None:
    """Raise where a driver would refuse the launch."""
    arch = ARCHS.get(binary.spec.arch)
    if arch is not None and machine.shared.size > arch.shared_bytes:
        raise ValueError(
            f"{binary.entry} needs {machine.shared.size} bytes of shared memory, static and dynamic; a block of "
            f"{arch.name} has at most {arch.shared_bytes}"
        )
    if not 1 <= binary.threads <= Arch.threads_per_block:
        raise ValueError(
            f"{binary.entry} needs blocks of {binary.threads} threads; {Arch.threads_per_block} is the most"
        )
    limits = ((1 << 31) - 1, 65535, 65535)
    if any(not 1 <= size <= limit for size, limit in zip(launch.grid, limits, strict=True)):
        raise ValueError(f"the grid must be from (1, 1, 1) to {limits}, got {launch.grid}")


def _shape(binary: Binary, program: Program, clusters: int, resident: int | None, random: bool) -> Shape:
    found = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", binary.ptx)
    block = tuple(int(side or 1) for side in found.groups()) if found else (binary.threads, 1, 1)
    if block[0] * block[1] * block[2] != binary.threads:
        raise ValueError(f"the PTX requires blocks of {block} threads, the binary has {binary.threads}")
    shape = Shape((block[0], block[1], block[2]), binary.cluster, 1)
    if resident is None:
        resident = 1 if random else max(1, _WIDTH // (shape.block_threads * shape.cluster_blocks))
    return Shape(shape.block, shape.cluster, min(resident, clusters))
