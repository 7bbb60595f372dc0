"""The GPU architectures that kernels are compiled for, and the limits that configurations must respect."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Arch:
    """One compilation target and its limits, from the CUDA C++ Programming Guide's table of compute capabilities.

    Args:
        name: what compilers are told, such as ``"sm_90a"``.
        capability: major and minor compute capability.
        shared_bytes: dynamic shared memory that one block may ask for.
        shared_bytes_per_sm: shared memory of a multiprocessor that blocks divide among them (each block costs
            1 KiB more than it asks for).
        threads_per_sm: resident threads of a multiprocessor.
        blocks_per_sm: resident blocks of a multiprocessor.
    """

    name: str
    capability: tuple[int, int]
    shared_bytes: int
    shared_bytes_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int

    registers_per_sm = 65536
    registers_per_thread = 255
    threads_per_block = 1024


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm_80", (8, 0), 163 << 10, 164 << 10, 2048, 32),
        Arch("sm_86", (8, 6), 99 << 10, 100 << 10, 1536, 16),
        Arch("sm_89", (8, 9), 99 << 10, 100 << 10, 1536, 24),
        Arch("sm_90a", (9, 0), 227 << 10, 228 << 10, 2048, 32),
        Arch("sm_100a", (10, 0), 227 << 10, 228 << 10, 2048, 32),
        Arch("sm_103a", (10, 3), 227 << 10, 228 << 10, 2048, 32),
        Arch("sm_120a", (12, 0), 99 << 10, 100 << 10, 1536, 24),
    )
}
"""By name."""


def arch_of(device: torch.device | str) -> Arch | None:
    """The architecture of a CUDA device; ``None`` for any other device, and for GPUs that no kernel is built for."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return _with_capability(torch.cuda.get_device_capability(device))


def arch_named(name: str) -> Arch:
    """The architecture called ``name``.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in ARCHS:
        raise ValueError(f"arch must be one of {', '.join(ARCHS)}, got {name!r}")
    return ARCHS[name]


@lru_cache
def _with_capability(capability: tuple[int, int]) -> Arch | None:
    return next((arch for arch in ARCHS.values() if arch.capability == capability), None)
