"""The least time that a product can take on a GPU: by its tensor cores, and by its memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A GPU as its maker describes it: fp16/bf16 tensor cores with fp32 accumulation, without sparsity."""

    name: str
    arch: str
    tflops: float
    gbytes_per_s: float
    multiprocessors: int


DEVICES: tuple[Device, ...] = (
    # NVIDIA A100 80GB SXM, data sheet of June 2021.
    Device("A100", "sm_80", 312.0, 2039.0, 108),
    # NVIDIA Ada GPU architecture, whitepaper v2.1, appendix A.
    Device("RTX 4090", "sm_89", 165.2, 1008.0, 128),
    # NVIDIA H100 SXM, data sheet: half of 1,979 TFLOP/s with sparsity.
    Device("H100", "sm_90a", 989.4, 3350.0, 132),
    # NVIDIA H200 SXM, data sheet: H100's cores, faster memory.
    Device("H200", "sm_90a", 989.4, 4800.0, 132),
    # NVIDIA Blackwell architecture technical brief, HGX B200: half of 4,500 TFLOP/s with sparsity.
    Device("B200", "sm_100a", 2250.0, 8000.0, 148),
)


@dataclass(frozen=True)
class Estimate:
    """Milliseconds at least.

    Args:
        compute_ms: by tensor cores at their peak, each wave of tiles taking as long as a full one.
        memory_ms: by reading each operand and writing the result once at the peak of memory.
        sums_ms: by writing the parts of divided tiles, and reading them in a launch of its own.
        tflops: operations that the result needs, per second, in all that time.
    """

    compute_ms: float
    memory_ms: float
    sums_ms: float
    tflops: float

    @property
    def ms(self) -> float:
        return max(self.compute_ms, self.memory_ms) + self.sums_ms

    @property
    def bound(self) -> str:
        """``"compute"`` or ``"memory"``."""
        return "compute" if self.compute_ms >= self.memory_ms else "memory"


SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Into how many parts the inner dimension of a tile may be divided."""

_SHORTEST = 256
"""What a part keeps of the inner dimension, at least: less would be over before its pipeline is full."""

_LAUNCH_S = 2e-6
"""What a launch after another costs a GPU: assumed."""


def symmetric_estimate(
    device: Device, m: int, n: int, *, batch: int = 1, tile: int = 1, splits: int = 1
) -> Estimate:
    """Of X Xᵀ for ``batch`` half-precision (m, n) matrices X, or of a product of symmetric ones with n = m.

    Args:
        tile: side of the square tiles, one to a multiprocessor at a time, of which those on and below the
            diagonal are computed whole. With 1, tiles cost nothing: the bound of any kernel.
        splits: parts that each tile of an incomplete last wave is divided into, along n.
    """
    needed = batch * m * (m + 1) * n
    memory_s = 2 * batch * (m * n + m * m) / (device.gbytes_per_s * 1e9)
    sums_s = 0.0
    if tile == 1:
        compute_s = needed / (device.tflops * 1e12)
    else:
        rows = -(-m // tile)
        whole, last = divmod(batch * rows * (rows + 1) // 2, device.multiprocessors)
        waves = whole + -(-last * splits // device.multiprocessors) / splits
        compute_s = waves * 2 * tile**2 * n * device.multiprocessors / (device.tflops * 1e12)
        if last and splits > 1:
            parts = last * splits * tile**2 * 4
            sums_s = _LAUNCH_S + 2 * parts / (device.gbytes_per_s * 1e9)
    return Estimate(
        compute_s * 1e3, memory_s * 1e3, sums_s * 1e3, needed / (max(compute_s, memory_s) + sums_s) / 1e12
    )


def best_splits(device: Device, m: int, n: int, tile: int) -> int:
    """The ``splits`` of least estimated time for one (m, n) matrix; 1 if dividing does not pay."""
    offered = [1, *(splits for splits in SPLITS if n >= splits * _SHORTEST)]
    return min(offered, key=lambda splits: symmetric_estimate(device, m, n, tile=tile, splits=splits).ms)


def device_of(arch: str) -> Device | None:
    """A GPU of ``arch`` to reckon with where none is at hand: the first of :data:`DEVICES`."""
    return next((device for device in DEVICES if device.arch == arch), None)
