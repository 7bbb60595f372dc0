"""Successive halving: spend the samples on the candidates that may still win."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

C = TypeVar("C")

SAMPLES = 9
"""Samples that the last candidates get, time permitting."""


def successive_halving(
    candidates: Sequence[C],
    measure: Callable[[C], float | None],
    *,
    known: Mapping[C, Sequence[float]] | None = None,
    always: Sequence[C] = (),
    expired: Callable[[], bool] = lambda: False,
    samples: int = SAMPLES,
) -> list[C]:
    """Measure all candidates, drop the slower half, measure the rest more often, and so on to the last two.

    Each round takes one sample of every candidate in turn, so that a slow moment hits all alike.

    Args:
        candidates: distinct and hashable.
        measure: takes one sample and returns its milliseconds; ``None`` means that the candidate is out.
        known: samples taken before.
        always: candidates that stay to the end however slow they are.
        expired: asked before each sample; the search ends where it says so.
        samples: how many samples the last candidates should have.

    Returns:
        The candidates of the last round, fastest first (those in ``always`` included).
    """
    times = {candidate: list((known or {}).get(candidate, ())) for candidate in candidates}
    alive = list(candidates)
    repeats = 1
    while alive:
        for _ in range(repeats):
            for candidate in list(alive):
                if expired():
                    return _ranked(alive, times)
                taken = measure(candidate)
                if taken is None:
                    alive.remove(candidate)
                else:
                    times[candidate].append(taken)
        contenders = [candidate for candidate in _ranked(alive, times) if candidate not in always]
        if len(contenders) <= 2 and all(len(times[candidate]) >= samples for candidate in alive):
            break
        keep = contenders[: max(2, (len(contenders) + 1) // 2)]
        alive = [candidate for candidate in alive if candidate in keep or candidate in always]
        repeats *= 2
    return _ranked(alive, times)


def _ranked(alive: Sequence[C], times: dict[C, list[float]]) -> list[C]:
    """By the lower median, which one stalled sample out of two does not move."""
    measured = [candidate for candidate in alive if times[candidate]]
    return sorted(measured, key=lambda candidate: statistics.median_low(times[candidate]))
