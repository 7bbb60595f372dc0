"""Muon re-derived in numpy and fp64 through the SVD, for the tests to compare against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

KELLER = ((3.4445, -4.7750, 2.0315),) * 5


def orthogonalized(U: Array, steps: tuple[tuple[float, float, float], ...] = KELLER) -> Array:
    """The composed quintics on the singular values of a 2-D U / ‖U‖_F."""
    if not U.any():
        return np.zeros_like(U)
    left, s, right = np.linalg.svd(U, full_matrices=False)
    s = s / np.sqrt(np.sum(s**2))
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return (left * s) @ right


def muon_step(
    W: Array,
    G: Array,
    B: Array,
    *,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    factor: float = 1.0,
    steps: tuple[tuple[float, float, float], ...] = KELLER,
) -> tuple[Array, Array]:
    """The new weight and momentum."""
    B = momentum * B + (1 - momentum) * G
    U = momentum * B + (1 - momentum) * G if nesterov else B
    return (1 - lr * weight_decay) * W - lr * factor * orthogonalized(U, steps), B
