"""The step of matrices: momentum, orthogonalisation, update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dmuon.batching import Piece, Update, batches
from dmuon.fused_step import FusedSteps
from dmuon.graphs import Replays, replayable
from dmuon.kernels.gram_ns import gram_ns
from dmuon.kernels.step import Step
from dmuon.lr_adjust import AdjustRule


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

    def run(self, updates: Sequence[Update]) -> Iterator[Tensor]:
        """Make ``updates``; yield each parameter as soon as all of it has moved.

        The updates of a parameter come together. Their gradients are as autograd left them.
        """
        left = Counter(update.parameter for update in updates for _ in range(update.matrix.batch))
        for step, members in self._alike(updates).items():
            for batch in batches(members):
                if step is None:
                    self._move_batch(batch)
                else:
                    self._fused.move(step, batch, self._counter(batch[0].update.parameter.device))
                for piece in batch:
                    left[piece.update.parameter] -= piece.count
                    if not left[piece.update.parameter]:
                        yield piece.update.parameter

    def nonfinite(self) -> int:
        """How many matrices have been moved by what was not finite; waits for the devices."""
        return sum(int(counter) for counter in self._counters.values())

    def _alike(self, updates: Sequence[Update]) -> dict[Step | None, list[Update]]:
        """The updates by what moves them; those of torch's, with ``None``, have their momenta advanced."""
        alike: dict[Step | None, list[Update]] = {}
        for _, members in groupby(updates, key=lambda update: id(update.parameter)):
            mine = list(members)
            steps = [self._fused.step_of(update) for update in mine]
            if None in steps:
                # Momentum and decay are the parameter's, not each matrix's.
                gradient = advance_momentum(mine[0])
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

    def _move_batch(self, batch: list[Piece]) -> None:
        """Orthogonalise one batch of equal matrices and move each against its own result."""
        matrix = batch[0].update.matrix
        for piece, direction in zip(batch, self.orthogonalized(batch), strict=True):
            factor = self._rules[piece.update.group["adjust_lr"]](matrix.rows, matrix.cols)
            _move(piece.parameter(), direction, piece.update.group, factor)

    def _counter(self, device: torch.device) -> Tensor:
        if device not in self._counters:
            self._counters[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._counters[device]


def momentum_of(weight: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The momentum in ``state``, zero at first."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    return state["momentum_buffer"]


def advance_momentum(update: Update) -> Tensor:
    """Fold a parameter's gradient into its momentum, and decay it; the gradient in the momentum's dtype."""
    weight, momentum, group = update.parameter, update.momentum, update.group
    gradient = update.gradient.to(momentum.dtype)
    momentum.lerp_(gradient, 1 - group["momentum"])
    if group["weight_decay"]:
        weight.mul_(1 - group["lr"] * group["weight_decay"])
    return gradient


def _move(parameter: Tensor, direction: Tensor, group: dict[str, Any], factor: float) -> None:
    """parameter ∓ lr·factor·direction. ``direction`` is scratch."""
    lr, sign = group["lr"], 1.0 if group["maximize"] else -1.0
    if isinstance(lr, Tensor):
        parameter.add_(direction.mul_(lr * factor), alpha=sign)
    else:
        parameter.add_(direction, alpha=sign * lr * factor)
