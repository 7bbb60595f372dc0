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
        tflops: operations that the result needs, per second, at the larger of the two.
    """

    compute_ms: float
    memory_ms: float
    tflops: float

    @property
    def ms(self) -> float:
        return max(self.compute_ms, self.memory_ms)

    @property
    def bound(self) -> str:
        """``"compute"`` or ``"memory"``."""
        return "compute" if self.compute_ms >= self.memory_ms else "memory"


def symmetric_estimate(device: Device, m: int, n: int, *, batch: int = 1, tile: int = 1) -> Estimate:
    """Of X Xᵀ for ``batch`` half-precision (m, n) matrices X, or of a product of symmetric ones with n = m.

    Args:
        tile: side of the square tiles, one to a multiprocessor at a time, of which those on and below the
            diagonal are computed whole. With 1, tiles cost nothing: the bound of any kernel.
    """
    needed = batch * m * (m + 1) * n
    if tile == 1:
        compute_s = needed / (device.tflops * 1e12)
    else:
        rows = -(-m // tile)
        waves = -(-batch * rows * (rows + 1) // 2 // device.multiprocessors)
        compute_s = waves * 2 * tile**2 * n * device.multiprocessors / (device.tflops * 1e12)
    memory_s = 2 * batch * (m * n + m * m) / (device.gbytes_per_s * 1e9)
    return Estimate(compute_s * 1e3, memory_s * 1e3, needed / max(compute_s, memory_s) / 1e12)
