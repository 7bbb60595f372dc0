"""Measure whole steps of an owner on this device, for :class:`~dmuon.planner.StepCosts` to know."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from dmuon.autotune.measure import cuda_ms, wall_ms
from dmuon.autotune.search import SAMPLES
from dmuon.autotune.versions import versions_now
from dmuon.batching import Update, batch_sizes
from dmuon.kernels.backends import source_hash
from dmuon.kernels.choose import NSChoice, Problem
from dmuon.kernels.coefficients import CoefficientSet
from dmuon.kernels.gram_ns import choose_ns, gram_ns
from dmuon.kernels.precision import PRECISIONS
from dmuon.kernels.reference import relative_error, tolerance
from dmuon.matrix import Matrix
from dmuon.matrix_step import MatrixStep
from dmuon.options import VARIANTS
from dmuon.planner.costs import STEP, StepCosts
from dmuon.planner.items import Item, Shape
from dmuon.tuning_cache import Store, Trial

WARM_UP = 3
"""Steps before those that are timed: a CUDA graph is captured in the third."""

_GROUP = {
    "lr": 1.0,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "adjust_lr": "none",
    "maximize": False,
    **VARIANTS,
}


@dataclass(frozen=True)
class Profile:
    """What :func:`profile` did: how many steps it measured, and the (rows, cols, batch) that it had no time for."""

    measured: int
    left: tuple[tuple[int, int, int], ...]


def profile(
    items: Iterable[Item],
    store: Store,
    device: torch.device | str,
    precision: str,
    coefficients: str | CoefficientSet = "polar_express",
    *,
    budget_s: float = 60.0,
    now: Callable[[], float] = time.monotonic,
) -> Profile:
    """Time the optimizer's step of each distinct shape among ``items``, in batches of 1, 2, 4, … and of the most that
    a rank could hold, and store the times. What the store knows already, run as it would be run now, is not measured.

    Each is checked against Newton–Schulz in standard form and fp32 (fp64 for fp64); one that is wrong is stored as
    rejected. Small batches come first. Call it on one process of a machine, after tuning.

    Args:
        items: of the model (:func:`~dmuon.planner.items_of`).
        store: of trials.
        device: of this process.
        precision: of Newton–Schulz, as "fp32".
        coefficients: of Newton–Schulz.
        budget_s: begin no step that is expected to end later than this.
        now: the clock that the budget goes by.

    Raises:
        ValueError: an unknown precision or unknown coefficients, or ``budget_s`` is not positive.
    """
    if not budget_s > 0:
        raise ValueError(f"budget_s must be a positive number of seconds, got {budget_s!r}")
    device = torch.device(device)
    deadline = now() + budget_s
    costs = StepCosts(store, device, precision, coefficients)
    known = [(t.m, t.n, t.batch, NSChoice.from_config(t.config)) for t in _stored(store, costs)]
    measured, left = 0, []
    for rows, cols, batch in _batches(items, costs):
        m, n = sorted((rows, cols))
        table = costs.table
        problem = Problem("gram_ns", batch, m, n, precision, table.device, table.coefficients.key)
        choice = choose_ns(problem, table.coefficients)
        if (rows, cols, batch, choice) in known:
            continue
        expected_s = (WARM_UP + SAMPLES + 1) * costs.cost(rows, cols, batch).ms / 1e3
        if now() + expected_s > deadline:
            left.append((rows, cols, batch))
            continue
        store.record([_measure(rows, cols, problem, choice, table.coefficients, device)])
        measured += 1
    return Profile(measured, tuple(left))


def _stored(store: Store, costs: StepCosts) -> list[Trial]:
    table = costs.table
    trials = store.trials(
        op=STEP, device=table.device, dtype=table.dtype, coefficients=table.coefficients.key
    )
    return [trial for trial in trials if trial.batch in costs.measured.get((trial.m, trial.n), {})]


def _batches(items: Iterable[Item], costs: StepCosts) -> list[tuple[int, int, int]]:
    """(rows, cols, batch) to measure, the quickest first."""
    totals: dict[Shape, int] = {}
    for item in items:
        for count, rows, cols in item.stacks:
            totals[rows, cols] = totals.get((rows, cols), 0) + count
    found = []
    for (rows, cols), total in totals.items():
        most = max(batch_sizes(total, rows, cols))
        found += [
            (rows, cols, batch) for batch in sorted({*(1 << k for k in range(most.bit_length())), most})
        ]
    return sorted(found, key=lambda each: costs.cost(*each).ms)


def _measure(
    rows: int,
    cols: int,
    problem: Problem,
    choice: NSChoice,
    coefficients: CoefficientSet,
    device: torch.device,
) -> Trial:
    """One trial: the error of a first step from zero, which is the orthogonalised gradient, and the times of more."""
    dtype = torch.float64 if problem.dtype == "fp64" else torch.float32
    rules = {"none": lambda rows, cols: 1.0}
    group = {**_GROUP, "coefficients": coefficients, "precision": problem.dtype}
    updates = []
    for _ in range(problem.batch):
        weight = torch.zeros(rows, cols, dtype=dtype, device=device)
        matrix = Matrix((rows, cols), rows, cols)
        updates.append(Update(weight, torch.randn_like(weight), torch.zeros_like(weight), matrix, group))
    step = MatrixStep(rules)
    clock = cuda_ms if device.type == "cuda" else wall_ms
    with torch.no_grad():
        deque(step.run(updates), maxlen=0)
        last, exactly = updates[-1], "fp64" if dtype == torch.float64 else "fp32"
        exact = gram_ns(last.gradient, coefficients=coefficients, precision=exactly, method="standard")
        error = float(relative_error(-last.parameter, exact.double()))
        right = error <= tolerance(PRECISIONS[problem.dtype])  # not so for NaN
        times = [clock(lambda: deque(step.run(updates), maxlen=0)) for _ in range(WARM_UP + SAMPLES)]
    samples = times[WARM_UP:]
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Trial(
        op=STEP,
        batch=problem.batch,
        m=rows,
        n=cols,
        dtype=problem.dtype,
        device=problem.device,
        coefficients=problem.coefficients,
        backend="+".join(choice.backends),
        config=choice.to_config(),
        status="ok" if right else "rejected",
        error=error if error < float("inf") else None,
        tolerance=tolerance(PRECISIONS[problem.dtype]),
        median_ms=median,
        spread=(high - low) / median,
        samples=SAMPLES,
        message="" if right else f"the step is off by {error:.1e}",
        versions=versions_now(choice.backends, problem.device),
        source_hash=source_hash(choice.backends),
        created_at=time.time(),
    )
