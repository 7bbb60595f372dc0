"""One problem's candidates against each other: screened, checked, timed, and written up as trials."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from dmuon.autotune.search import successive_halving
from dmuon.autotune.versions import versions_now
from dmuon.kernels.backends import source_hash
from dmuon.kernels.choose import NSChoice, Problem
from dmuon.tuning_cache import Trial

_SCREEN_SHARE = 0.3
"""Of the time there is, what screening on part of the batch may take."""

_HOPELESS = 2.0
"""A candidate this many times slower than another is out, before its check is complete."""


class Measures(Protocol):
    """What a contest needs of :class:`~dmuon.autotune.measure.Bench`."""

    @property
    def checks(self) -> int: ...

    def check(self, choice: NSChoice, part: int) -> tuple[dict[str, float], float]: ...

    def time(self, choice: NSChoice, batch: int | None = None) -> float: ...


@dataclass(eq=False)
class Entrant:
    """A candidate and what is known of it: ``errors`` by spectrum, ``samples`` in milliseconds."""

    choice: NSChoice
    status: str = "unchecked"
    errors: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    bound: float | None = None
    samples: list[float] = field(default_factory=list)
    estimate_ms: float = math.inf
    warm: bool = False
    message: str = ""

    @property
    def median_ms(self) -> float:
        """Of its samples; infinite without any or when it is out."""
        return statistics.median(self.samples) if self.samples and self.status == "ok" else math.inf


class Contest:
    """Finds the fastest correct candidate by ``deadline``, give or take one run.

    The plain choice sets the yardstick of the check and runs to the end, so that speed-ups come from one run.
    The heuristic choice is required too, unless far behind: else a winner could be worse than no tuning.

    Args:
        problem: what the candidates solve.
        bench: the problem's inputs and clock.
        plain: the yardstick.
        candidates: the heuristic choice first; the plain one may be among them.
        tolerance: the relative error that is fine in any case.
        now: a clock in seconds, on which ``deadline`` is a moment.
        watch: called before each run with what is done ("screening", "checking", "timing") and the choice.
    """

    def __init__(
        self,
        problem: Problem,
        bench: Measures,
        plain: NSChoice,
        candidates: Sequence[NSChoice],
        *,
        tolerance: float,
        now: Callable[[], float],
        deadline: float,
        watch: Callable[[str, NSChoice], None],
    ) -> None:
        self.problem, self._bench, self._tolerance = problem, bench, tolerance
        self._now, self._deadline, self._watch = now, deadline, watch
        self.plain = Entrant(plain)
        others = [Entrant(choice) for choice in candidates if choice != plain]
        self.heuristic = self.plain if not candidates or candidates[0] == plain else others[0]
        self.entrants = [self.plain, *others]
        self._required = [self.plain] if self.heuristic is self.plain else [self.plain, self.heuristic]
        self.timing = False

    @property
    def best(self) -> Entrant | None:
        """The fastest so far of those that passed the check and have samples."""
        timed = [entrant for entrant in self.entrants if entrant.median_ms < math.inf]
        return min(timed, key=lambda entrant: entrant.median_ms, default=None)

    def run(self) -> None:
        """Screen, check and time until done or out of time. What is known then is in :meth:`trials`."""
        order = self._screen()
        for entrant in order:
            self._check(entrant)
        if any(entrant.status == "unchecked" for entrant in self._required):
            return
        self.timing = True
        # Those without a sample first: the time may run out within the first round.
        passed = sorted((each for each in order if each.status == "ok"), key=lambda each: len(each.samples))
        successive_halving(
            passed,
            self._sample,
            known={entrant: entrant.samples for entrant in passed},
            always=(self.plain,),
            expired=self._expired,
        )

    def trials(self, created_at: float) -> list[Trial]:
        """All that is certain, one record for each candidate; nothing if a required one is unknown."""
        if any(
            each.status == "unchecked" or (each.status == "ok" and not each.samples)
            for each in self._required
        ):
            return []
        out = [entrant for entrant in self.entrants if entrant.status in ("rejected", "failed")]
        timed = [entrant for entrant in self.entrants if entrant.median_ms < math.inf]
        return [self._trial(entrant, created_at) for entrant in timed + out]

    def _expired(self) -> bool:
        return self._now() >= self._deadline

    def _time_left_ms(self) -> float:
        return (self._deadline - self._now()) * 1e3

    def _screen(self) -> list[Entrant]:
        """The entrants in the order to check them: all, or the best on part of the batch if time is short."""
        batch, entrants = self.problem.batch, self.entrants
        if batch == 1 or len(entrants) <= 3:
            return self._required_first(entrants)
        first, second = self._partial(self.plain, 1), self._partial(self.plain, 1)
        if first is None or second is None:
            return self._required_first(entrants)
        unit = min(first, second)
        whole = unit * batch * (self._bench.checks + 1)
        if whole * len(entrants) <= self._time_left_ms() / 2:
            return self._required_first(entrants)
        allowed = _SCREEN_SHARE * self._time_left_ms()
        part = min(max(int(allowed / (len(entrants) * unit)), 1), batch // 2)
        end = self._now() + allowed / 1e3
        for entrant in entrants:
            if self._now() >= end:
                break
            entrant.estimate_ms = self._screened(entrant, part) * batch / part
        limit = _HOPELESS * self.plain.estimate_ms
        hopeful = [each for each in entrants if each.estimate_ms <= limit or each.estimate_ms == math.inf]
        if self.heuristic not in hopeful:
            self._required = [self.plain]
        ranked = sorted(hopeful, key=lambda entrant: entrant.estimate_ms)
        return self._required_first(ranked)[: max(int(self._time_left_ms() / whole), 3)]

    def _screened(self, entrant: Entrant, part: int) -> float:
        """Milliseconds of ``part`` matrices; on a single one, ``loop`` makes no difference."""
        done = [each for each in self.entrants if each.estimate_ms < math.inf]
        if part == 1:
            for each in done:
                if replace(each.choice, loop=entrant.choice.loop) == entrant.choice:
                    entrant.warm = True
                    return each.estimate_ms / self.problem.batch
        best = min((each.estimate_ms for each in done), default=math.inf) * part / self.problem.batch
        taken = self._partial(entrant, part)
        if taken is not None and taken > _HOPELESS * best:
            taken = self._partial(entrant, part)  # the first run may have compiled
        return math.inf if taken is None else taken

    def _required_first(self, entrants: list[Entrant]) -> list[Entrant]:
        others = [each for each in entrants if each not in self._required and each.status != "failed"]
        return self._required + others

    def _partial(self, entrant: Entrant, batch: int) -> float | None:
        self._watch("screening", entrant.choice)
        try:
            taken = self._bench.time(entrant.choice, batch)
        except Exception as error:
            self._fail(entrant, error)
            return None
        entrant.warm = True
        return taken

    def _check(self, entrant: Entrant) -> None:
        """Check one entrant, unless there is no time for it and one sample of each that passed.

        The required ones need no more than a deadline ahead: without them, all is in vain.
        """
        if entrant.status == "failed":
            return
        required = entrant in self._required
        best = min((e.estimate_ms for e in self.entrants if e.status == "ok"), default=math.inf)
        to_time = sum(e.estimate_ms for e in self.entrants if e.status == "ok" and not e.samples)
        for part in range(self._bench.checks):
            expected = entrant.estimate_ms if entrant.estimate_ms < math.inf else 0.0
            if self._expired() or (not required and self._time_left_ms() < to_time + expected):
                return
            self._watch("checking", entrant.choice)
            try:
                errors, taken = self._bench.check(entrant.choice, part)
            except Exception as error:
                self._fail(entrant, error)
                return
            for spectrum, value in errors.items():
                entrant.errors[spectrum] = _worse(value, entrant.errors.get(spectrum, 0.0))
            if not entrant.warm:
                # Its first run may compile: no sample, and no measure of the runs to come.
                entrant.warm, entrant.estimate_ms = True, min(taken, _HOPELESS * self.plain.estimate_ms)
                continue
            entrant.estimate_ms = taken
            entrant.samples.append(taken)
            hopeless = taken > _HOPELESS * best and part + 1 < self._bench.checks
            if hopeless and not required:
                return
        self._judge(entrant)

    def _judge(self, entrant: Entrant) -> None:
        """Pass or reject by the spectrum where the error is largest against its bound."""
        bounds = {spectrum: self._bound(spectrum) for spectrum in entrant.errors}
        spectrum = max(entrant.errors, key=lambda name: _excess(entrant.errors[name], bounds[name]))
        error, bound = entrant.errors[spectrum], bounds[spectrum]
        entrant.error, entrant.bound = (error if math.isfinite(error) else None), bound
        if error <= bound:
            entrant.status = "ok"
            return
        what = f"error {error:.1e} exceeds {bound:.1e}" if math.isfinite(error) else "NaN or Inf"
        self._out(entrant, "rejected", f"{what} on {spectrum} input")

    def _bound(self, spectrum: str) -> float:
        yardstick = self.plain.errors.get(spectrum, math.nan)
        # fp64 needs no allowance: in it the forms agree to far better than the 1e-6 that suits the others.
        allowance = 0.0 if self.problem.dtype == "fp64" else 1e-6
        return max(self._tolerance, 2 * yardstick + allowance if math.isfinite(yardstick) else 0.0)

    def _sample(self, entrant: Entrant) -> float | None:
        self._watch("timing", entrant.choice)
        try:
            taken = self._bench.time(entrant.choice)
        except Exception as error:
            self._fail(entrant, error)
            return None
        entrant.samples.append(taken)
        return taken

    def _fail(self, entrant: Entrant, error: Exception) -> None:
        self._out(entrant, "failed", f"{type(error).__name__}: {error}")

    def _out(self, entrant: Entrant, status: str, message: str) -> None:
        entrant.status, entrant.message = status, message
        entrant.samples.clear()

    def _trial(self, entrant: Entrant, created_at: float) -> Trial:
        problem, backends = self.problem, entrant.choice.backends
        median = entrant.median_ms
        return Trial(
            **asdict(problem),
            backend="+".join(backends),
            config=entrant.choice.to_config(),
            status=entrant.status,
            error=entrant.error,
            tolerance=entrant.bound,
            median_ms=median if median < math.inf else None,
            spread=_spread(entrant.samples) if entrant.samples else None,
            samples=len(entrant.samples),
            message=entrant.message,
            versions=versions_now(backends, problem.device),
            source_hash=source_hash(backends),
            created_at=created_at,
        )


def _worse(error: float, other: float) -> float:
    return error if math.isnan(error) else max(error, other)


def _excess(error: float, bound: float) -> float:
    return math.inf if math.isnan(error) else error / bound


def _spread(samples: list[float]) -> float:
    """(p75 − p25) / median; 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return (upper - lower) / median
