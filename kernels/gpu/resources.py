"""What a compiled kernel takes of a multiprocessor, and which instructions do its work: read from its cubin."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from dmuon.kernels.gpu.arch import Arch, arch_named
from dmuon.kernels.gpu.binary import Binary
from dmuon.kernels.gpu.toolchain import tool

_WARP = 32
_REGISTER_UNIT = 256  # registers that a warp is given at a time
_PARTITIONS = 4  # of a multiprocessor; each has a quarter of the registers
_SHARED_UNIT = 128
_RESERVED_SHARED = 1 << 10  # of each block, for the system


@dataclass(frozen=True)
class Resources:
    """What one kernel takes.

    Args:
        registers: of a thread, at launch.
        local_bytes: of a thread's memory outside registers; spills are in it.
        static_shared_bytes, dynamic_shared_bytes: of a block.
        blocks_per_sm: how many blocks a multiprocessor holds at a time.
        occupancy: their threads, of those that it could hold.
        limit: what allows no more blocks: ``"registers"``, ``"shared memory"``, ``"threads"`` or ``"blocks"``.
        instructions: how often each instruction that multiplies or moves tiles occurs, such as
            ``{"HGMMA.64x128x16": 4, "UTMALDG.3D": 2, "STG.128": 8}``; memory's have the bits of one access.
    """

    registers: int
    local_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    blocks_per_sm: int
    occupancy: float
    limit: str
    instructions: dict[str, int]


def resources_of(binary: Binary) -> Resources:
    """Examine ``binary`` with ``cuobjdump`` and ``nvdisasm``.

    Raises:
        Unsupported: this machine has no such tools; the triton wheel brings them.
        RuntimeError: they cannot read the cubin.
    """
    arch = arch_named(binary.spec.arch)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(binary.cubin)
        usage = _run("cuobjdump", "--dump-resource-usage", str(cubin))
        assembly = _run("nvdisasm", "-c", str(cubin))
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    if len(found) != 4:
        raise RuntimeError(f"cuobjdump says nothing of {binary.entry}: {usage.strip()}")
    # From Hopper on, the tool counts what the system reserves.
    static = max(0, found["SHARED"] - (_RESERVED_SHARED if arch.capability >= (9, 0) else 0))
    blocks, limit = occupancy(arch, binary.threads, found["REG"], static + binary.shared_bytes)
    return Resources(
        registers=found["REG"],
        local_bytes=found["STACK"] + found["LOCAL"],
        static_shared_bytes=static,
        dynamic_shared_bytes=binary.shared_bytes,
        blocks_per_sm=blocks,
        occupancy=blocks * _up(binary.threads, _WARP) / arch.threads_per_sm,
        limit=limit,
        instructions=dict(sorted(instructions(assembly).items())),
    )


def occupancy(arch: Arch, threads: int, registers: int, shared_bytes: int) -> tuple[int, str]:
    """How many blocks of ``threads`` threads a multiprocessor holds, and what allows no more.

    Args:
        registers: of a thread.
        shared_bytes: of a block, static and dynamic.
    """
    warps = -(-threads // _WARP)
    of_warp = _up(max(registers, 1) * _WARP, _REGISTER_UNIT)
    by_registers = arch.registers_per_sm // _PARTITIONS // of_warp * _PARTITIONS // warps
    if of_warp * _up(warps, _PARTITIONS) > arch.registers_per_sm:
        by_registers = 0
    limits = {
        "registers": by_registers,
        "shared memory": arch.shared_bytes_per_sm // _up(shared_bytes + _RESERVED_SHARED, _SHARED_UNIT),
        "threads": arch.threads_per_sm // _WARP // warps,
        "blocks": arch.blocks_per_sm,
    }
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_MULTIPLY = re.compile(r"(?:[HIDQO]G?MMA|UTC\w*MMA)\b")
_MOVE = re.compile(r"(?:LDGSTS|LDG|STG|LDL|STL|LDS|STS|RED|REDG|ATOM|ATOMG)\b")
_TILE = re.compile(r"(?:UTMALDG|UTMASTG|UTMAREDG|UBLKCP|LDSM|STSM|LDTM|STTM|UTCCP)\b")


def instructions(assembly: str) -> Counter[str]:
    """Count the instructions that multiply or move tiles in what ``nvdisasm`` prints."""
    counts: Counter[str] = Counter()
    for name in _INSTRUCTION.findall(assembly):
        kind, *modifiers = name.split(".")
        if _MULTIPLY.match(name):
            counts[".".join([kind, *modifiers[:1]])] += 1
        elif _TILE.match(name):
            dimensions = [each for each in modifiers if re.fullmatch(r"[1-5]D", each)]
            counts[".".join([kind, *dimensions])] += 1
        elif _MOVE.match(name):
            counts[f"{kind}.{_bits(modifiers)}"] += 1
    return counts


def _bits(modifiers: list[str]) -> int:
    """Of one access; 32 where nothing else is said."""
    widths = (re.fullmatch(r"[US]?(8|16|32|64|128|256)", modifier) for modifier in modifiers)
    return next((int(width[1]) for width in widths if width), 32)


def _run(name: str, *arguments: str) -> str:
    done = subprocess.run([str(tool(name)), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip()}")
    return done.stdout


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
