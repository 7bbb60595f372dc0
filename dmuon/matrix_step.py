"""The step of matrices: momentum, orthogonalisation, update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuon.batching import Piece, Update, batches
from dmuon.graphs import Replays, replayable
from dmuon.kernels.gram_ns import gram_ns
from dmuon.lr_adjust import AdjustRule


class MatrixStep:
    """Moves matrices by their orthogonalised momentum; keeps what it needs from step to step.

    Args:
        rules: what a group's ``adjust_lr`` may name.
    """

    def __init__(self, rules: Mapping[str, AdjustRule]) -> None:
        self._rules = rules
        self._replays = Replays()

    def run(self, updates: Sequence[Update]) -> Iterator[Tensor]:
        """Make ``updates``, whose momentum has been advanced; yield each parameter as soon as all of it has moved."""
        left = Counter(update.parameter for update in updates for _ in range(update.matrix.batch))
        for batch in batches(updates):
            self._move_batch(batch)
            for piece in batch:
                left[piece.update.parameter] -= piece.count
                if not left[piece.update.parameter]:
                    yield piece.update.parameter

    def _move_batch(self, batch: list[Piece]) -> None:
        """Orthogonalise one batch of equal matrices and move each against its own result."""
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
        for piece, direction in zip(batch, torch.split(stack, counts), strict=True):
            factor = self._rules[piece.update.group["adjust_lr"]](matrix.rows, matrix.cols)
            _move(piece.parameter(), direction, piece.update.group, factor)


def advance_momentum(
    weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
) -> Tensor:
    """Fold ``gradient`` into the momentum of ``state`` and decay ``weight``; the gradient in the momentum's dtype."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    momentum = state["momentum_buffer"]
    gradient = gradient.to(momentum.dtype)
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
