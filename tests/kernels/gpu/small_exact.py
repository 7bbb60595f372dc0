"""What the kernels that run the whole iteration must compute, to the bit."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(X: Tensor, steps: tuple[tuple[float, float, float], ...], segments: tuple[int, ...]) -> Tensor:
    """The iteration in fp64, rounded to fp16 where the kernel rounds: exactly its result, if its sums are exact."""

    def half(value: Tensor) -> Tensor:
        return value.half().double()

    one, first = torch.eye(X.shape[-2]).double(), 0
    X = X.double()
    for count in segments:
        R, Q = half(X @ X.mT), one
        for a, b, c in steps[first : first + count]:
            P = half(c * R @ R + b * R + (a * one if count > 1 else 0))
            Q, R = half(P @ Q), half(P @ half(R @ P))
        X = half(Q @ X + (steps[first][0] * X if count == 1 else 0))
        first += count
    return X
