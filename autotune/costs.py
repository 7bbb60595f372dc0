"""What the orthogonalisation of a batch costs: measured where it was, modelled where it was not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
import torch

from dmuon.autotune.answers import Answers, choice_of, problem_of_trial
from dmuon.kernels.choose import NSChoice, Problem, ProductChoice, device_key, heuristic_choice
from dmuon.kernels.coefficients import CoefficientSet, resolve_coefficients
from dmuon.kernels.precision import PRECISIONS
from dmuon.tuning_cache import Store, shipped_trials

UNCALIBRATED = {
    "cpu": (1 / 1e8, 1 / 1e7, 5e-3),
    "cuda": (1 / 3e11, 1 / 3e9, 5e-3),
}
"""Milliseconds per operation, per byte and per launch before anything was measured: 100 Gop/s and 10 GB/s for
a CPU, 300 Top/s and 3 TB/s for a GPU. Good for ratios between shapes, not for seconds."""


@dataclass(frozen=True)
class Cost:
    """Milliseconds of one batch. ``source``: "measured" at this very shape and batch; "model", calibrated on
    what was measured on this device; "default", the model with :data:`UNCALIBRATED` constants."""

    ms: float
    source: Literal["measured", "model", "default"]


class CostTable:
    """Costs on one device, in one precision, with one coefficient set, as known when it was made.

    The model is t = ops·x + bytes·y + launches·z with x, y, z ≥ 0 by least squares of the relative error over
    all usable trials. Near a measured shape it only carries the measured time over.

    Args:
        store: the user's trials; the shipped ones are added.
        device: a device of this process, or a device key.
        dtype: the working precision, as "fp32".
        coefficients: as for ``gram_ns``.

    Raises:
        ValueError: an unknown precision or unknown coefficients.
    """

    def __init__(
        self,
        store: Store,
        device: torch.device | str,
        dtype: str,
        coefficients: str | CoefficientSet = "polar_express",
    ) -> None:
        if dtype not in PRECISIONS:
            raise ValueError(f"dtype must be one of {', '.join(PRECISIONS)}, got {dtype!r}")
        self.device = device_key(device) if isinstance(device, torch.device) else device
        self.dtype, self.coefficients = dtype, resolve_coefficients(coefficients)
        shipped = [
            trial
            for trial in shipped_trials(self.device)
            if (trial.dtype, trial.coefficients, trial.op) == (dtype, self.coefficients.key, "gram_ns")
        ]
        own = store.trials(op="gram_ns", device=self.device, dtype=dtype, coefficients=self.coefficients.key)
        self._answers = Answers([*shipped, *own])
        self._rates = self._calibrate()

    @property
    def calibrated(self) -> bool:
        """Whether anything was measured for this device, precision and coefficients."""
        return bool(self._answers.usable)

    def ms(self, m: int, n: int, batch: int = 1) -> Cost:
        """The cost of ``batch`` matrices of m×n (either side first), orthogonalised as they would be now."""
        key = self.coefficients.key
        problem = Problem("gram_ns", batch, min(m, n), max(m, n), self.dtype, self.device, key)
        exact = self._answers.exact(problem)
        if exact is not None and exact.median_ms:
            return Cost(exact.median_ms, "measured")
        near = self._answers.nearest(problem)
        choice = None if near is None else choice_of(near)
        if near is not None and near.median_ms and choice is not None:
            there = self._modelled(problem_of_trial(near), choice)
            return Cost(near.median_ms * self._modelled(problem, choice) / there, "model")
        cost = self._modelled(problem, heuristic_choice(problem, self.coefficients))
        return Cost(cost, "model" if self.calibrated else "default")

    def _modelled(self, problem: Problem, choice: NSChoice) -> float:
        return float(np.dot(features(problem, choice), self._rates))

    def _calibrate(self) -> np.ndarray:
        rows, times = [], []
        for trial in self._answers.usable:
            choice = choice_of(trial)
            if choice is not None and trial.median_ms:
                rows.append(features(problem_of_trial(trial), choice))
                times.append(trial.median_ms)
        if not rows:
            return np.array(UNCALIBRATED["cuda" if self.device.startswith("cuda") else "cpu"])
        # Divided by its time, each row asks for 1: the error that is minimised is relative.
        return nonnegative_least_squares(np.array(rows) / np.array(times)[:, None], np.ones(len(times)))


def operations(problem: Problem, choice: NSChoice) -> float:
    """Arithmetic operations of one run.

    T steps in s segments take s products of each kind with the long side and 4T − 3s in Gram space; a backend
    that exploits symmetry halves all but ``apply``.
    """
    return features(problem, choice)[0]


def features(problem: Problem, choice: NSChoice) -> tuple[float, float, float]:
    """Operations, bytes moved and kernel launches of one run of ``choice`` on ``problem``."""
    m, n, batch = problem.m, problem.n, problem.batch
    steps = int(problem.coefficients.split(":")[1])
    segments = steps if choice.method == "standard" else 1 + len(choice.restarts)
    squares = 4 * steps - 3 * segments
    long_ops = segments * 2 * m * m * n * (_half(choice.gram) + 1)
    square_ops = squares * 2 * m**3 * _half(choice.symmetric_product)
    moved = segments * (3 * m * n + 2 * m * m) + squares * 3 * m * m
    launches = (2 * segments + squares) * (batch if choice.loop else 1)
    itemsize = PRECISIONS[problem.dtype].itemsize
    return float(batch * (long_ops + square_ops)), float(batch * moved * itemsize), float(launches)


def nonnegative_least_squares(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x ≥ 0 that minimises ‖A x − b‖, by trying every set of non-zero entries: for a few columns only.

    Ties go to fewer entries, and to earlier columns.
    """
    columns = A.shape[1]
    best, least = np.zeros(columns), np.inf
    scale = np.abs(A).max(axis=0)
    for size in range(1, columns + 1):
        for chosen in map(list, combinations(range(columns), size)):
            part = A[:, chosen] / scale[chosen]
            found, *_ = np.linalg.lstsq(part, b, rcond=None)
            residual = float(np.linalg.norm(part @ found - b))
            if (found >= 0).all() and residual < least * (1 - 1e-9) - 1e-12:
                best, least = np.zeros(columns), residual
                best[chosen] = found / scale[chosen]
    return best


def _half(product: ProductChoice) -> float:
    return 1.0 if product.backend == "torch" else 0.5
