"""A clock, a bench and candidates whose times and errors are set by the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dmuon.autotune import ns_problem
from dmuon.autotune.describe import choice_text
from dmuon.autotune.versions import versions_now
from dmuon.kernels.backends import source_hash
from dmuon.kernels.choose import NSChoice, Problem, ProductChoice
from dmuon.tuning_cache import Trial

PLAIN = NSChoice("standard")
HEURISTIC = NSChoice("gram")


def blocked(block: int, method: str = "gram") -> NSChoice:
    product = ProductChoice("blocked", {"block": block, "split": "panel"})
    return NSChoice(method, gram=product, symmetric_product=product)


@dataclass
class Clock:
    """Time that passes only when told to."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass
class SimulatedBench:
    """Runs that take ``ms`` of the clock and have the errors given; what is an exception is raised.

    Candidates go by their :func:`choice_text`. ``ms`` is for a whole batch, of which a part takes its part.
    ``errors`` are by part of the check.
    """

    clock: Clock
    ms: dict[str, float]
    errors: dict[str, list[dict[str, float]] | BaseException] = field(default_factory=dict)
    checks: int = 1
    batch: int = 1
    log: list[tuple[str, str]] = field(default_factory=list)
    before_run: Callable[[str, str], None] = lambda kind, choice: None

    def check(self, choice: NSChoice, part: int) -> tuple[dict[str, float], float]:
        taken = self._spend("check", choice, self.batch)
        errors = self.errors.get(choice_text(choice), [{"gaussian": 1e-6}] * self.checks)
        if isinstance(errors, BaseException):
            raise errors
        return errors[part], taken

    def time(self, choice: NSChoice, batch: int | None = None) -> float:
        return self._spend("time" if batch is None else "part", choice, batch or self.batch)

    def _spend(self, kind: str, choice: NSChoice, batch: int) -> float:
        name = choice_text(choice)
        self.log.append((kind, name))
        self.before_run(kind, name)
        taken = self.ms[name] * batch / self.batch
        self.clock.seconds += taken / 1e3
        return taken


def trial(choice: NSChoice, ms: float | None, problem: Problem | None = None, **changes: Any) -> Trial:
    """A trial as the tuner would record it, all in one run; ``ms=None`` makes it a rejected one."""
    problem = problem or ns_problem(64, 128)
    values: dict[str, Any] = {
        "op": problem.op,
        "batch": problem.batch,
        "m": problem.m,
        "n": problem.n,
        "dtype": problem.dtype,
        "device": problem.device,
        "coefficients": problem.coefficients,
        "backend": "+".join(choice.backends),
        "config": choice.to_config(),
        "status": "rejected" if ms is None else "ok",
        "error": 1e-6,
        "tolerance": 1e-4,
        "median_ms": ms,
        "spread": None if ms is None else 0.01,
        "samples": 0 if ms is None else 9,
        "message": "wrong" if ms is None else "",
        "versions": versions_now(choice.backends, problem.device),
        "source_hash": source_hash(choice.backends),
        "created_at": 1.7e9,
    }
    return Trial(**{**values, **changes})
