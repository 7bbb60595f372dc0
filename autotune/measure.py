"""One problem's inputs and clock: checks a candidate against known answers, and times it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from dmuon.autotune.probes import Probes
from dmuon.kernels.choose import NSChoice, Problem, computing_dtype, device_key
from dmuon.kernels.coefficients import CoefficientSet
from dmuon.kernels.precision import PRECISIONS
from dmuon.kernels.run import run_ns

_ROTATED_BYTES = 256 << 20
"""The most memory that copies of the input may take to outrun the last-level cache."""


class Bench:
    """Runs candidates on one problem: :meth:`check` for their numbers, :meth:`time` for their speed.

    Raises:
        ValueError: the problem belongs to another device than this process computes on.
    """

    def __init__(self, problem: Problem, coefficients: CoefficientSet) -> None:
        self.device = device_of(problem)
        self._problem, self._coefficients = problem, coefficients
        self._dtype = computing_dtype(problem)
        self._probes = Probes(problem, coefficients, self.device)
        self._clock = cuda_ms if self.device.type == "cuda" else wall_ms
        self._rotation = self._rotate()

    @property
    def checks(self) -> int:
        """How many runs a whole check takes: one, or more where a small batch cannot hold every spectrum."""
        return len(self._probes.batches)

    def check(self, choice: NSChoice, part: int) -> tuple[dict[str, float], float]:
        """Run part ``part`` of the check.

        Returns:
            The relative error against the exact result, by spectrum, and the milliseconds of the run.

        Raises:
            Exception: whatever the candidate raises; RuntimeError if it wrote to its input.
        """
        results: list[Tensor] = []
        taken = self._clock(lambda: results.append(self._run(choice, self._probes.batches[part])))
        if not self._probes.intact(part):
            self._probes.refill(part)
            raise RuntimeError("it wrote to its input")
        return self._probes.errors(part, results[0]), taken

    def time(self, choice: NSChoice, batch: int | None = None) -> float:
        """Milliseconds of one run on the next input of the rotation (on its first ``batch`` matrices)."""
        G = next(self._rotation)[:batch]
        return self._clock(lambda: self._run(choice, G))

    def _run(self, choice: NSChoice, G: Tensor) -> Tensor:
        return run_ns(G, choice, self._coefficients, self._dtype, strict=True)

    def _rotate(self) -> Iterator[Tensor]:
        """Inputs in turn, enough of them that each has left the cache when it comes round again."""
        batches = list(self._probes.batches)
        size = batches[0].nbytes
        wanted = math.ceil(min(2 * cache_bytes(self.device), _ROTATED_BYTES) / size)
        copies = max(0, min(wanted, 64) - len(batches))
        return cycle(batches + [batches[0].clone() for _ in range(copies)])


def device_of(problem: Problem) -> torch.device:
    """The device that ``problem`` names, if this process can compute on it.

    Raises:
        ValueError: it is another machine's, another GPU model, or another thread count.
    """
    kind = problem.device.split(":")[0]
    if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()):
        here = device_key(kind)
        if here == problem.device:
            return torch.device(kind)
        raise ValueError(f"device: the problem is for {problem.device!r}, this process computes on {here!r}")
    raise ValueError(f"device: {problem.device!r} cannot be tuned here; use a CPU or an available CUDA GPU")


def wall_ms(run: Callable[[], object]) -> float:
    """Milliseconds of ``run`` by the performance counter."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def cuda_ms(run: Callable[[], object]) -> float:
    """Milliseconds that ``run`` keeps the current stream busy, by CUDA events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def cache_bytes(device: torch.device) -> int:
    """The size of the last-level cache; 32 MiB where a CPU does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 20


def operations_per_ms(problem: Problem) -> float:
    """What a plain matrix product in the problem's precision reaches on its device, in operations per ms."""
    device, dtype = device_of(problem), PRECISIONS[problem.dtype]
    side = 8192 if device.type == "cuda" else 1024
    if device.type == "cpu" and dtype == torch.float16:
        dtype = torch.float32  # what fp16 is emulated in
    A = torch.ones(side, side, dtype=dtype, device=device)
    clock = cuda_ms if device.type == "cuda" else wall_ms
    clock(lambda: A @ A)
    return 2.0 * side**3 / min(clock(lambda: A @ A) for _ in range(3))
