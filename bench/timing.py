"""Clocks and interleaved rounds. Needs torch alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
