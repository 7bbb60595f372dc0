"""How much work a search may do: counted, so that it ends at the same point on every machine."""

from __future__ import annotations

import time

CELLS = 1_200_000_000
"""Entries of dynamic programs that a search may fill: a few seconds of one core."""

OPTION = 2_000
"""Entries that each option of a dynamic program counts for, however small."""

LINEAR_PROGRAM = 200_000
"""Entries that a linear program counts for."""


class Spent(Exception):
    """The work is used up; what was found until then counts, and is the same in every run."""


class OutOfTime(Exception):
    """The clock ran out before the work did: what was found until then may differ from run to run."""


class Effort:
    """Counts down.

    Args:
        time_limit_s: on the clock, as a safeguard against a machine that is far slower than any should be.
        cells: as :data:`CELLS`.
    """

    def __init__(self, time_limit_s: float, cells: int = CELLS) -> None:
        self._left, self._deadline = cells, time.monotonic() + time_limit_s

    @property
    def seconds(self) -> float:
        """What the clock leaves.

        Raises:
            OutOfTime: nothing.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime
        return left

    def spend(self, cells: int) -> None:
        """Before work of this size.

        Raises:
            Spent: too little is left.
            OutOfTime: the clock ran out.
        """
        self._left -= cells
        if self._left < 0:
            raise Spent
        _ = self.seconds
