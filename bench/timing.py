"""Clocks and interleaved rounds. Needs torch alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles

import torch


def milliseconds(run: Callable[[], object], repeats: int, device: str) -> float:
    """Mean milliseconds of ``run`` over ``repeats`` runs in a row: wall time, to the end of GPU work."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / repeats


SAMPLE_MS = 4.0
"""What a quicker run is repeated for, to be one sample."""


def typical_ms(run: Callable[[], object], rounds: int, device: str) -> float:
    """Median milliseconds of ``run`` over ``rounds`` samples."""
    repeats = _repeats(run, device)
    return median(milliseconds(run, repeats, device) for _ in range(rounds))


def in_turn(
    runs: Mapping[str, Callable[[], object]], rounds: int, limit_s: float, device: str
) -> dict[str, float]:
    """Median milliseconds of each, all of them in every round."""
    samplers = {name: partial(milliseconds, run, _repeats(run, device), device) for name, run in runs.items()}
    return {name: median(times) for name, times in interleave(samplers, rounds, limit_s, 2).items()}


def host_us(run: Callable[[], object], device: str) -> float:
    """Median microseconds until ``run`` returns to the host, with an idle device before it."""
    samples = []
    for _ in range(20):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e6)
    return median(samples)


def _repeats(run: Callable[[], object], device: str) -> int:
    return max(1, int(SAMPLE_MS / max(milliseconds(run, 2, device), 1e-3)))


@dataclass(frozen=True)
class Ratio:
    """How many times one contender takes the time of another: of medians; quartiles over the rounds."""

    of_medians: float
    quartile_1: float
    quartile_3: float


def ratio(times: list[float], reference: list[float]) -> Ratio:
    """``times`` over ``reference``, two contenders' samples of the same rounds."""
    low, _, high = quantiles((a / b for a, b in zip(times, reference, strict=True)), n=4, method="inclusive")
    return Ratio(median(times) / median(reference), low, high)


def interleave(
    samplers: Mapping[str, Callable[[], float]], rounds: int, limit_s: float, least: int
) -> dict[str, list[float]]:
    """Samples of each, taken in turn: every round samples all, starting with another one than the last.

    Stops before ``rounds`` once ``limit_s`` seconds have passed, but not before ``least`` rounds.
    """
    names = list(samplers)
    samples: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.monotonic() + limit_s
    for done in range(rounds):
        if done >= least and time.monotonic() > deadline:
            break
        shift = done % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(samplers[name]())
    return samples
