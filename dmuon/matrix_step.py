"""The step of matrices: momentum, orthogonalisation, update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dmuon.batching import BATCH_ELEMENTS, Piece, Update, batches
from dmuon.fused_step import FusedSteps
from dmuon.graphs import Replays, replayable
from dmuon.kernels.gram_ns import gram_ns
from dmuon.kernels.step import Step
from dmuon.lr_adjust import AdjustRule
from dmuon.normuon import normalize_rows
from dmuon.rounding import StochasticRounding
from dmuon.update_hooks import Measurements, UpdateHooks


class MatrixStep:
    """Moves matrices by their orthogonalised momentum; keeps what it needs from step to step.

    On a GPU, kernels make whole steps of what they serve; torch's operations make those of the rest.

    Args:
        rules: what a group's ``adjust_lr`` may name.
    """

    def __init__(self, rules: Mapping[str, AdjustRule]) -> None:
        self._rules = rules
        self._replays = Replays()
        self._fused = FusedSteps(rules, self._replays)
        self._counters: dict[torch.device, Tensor] = {}
        self.rounding = StochasticRounding()
        self.hooks = UpdateHooks(rules)

    def run(self, updates: Sequence[Update], measurements: Measurements | None = None) -> Iterator[Tensor]:
        """Make ``updates``; yield each parameter as soon as all of it has moved.

        Args:
            updates: those of a parameter come together. Their gradients are as autograd left them.
            measurements: to be made on the way; kernels that make whole steps would not show what to measure.
        """
        left = Counter(update.parameter for update in updates for _ in range(update.matrix.batch))
        for step, members in self._alike(updates, fused=measurements is None).items():
            for batch in batches(members):
                if step is None:
                    self._move_batch(batch, measurements)
                else:
                    self._fused.move(step, batch, self._counter(batch[0].update.parameter.device))
                for piece in batch:
                    left[piece.update.parameter] -= piece.count
                    if not left[piece.update.parameter]:
                        yield piece.update.parameter

    def nonfinite(self) -> int:
        """How many matrices have been moved by what was not finite; waits for the devices."""
        return sum(int(counter) for counter in self._counters.values())

    def _alike(self, updates: Sequence[Update], fused: bool) -> dict[Step | None, list[Update]]:
        """The updates by what moves them; those of torch's, with ``None``, have their momenta advanced."""
        alike: dict[Step | None, list[Update]] = {}
        for _, members in groupby(updates, key=lambda update: id(update.parameter)):
            mine = list(members)
            steps = [self._fused.step_of(update) if fused else None for update in mine]
            if None in steps:
                # Momentum is the parameter's, not each matrix's.
                gradient = self.advance_momentum(mine[0])
                mine, steps = [replace(update, gradient=gradient) for update in mine], [None] * len(mine)
            for step, update in zip(steps, mine, strict=True):
                alike.setdefault(step, []).append(update)
        return alike

    def orthogonalized(self, batch: list[Piece]) -> Sequence[Tensor]:
        """The directions of one batch of equal matrices, (count, rows, cols) each: scratch, until the next batch."""
        matrix, group, like = batch[0].update.matrix, batch[0].update.group, batch[0].update.momentum
        counts = [piece.count for piece in batch]
        shape, recorded = (sum(counts), matrix.rows, matrix.cols), replayable(like.device)
        empty = self._replays.buffer if recorded else torch.empty
        stack = empty(shape, dtype=like.dtype, device=like.device)
        for piece, target in zip(batch, torch.split(stack, counts), strict=True):
            if piece.update.group["nesterov"]:
                torch.lerp(piece.gradient(), piece.momentum(), piece.update.group["momentum"], out=target)
            else:
                target.copy_(piece.momentum())
        how = {"coefficients": group["coefficients"], "precision": group["precision"]}
        if recorded:
            self._replays.run(tuple(how.values()), stack, lambda stack: gram_ns(stack, **how, out=stack))
        else:
            gram_ns(stack, **how, out=stack)
        # A sum over entries of at most 1 is finite unless one of them is not.
        counter = self._counter(like.device)
        counter += (~stack.sum((-2, -1), dtype=torch.float32).isfinite()).sum()
        return torch.split(stack, counts)

    def _move_batch(self, batch: list[Piece], measurements: Measurements | None) -> None:
        """Orthogonalise one batch of equal matrices and move each against its own result."""
        directions = self.orthogonalized(batch)
        if measurements is not None:
            measurements.add(batch, directions)
        if batch[0].update.group["normuon_beta2"] is not None:
            normalize_rows(directions, batch)
        for piece, direction in zip(batch, directions, strict=True):
            self.move(piece, direction, self.factor(piece.update))

    def factor(self, update: Update) -> float:
        """Of the learning rate, by the shape of the matrices."""
        return self._rules[update.group["adjust_lr"]](update.matrix.rows, update.matrix.cols)

    def advance_momentum(self, update: Update) -> Tensor:
        """Fold a parameter's gradient into its momentum; the gradient in the momentum's dtype."""
        momentum, weight = update.momentum, 1 - update.group["momentum"]
        gradient = update.gradient.to(momentum.dtype)
        if update.rounded:
            # No more at a time than there is in a batch.
            size = max(1, BATCH_ELEMENTS // momentum[0].numel())
            for average, new in zip(torch.split(momentum, size), torch.split(gradient, size), strict=True):
                self.rounding.write(average.float().lerp_(new.float(), weight), average)
        else:
            momentum.lerp_(gradient, weight)
        return gradient

    def move(self, piece: Piece, direction: Tensor, factor: float) -> None:
        """Decay ``piece`` of a parameter and move it along ``direction``, which is scratch."""
        parameter, group = piece.parameter(), piece.update.group
        if piece.update.rounded:
            weight = parameter.float()
            _move(weight, direction.float(), group, factor)
            self.rounding.write(weight, parameter)
        else:
            _move(parameter, direction, group, factor)

    def _counter(self, device: torch.device) -> Tensor:
        if device not in self._counters:
            self._counters[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._counters[device]


def _move(weight: Tensor, direction: Tensor, group: dict[str, Any], factor: float) -> None:
    """weight ← (1 − lr·decay)·weight ∓ lr·factor·direction. ``direction`` is scratch."""
    lr, sign = group["lr"], 1.0 if group["maximize"] else -1.0
    if group["weight_decay"]:
        kept = 1 - lr * group["weight_decay"]
        if group["cautious_decay"]:
            # Signs, because the product of two small numbers may be zero.
            growing = direction.sign().mul_(weight.sign()).mul_(sign * factor) > 0
            weight.copy_(torch.where(growing, weight, weight * kept))
        else:
            weight.mul_(kept)
    if isinstance(lr, Tensor):
        weight.add_(direction.mul_(lr * factor), alpha=sign)
    else:
        weight.add_(direction, alpha=sign * lr * factor)
