"""What tuning did: progress while it runs, and the outcome for each problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dmuon.autotune.answers import best_trial, choice_of, plain_trial
from dmuon.kernels.choose import NSChoice, Problem
from dmuon.tuning_cache import Trial

Status = Literal["stored", "tuned", "not reached", "failed"]


@dataclass(frozen=True)
class Progress:
    """A moment of tuning.

    ``stage`` is "inputs", "screening", "checking", "timing", "waiting" (for another process) or "done" (with
    ``outcome``); ``choice`` is what runs, ``best`` and ``best_ms`` the fastest so far. ``fraction`` counts
    finished problems and the time spent on this one.
    """

    problem: Problem
    stage: str
    fraction: float
    choice: NSChoice | None = None
    best: NSChoice | None = None
    best_ms: float | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one problem.

    ``stored``: the store had the answer. ``tuned``: ``trials`` of this run were added to it. ``not reached`` and
    ``failed`` say why in ``reason``. ``known`` are all usable trials, of earlier runs too; ``candidates`` is how
    many there were to try in this one.
    """

    problem: Problem
    status: Status
    known: tuple[Trial, ...] = ()
    trials: tuple[Trial, ...] = ()
    candidates: int = 0
    reason: str = ""

    @property
    def best(self) -> Trial | None:
        """The trial whose choice is used from now on."""
        return best_trial(self.known)

    @property
    def choice(self) -> NSChoice | None:
        """What runs this problem from now on; ``None`` if nothing is known."""
        best = self.best
        return None if best is None else choice_of(best)

    @property
    def speedup(self) -> float | None:
        """How many times faster than the plain choice, both timed in one run."""
        best = self.best
        plain = None if best is None else plain_trial(self.known, best)
        if best is None or plain is None or not best.median_ms or not plain.median_ms:
            return None
        return plain.median_ms / best.median_ms


@dataclass
class Report:
    """The outcomes, in the order of the problems asked for; ``elapsed_s`` is the wall time of it all."""

    outcomes: list[Outcome] = field(default_factory=list)
    elapsed_s: float = 0.0

    def of(self, problem: Problem) -> Outcome | None:
        """The outcome of ``problem``, if it has one yet."""
        return next((outcome for outcome in self.outcomes if outcome.problem == problem), None)

    @property
    def all_stored(self) -> bool:
        return all(outcome.status == "stored" for outcome in self.outcomes)
