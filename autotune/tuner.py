"""The tuner: answers from the store, shares a budget among the rest, lets one process tune at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

import torch

from dmuon.autotune.answers import choice_of
from dmuon.autotune.contest import Contest, Measures
from dmuon.autotune.costs import operations
from dmuon.autotune.measure import Bench, device_of, operations_per_ms
from dmuon.autotune.report import Outcome, Progress, Report
from dmuon.kernels.backends import BACKENDS
from dmuon.kernels.candidates import ns_candidates, plain_choice
from dmuon.kernels.choose import NSChoice, Problem
from dmuon.kernels.coefficients import CoefficientSet, coefficients_of
from dmuon.kernels.precision import PRECISIONS
from dmuon.kernels.reference import tolerance
from dmuon.tuning_cache import Claim, Store, Trial

CLAIM_S = 120.0
"""A claim lives this long without a sign of life, which its holder gives before each run."""

_POLL_S = 0.2
_LEAST_RUNS = 4
"""Runs below which a problem is not begun: the plain and the heuristic choice, each warmed up and timed."""


def tune(
    problems: Iterable[Problem],
    *,
    store: Store,
    budget_s: float,
    coefficients: CoefficientSet | None = None,
    force: bool = False,
    backends: Sequence[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Find and store the fastest correct choice for each problem; see :meth:`Tuner.tune`."""
    tuner = Tuner(store, coefficients=coefficients, force=force, backends=backends, progress=progress)
    return tuner.tune(problems, budget_s)


class Tuner:
    """Tunes problems under a time budget. ``report`` grows as problems finish, and outlives a Ctrl-C.

    Args:
        store: where trials are looked up and kept.
        coefficients: needed for problems whose coefficients have no name; they must have the problems' key.
        force: tune again what the store already answers.
        backends: try these alone (the plain torch form is timed all the same, as the yardstick).
        progress: called at every step; must be quick.
        bench: makes a problem's inputs and clock; replaceable, as ``now`` and ``sleep`` are, by a simulation.
        rate: operations per millisecond to expect of a problem's device; measured by default.
    """

    def __init__(
        self,
        store: Store,
        *,
        coefficients: CoefficientSet | None = None,
        force: bool = False,
        backends: Sequence[str] | None = None,
        progress: Callable[[Progress], None] | None = None,
        bench: Callable[[Problem, CoefficientSet], Measures] = Bench,
        rate: Callable[[Problem], float] = operations_per_ms,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.report = Report()
        self._store, self._coefficients, self._force, self._backends = store, coefficients, force, backends
        self._progress, self._bench, self._rate, self._now, self._sleep = progress, bench, rate, now, sleep
        self._rates: dict[tuple[str, str], float] = {}
        self._total = 0

    def tune(self, problems: Iterable[Problem], budget_s: float) -> Report:
        """Tune ``problems`` in about ``budget_s`` seconds, never more than one run over.

        Small problems come first, so that a short budget tunes as many as it can; each gets a share of what
        is left by its predicted cost. A problem that another process is tuning is waited for, last and within
        the budget. Finished problems are stored one by one.

        Raises:
            ValueError: as :meth:`check` says; nothing has been tuned then.
            KeyboardInterrupt: passed on after storing what is certain: of a problem in progress, the samples
                of its candidates if all of them had been checked.
        """
        problems = list(dict.fromkeys(problems))
        self.check(problems, budget_s)
        sets = {problem: self._set_of(problem) for problem in problems}
        self.report = Report()
        self._total = len(problems)
        start = self._now()
        try:
            self._tune(sets, start, start + budget_s)
        finally:
            self.report.elapsed_s = self._now() - start
            self.report.outcomes.sort(key=lambda outcome: problems.index(outcome.problem))
        return self.report

    def check(self, problems: Iterable[Problem], budget_s: float) -> None:
        """Raise ValueError if :meth:`tune` would have to: a problem is for another device, its coefficients
        are unknown, a backend is unknown or cannot run there, or the budget is not positive."""
        if not budget_s > 0:
            raise ValueError(f"budget_s must be a positive number of seconds, got {budget_s!r}")
        for problem in problems:
            self._set_of(problem)
            self._check_backends(device_of(problem))

    def _tune(self, sets: dict[Problem, CoefficientSet], start: float, deadline: float) -> None:
        waiting = []
        for problem in sets:
            stored = () if self._force else usable_trials(self._store, problem)
            if stored:
                self._finish(Outcome(problem, "stored", stored))
            else:
                waiting.append(problem)
        began = time.time()
        waiting = [each for each in sorted(waiting, key=_work) if self._affordable(each, deadline)]
        while waiting:
            others = []
            for index, problem in enumerate(waiting):
                stored = usable_trials(self._store, problem, since=began if self._force else 0.0)
                if stored:
                    self._finish(Outcome(problem, "stored", stored))
                    continue
                claim = self._store.claim(claim_key(problem), CLAIM_S)
                if claim is None:
                    others.append(problem)
                    continue
                with claim:
                    if self._affordable(problem, deadline):
                        share = self._share(problem, waiting[index:], deadline - self._now())
                        self._finish(self._compete(problem, sets[problem], self._now() + share, claim))
            waiting = others
            if waiting and not self._wait(waiting, deadline):
                return

    def _wait(self, waiting: list[Problem], deadline: float) -> bool:
        """Sleep a little; ``False`` when the budget is over, with outcomes that say so."""
        if self._now() < deadline:
            self._tell(Progress(waiting[0], "waiting", self._fraction(0.0)))
            self._sleep(_POLL_S)
            return True
        for problem in waiting:
            self._finish(Outcome(problem, "not reached", reason="another process is tuning it"))
        return False

    def _affordable(self, problem: Problem, deadline: float) -> bool:
        """Whether at least the plain and the heuristic choice can be timed; if not, an outcome says so."""
        needed_s = self._needed_s(problem)
        if needed_s <= deadline - self._now():
            return True
        reason = f"needs about {seconds_text(needed_s)} for a first answer"
        self._finish(Outcome(problem, "not reached", reason=reason))
        return False

    def _share(self, problem: Problem, remaining: Sequence[Problem], seconds: float) -> float:
        """What it needs, and of what nobody needs a part: half by cost, half evenly, for the small ones' sake."""
        spare = max(seconds - sum(map(self._needed_s, remaining)), 0.0)
        by_cost = _work(problem) / sum(map(_work, remaining))
        share = self._needed_s(problem) + spare * (by_cost + 1 / len(remaining)) / 2
        return min(share, seconds)

    def _needed_s(self, problem: Problem) -> float:
        kind = (problem.device, problem.dtype)
        if kind not in self._rates:
            self._rates[kind] = self._rate(problem)
        return _LEAST_RUNS * _work(problem) / self._rates[kind] / 1e3

    def _compete(
        self, problem: Problem, coefficients: CoefficientSet, deadline: float, claim: Claim
    ) -> Outcome:
        began = refreshed = self._now()
        candidates = ns_candidates(problem, coefficients, self._backends)
        if not candidates:
            reason = f"none of the backends {', '.join(self._backends or ())} takes this shape"
            return Outcome(problem, "failed", reason=reason)
        self._tell(Progress(problem, "inputs", self._fraction(0.0)))
        try:
            bench = self._bench(problem, coefficients)
        except (RuntimeError, MemoryError) as error:
            return Outcome(problem, "failed", reason=f"its inputs do not fit: {error}")

        def watch(stage: str, choice: NSChoice) -> None:
            nonlocal refreshed
            if self._now() - refreshed > CLAIM_S / 20:
                claim.refresh()
                refreshed = self._now()
            best = contest.best
            spent = (self._now() - began) / max(deadline - began, 1e-9)
            known = (None, None) if best is None else (best.choice, best.median_ms)
            self._tell(Progress(problem, stage, self._fraction(spent), choice, *known))

        contest = Contest(
            problem,
            bench,
            plain_choice(problem),
            candidates,
            tolerance=tolerance(PRECISIONS[problem.dtype]),
            now=self._now,
            deadline=deadline,
            watch=watch,
        )
        try:
            contest.run()
        except KeyboardInterrupt:
            if contest.timing:
                self._finish(self._kept(contest))
            raise
        return self._kept(contest)

    def _kept(self, contest: Contest) -> Outcome:
        """Record the contest's trials and say how it ended."""
        problem, candidates = contest.problem, len(contest.entrants)
        trials = tuple(contest.trials(created_at=time.time()))
        self._store.record(trials)
        if not trials:
            return Outcome(problem, "not reached", reason="the time ran out before a first answer")
        if all(trial.status != "ok" for trial in trials):
            reason = f"no candidate works: {trials[0].message}"
            return Outcome(problem, "failed", (), trials, candidates, reason)
        return Outcome(problem, "tuned", usable_trials(self._store, problem), trials, candidates)

    def _check_backends(self, device: torch.device) -> None:
        for name in self._backends or ():
            if name not in BACKENDS:
                raise ValueError(f"backends: no backend is called {name!r}; there are {', '.join(BACKENDS)}")
            if reason := BACKENDS[name].unavailable(device):
                raise ValueError(f"backends: {name} cannot run on {device}: {reason}")

    def _set_of(self, problem: Problem) -> CoefficientSet:
        given = self._coefficients
        found = given if given is not None and given.key == problem.coefficients else None
        found = found or coefficients_of(problem.coefficients)
        if found is None:
            raise ValueError(f"coefficients: pass the set whose key is {problem.coefficients!r}")
        return found

    def _finish(self, outcome: Outcome) -> None:
        self.report.outcomes.append(outcome)
        self._tell(Progress(outcome.problem, "done", self._fraction(0.0), outcome=outcome))

    def _fraction(self, of_this: float) -> float:
        return min((len(self.report.outcomes) + min(of_this, 1.0)) / self._total, 1.0)

    def _tell(self, event: Progress) -> None:
        if self._progress is not None:
            self._progress(event)


def usable_trials(store: Store, problem: Problem, since: float = 0.0) -> tuple[Trial, ...]:
    """The stored trials of exactly ``problem`` that may be used now, not older than ``since``."""
    found = store.trials(**asdict(problem), status="ok")
    return tuple(trial for trial in found if trial.created_at >= since and choice_of(trial) is not None)


def claim_key(problem: Problem) -> str:
    """What the process that tunes ``problem`` claims."""
    shape = f"{problem.batch}x{problem.m}x{problem.n}"
    return f"{problem.op} {shape} {problem.dtype} {problem.coefficients} {problem.device}"


def seconds_text(seconds: float) -> str:
    """``75`` → ``"1m15s"``; below ten seconds with one decimal."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "m"), (rest, "s")]
    return "".join(f"{value}{unit}" for value, unit in parts if value) or "0s"


def _work(problem: Problem) -> float:
    return operations(problem, plain_choice(problem))
