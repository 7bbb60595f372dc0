"""What stored trials answer: which still hold, which choice is best, what serves a shape nobody timed."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from dmuon.autotune.search import SAMPLES
from dmuon.autotune.versions import valid
from dmuon.kernels.backends import BACKENDS
from dmuon.kernels.candidates import plain_choice
from dmuon.kernels.choose import NEAR_SQUARE, NSChoice, Problem
from dmuon.kernels.gpu.arch import arch_of
from dmuon.tuning_cache import Trial

NEAR = 2.0
"""A trial answers for another shape if batch, m and n are each within this factor."""


def problem_of_trial(trial: Trial) -> Problem:
    """The problem that ``trial`` tried. Raises ValueError if it is none of ours."""
    return Problem(trial.op, trial.batch, trial.m, trial.n, trial.dtype, trial.device, trial.coefficients)


def choice_of(trial: Trial) -> NSChoice | None:
    """The choice of an ok trial that may be used now; ``None`` if it is out of date or makes no sense.

    Stored trials are data from outside (a file somebody imported): everything about them is checked.
    """
    if trial.op != "gram_ns" or trial.status != "ok" or not valid(trial):
        return None
    try:
        problem = problem_of_trial(trial)
        choice = NSChoice.from_config(trial.config)
    except (ValueError, TypeError):
        return None
    consistent = "+".join(choice.backends) == trial.backend and _runs_in_range(choice, problem)
    return choice if consistent and is_legal(choice, problem) else None


def is_legal(choice: NSChoice, problem: Problem, *, listed: bool = False) -> bool:
    """Whether every backend of ``choice`` runs here and takes its configuration.

    ``listed``: each configuration must also be among those its backend offers for this very shape, which is
    what makes a choice found at another shape safe.
    """
    device = torch.device(problem.device.split(":")[0])
    arch = arch_of(device)
    uses = {"gram": choice.gram, "symmetric_product": choice.symmetric_product, "apply": choice.apply}
    if choice.whole is not None:
        uses["gram_ns"] = choice.whole
    for op, product in uses.items():
        backend = BACKENDS.get(product.backend)
        if backend is None or backend.unavailable(device) is not None:
            return False
        try:
            backend.check(op, product.config)
        except ValueError:
            return False
        if listed:
            offered = backend.configs(op, problem.m, problem.n, problem.dtype, arch)
            if dict(product.config) not in offered:
                return False
    return True


def best_trial(trials: Iterable[Trial]) -> Trial | None:
    """The fastest of ``trials``, all of one problem and usable.

    Times are comparable within one run (trials with one ``created_at``) alone, and there among the candidates
    that stayed to the end. Of several runs, the newest counts that took all its samples, or else took the most.
    """
    runs: dict[float, list[Trial]] = {}
    for trial in trials:
        runs.setdefault(trial.created_at, []).append(trial)
    if not runs:
        return None
    run = max(runs.values(), key=lambda run: (min(_most_samples(run), SAMPLES), run[0].created_at))
    finalists = [trial for trial in run if 2 * trial.samples >= _most_samples(run)]
    return min(finalists, key=lambda trial: trial.median_ms or math.inf)


def plain_trial(trials: Iterable[Trial], like: Trial) -> Trial | None:
    """The trial of the plain choice in the run of ``like``."""
    plain = plain_choice(problem_of_trial(like)).to_config()
    return next((t for t in trials if t.created_at == like.created_at and t.config == plain), None)


class Answers:
    """The best usable trial of each problem among ``trials``."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        usable: dict[Problem, list[Trial]] = {}
        for trial in trials:
            if choice_of(trial) is not None:
                usable.setdefault(problem_of_trial(trial), []).append(trial)
        self.usable = [trial for group in usable.values() for trial in group]
        self._best = {problem: best for problem, group in usable.items() if (best := best_trial(group))}

    def exact(self, problem: Problem) -> Trial | None:
        """The best trial of exactly ``problem``."""
        return self._best.get(problem)

    def nearest(self, problem: Problem) -> Trial | None:
        """The best trial of the nearest shape whose choice is legal at ``problem``'s too."""
        family = (problem.op, problem.dtype, problem.device, problem.coefficients)
        near = [
            (gap, other)
            for other in self._best
            if (other.op, other.dtype, other.device, other.coefficients) == family
            and (gap := distance(problem, other)) < math.inf
        ]
        for _, other in sorted(near):
            choice = choice_of(self._best[other])
            if choice is not None and is_legal(choice, problem, listed=True):
                return self._best[other]
        return None


def distance(problem: Problem, other: Problem) -> float:
    """How far apart two shapes are, in log₂; infinite beyond :data:`NEAR` or across :data:`NEAR_SQUARE`."""
    if (problem.n < NEAR_SQUARE * problem.m) != (other.n < NEAR_SQUARE * other.m):
        return math.inf
    steps = [
        abs(math.log2(mine / theirs))
        for mine, theirs in ((problem.m, other.m), (problem.n, other.n), (problem.batch, other.batch))
    ]
    return math.hypot(*steps) if max(steps) <= math.log2(NEAR) else math.inf


def _runs_in_range(choice: NSChoice, problem: Problem) -> bool:
    """Keys of coefficient sets read name:steps[:more]; a restart lies between two steps."""
    steps = problem.coefficients.split(":")[1:2]
    return steps[0].isdecimal() and all(k < int(steps[0]) for k in choice.restarts) if steps else False


def _most_samples(run: list[Trial]) -> int:
    return max(trial.samples for trial in run)
