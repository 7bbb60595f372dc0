"""What is best to run within a time: dynamic programs over one rank's time in small steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dmuon.planner.effort import OPTION, Effort
from dmuon.planner.instance import Counts


@dataclass(frozen=True, eq=False)
class Options:
    """Of one kind, the numbers of it that may be added at once, with the weight and the value of each."""

    sizes: NDArray[np.int64]
    weights: NDArray[np.int64]
    values: NDArray[np.float64]


class Filled:
    """The most value for each capacity, and what gives it.

    Args:
        options: of each kind in turn; each takes one at most, or nothing. A kind may come several times.
        kinds: the kind of each of ``options``.
        capacity: the largest.
        effort: what it may take.
    """

    def __init__(
        self, options: Sequence[Options], kinds: Sequence[int], capacity: int, effort: Effort
    ) -> None:
        effort.spend((capacity + OPTION) * sum(len(each.sizes) for each in options))
        self.best = np.zeros(capacity + 1)
        self._options, self._kinds = options, kinds
        self._chosen: list[NDArray[np.int16]] = []
        for each in options:
            before, chosen = self.best.copy(), np.zeros(capacity + 1, dtype=np.int16)
            for option, (weight, value) in enumerate(zip(each.weights, each.values, strict=True), start=1):
                with_it = before[: capacity + 1 - weight] + value
                better = with_it > self.best[weight:]
                np.copyto(self.best[weight:], with_it, where=better)
                np.copyto(chosen[weight:], option, where=better)
            self._chosen.append(chosen)

    def counts(self, capacity: int, kinds: int) -> Counts:
        """How many of each of ``kinds`` kinds give ``best[capacity]``."""
        counts = np.zeros(kinds, dtype=np.int64)
        for each, kind, chosen in zip(
            reversed(self._options), reversed(self._kinds), reversed(self._chosen), strict=True
        ):
            if option := int(chosen[capacity]):
                counts[kind] += each.sizes[option - 1]
                capacity -= int(each.weights[option - 1])
        return counts


def most_valuable(
    values: NDArray[np.float64],
    times: Sequence[NDArray[np.float64]],
    linear: NDArray[np.bool_],
    limit: float,
    steps: int,
    effort: Effort,
) -> tuple[float, Counts]:
    """The items of most value that run within ``limit``, nearly.

    Args:
        values: of one item of each kind; kinds without value are left out.
        times: of each kind, what 0, 1, 2, … items take, as many as there are.
        linear: of each kind, whether n items take n times as long as one.
        limit: the time of a rank, in ``steps`` steps.

    Returns:
        A value that nothing that runs within ``limit`` exceeds, and the best set found that does run within it.
    """
    options, kinds = [], []
    for kind in map(int, np.flatnonzero(values > 0)):
        # Rounded down, so that all that fits is in; a guard against the rounding of the product itself.
        weights = np.floor(times[kind] * (steps / limit * (1 + 1e-12))).astype(np.int64)
        for sizes in _alternatives(np.flatnonzero(weights <= steps)[1:], bool(linear[kind])):
            options.append(Options(sizes, weights[sizes], sizes * values[kind]))
            kinds.append(kind)
    filled = Filled(options, kinds, steps, effort)
    # What does not fit after all is a few steps too long, at most one for each option.
    for capacity in range(steps, max(steps - len(options) - 1, -1), -1):
        counts = filled.counts(capacity, len(values))
        if sum(each[count] for each, count in zip(times, counts, strict=True)) <= limit:
            break
    return float(filled.best[steps]), counts


def _alternatives(sizes: NDArray[np.int64], linear: bool) -> list[NDArray[np.int64]]:
    """One of ``sizes``; where times are linear, parts of the largest that add up to any, which is less work."""
    if not linear or not len(sizes):
        return [sizes] if len(sizes) else []
    parts, left, part = [], int(sizes[-1]), 1
    while left > 0:
        parts.append(np.array([min(part, left)]))
        left -= part
        part *= 2
    return parts
