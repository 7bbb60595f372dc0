"""The chooser that ``gram_ns`` asks: tuned choices from the user's store, as shipped, or for a near shape."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterable

from dmuon.autotune.answers import Answers, choice_of
from dmuon.autotune.tuner import Tuner
from dmuon.kernels.choose import NSChoice, Problem, set_chooser
from dmuon.kernels.coefficients import coefficients_of
from dmuon.tuning_cache import Store, Trial, shipped_trials

MODES = ("cache", "jit", "off")
JIT_BUDGET_S = 10.0
"""What tuning a problem on its first use may take in mode "jit"."""

_log = logging.getLogger("dmuon.autotune")


class TunedChooser:
    """Answers from trials: of this problem in the store, then as shipped, then of the nearest shape.

    ``None`` — use the heuristics — where nothing is known. A problem is looked up once for each process;
    trials stored later count after :meth:`refresh`. Any number of threads may ask.

    Args:
        store: where to look; by default the user's store, opened at the first question.
        mode: "cache" uses what is known; "jit" also tunes a problem that is not, on first use, for up to
            :data:`JIT_BUDGET_S` seconds (those with named coefficients); "off" always answers ``None``. By
            default ``DMUON_AUTOTUNE``, else "cache".

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(self, store: Store | None = None, mode: str | None = None) -> None:
        where = "mode"
        if mode is None:
            mode, where = os.environ.get("DMUON_AUTOTUNE") or "cache", "DMUON_AUTOTUNE"
        if mode not in MODES:
            raise ValueError(f"{where} must be one of {', '.join(MODES)}, got {mode!r}")
        self.mode = mode
        self._store = store
        self._lock = threading.RLock()
        self._choices: dict[Problem, NSChoice | None] = {}
        self._families: dict[tuple[str, str, str, str], tuple[Answers, Answers]] = {}
        self._warned = False

    def choose(self, problem: Problem) -> NSChoice | None:
        """The choice for ``problem``, or ``None``. Never raises: trouble is one warning, then heuristics."""
        if problem in self._choices:
            return self._choices[problem]
        with self._lock:
            if problem not in self._choices:
                try:
                    self._choices[problem] = self._find(problem)
                except Exception as error:
                    self._choices[problem] = None
                    self._warn(error)
            return self._choices[problem]

    def refresh(self) -> None:
        """Forget what was looked up, so that trials stored since count."""
        with self._lock:
            self._choices.clear()
            self._families.clear()

    def _find(self, problem: Problem) -> NSChoice | None:
        if self.mode == "off" or problem.op != "gram_ns":
            return None
        own, shipped = self._family(problem)
        found = own.exact(problem) or shipped.exact(problem)
        if found is None and self.mode == "jit":
            found = self._tune(problem)
        found = found or own.nearest(problem) or shipped.nearest(problem)
        return None if found is None else choice_of(found)

    def _family(self, problem: Problem) -> tuple[Answers, Answers]:
        """All answers for problems that differ in shape alone, read once: from the store, and as shipped."""
        key = (problem.op, problem.dtype, problem.device, problem.coefficients)
        if key not in self._families:
            own = self._opened().trials(
                op=problem.op, dtype=problem.dtype, device=problem.device, coefficients=problem.coefficients
            )
            self._families[key] = Answers(own), Answers(_like(problem, shipped_trials(problem.device)))
        return self._families[key]

    def _tune(self, problem: Problem) -> Trial | None:
        if coefficients_of(problem.coefficients) is None:
            return None
        shape = f"{problem.batch} × ({problem.m}×{problem.n}) {problem.dtype}"
        _log.warning(
            "tuning %s on first use, for up to %g s (DMUON_AUTOTUNE=cache prevents it)", shape, JIT_BUDGET_S
        )
        outcome = Tuner(self._opened()).tune([problem], JIT_BUDGET_S).of(problem)
        return None if outcome is None else outcome.best

    def _opened(self) -> Store:
        if self._store is None:
            self._store = Store()
        return self._store

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"tuned choices are not used: {error!r}", stacklevel=4)


def install(store: Store | None = None, mode: str | None = None) -> TunedChooser:
    """Make a :class:`TunedChooser` answer for this process from now on, and return it."""
    chooser = TunedChooser(store, mode)
    set_chooser(chooser)
    return chooser


def _like(problem: Problem, trials: Iterable[Trial]) -> list[Trial]:
    key = (problem.op, problem.dtype, problem.device, problem.coefficients)
    return [trial for trial in trials if (trial.op, trial.dtype, trial.device, trial.coefficients) == key]
