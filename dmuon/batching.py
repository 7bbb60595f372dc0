"""Which matrices are orthogonalised together: equal ones, in batches of bounded size."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dmuon.matrix import Matrix

BATCH_ELEMENTS = 1 << 25
"""A batch holds at most this many elements (128 MiB in fp32), or one matrix if that is larger.

One batch exists at a time, beside the working memory of its Newton–Schulz iteration, so this bounds what a
step needs beyond parameters, gradients and state.
"""


@dataclass(frozen=True, eq=False)
class Update:
    """The matrices (batch, rows, cols) of one parameter that are due for an update, with what makes it."""

    parameter: Tensor
    gradient: Tensor
    momentum: Tensor
    matrix: Matrix
    group: dict[str, Any]
    second_moment: Tensor | None = None

    @property
    def rounded(self) -> bool:
        """Whether the parameter and its momentum are to be rounded stochastically."""
        return self.group["stochastic_rounding"] and self.parameter.dtype == torch.bfloat16

    @property
    def key(self) -> Hashable:
        """Equal for matrices that may share a batch. Transposes do not: stacking them would cost a copy."""
        tensor = self.parameter
        how = (self.group["coefficients"], self.group["precision"], self.group["normuon_beta2"])
        return (self.matrix.rows, self.matrix.cols, tensor.dtype, tensor.device, *how)


@dataclass(frozen=True, eq=False)
class Piece:
    """Matrices ``start`` to ``stop`` of an update; each accessor gives (count, rows, cols)."""

    update: Update
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def parameter(self) -> Tensor:
        """A view: writing to it writes to the parameter."""
        return self.update.matrix.view(self.update.parameter)[self.start : self.stop]

    def gradient(self) -> Tensor:
        """For reading only."""
        return self._read(self.update.gradient)

    def momentum(self) -> Tensor:
        """For reading only."""
        return self._read(self.update.momentum)

    def second_moment(self) -> Tensor:
        """(count, rows, 1), of an update that has one. A view: writing to it writes to the state."""
        moment, update = self.update.second_moment, self.update
        assert moment is not None
        return update.matrix.view_column(moment, update.parameter)[self.start : self.stop]

    def _read(self, tensor: Tensor) -> Tensor:
        return self.update.matrix.read(tensor, self.update.parameter)[self.start : self.stop]


def batch_sizes(count: int, rows: int, cols: int) -> list[int]:
    """How ``count`` matrices of rows × cols divide into batches: as few as fit, as even as can be.

    Even batches use the device evenly: 9 matrices that fit 8 at a time run as 5 + 4, not as 8 + 1.
    """
    largest = max(1, BATCH_ELEMENTS // (rows * cols))
    batches = -(-count // largest)
    return [(count + k) // batches for k in reversed(range(batches))]


def batches(updates: Sequence[Update]) -> Iterator[list[Piece]]:
    """Deal the matrices of ``updates`` into batches of equal ones, in the order of the first of each."""
    alike: dict[Hashable, list[Update]] = {}
    for update in updates:
        alike.setdefault(update.key, []).append(update)
    places = {update: place for place, update in enumerate(updates)}
    dealt = [batch for group in alike.values() for batch in _deal(group)]
    yield from sorted(dealt, key=lambda batch: places[batch[0].update])


def _deal(updates: list[Update]) -> Iterator[list[Piece]]:
    matrix = updates[0].matrix
    lasts = list(accumulate(update.matrix.batch for update in updates))
    stop = 0
    for size in batch_sizes(lasts[-1], matrix.rows, matrix.cols):
        start, stop = stop, stop + size
        yield [
            Piece(update, max(start - first, 0), min(stop, last) - first)
            for update, first, last in zip(updates, [0, *lasts], lasts, strict=False)
            if first < stop and start < last
        ]
