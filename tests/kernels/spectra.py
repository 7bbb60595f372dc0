"""Hard inputs for Newton-Schulz, and what it must make of them: evaluated here, apart from the library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Steps = Sequence[tuple[float, float, float]]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}

SINGULAR_VALUES: dict[str, Callable[[int], np.ndarray]] = {
    "uniform": lambda m: np.random.default_rng(m).random(m),
    "log_spaced": lambda m: np.logspace(0, -10, m),
    "decaying": lambda m: np.exp(np.linspace(0, -8, m)),
    "clustered": lambda m: np.where(np.arange(m) < m // 2, 1.0, 1e-2),
    "one_spike": lambda m: np.where(np.arange(m) < 1, 1.0, 1e-3),
    "half_zeros": lambda m: np.where(np.arange(m) < m // 2, 1.0, 0.0),
    "rank_1": lambda m: np.where(np.arange(m) < 1, 1.0, 0.0),
}
SPECTRA = (*SINGULAR_VALUES, "gaussian", "rank_4_noise", "hilbert")


def matrix(name: str, m: int, n: int, seed: int = 0) -> Tensor:
    """An fp64 matrix of the named kind, m×n, with norm of the order of 1."""
    generator = torch.Generator().manual_seed(seed)
    if name in SINGULAR_VALUES:
        U, s, Vh = factors(name, m, n, seed)
        return (U * s) @ Vh

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    if name == "gaussian":
        return gaussian(m, n) / math.sqrt(m * n)
    if name == "rank_4_noise":
        return (gaussian(m, 4) @ gaussian(4, n) + 1e-6 * gaussian(m, n)) / math.sqrt(m * n)
    assert name == "hilbert"
    return 1 / (torch.arange(m).double()[:, None] + torch.arange(n).double() + 1)


def factors(name: str, m: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """U, s, Vᵀ of a matrix whose singular values are prescribed."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(m, n)
    U, _ = torch.linalg.qr(torch.randn(m, rank, dtype=torch.float64, generator=generator))
    V, _ = torch.linalg.qr(torch.randn(n, rank, dtype=torch.float64, generator=generator))
    return U, torch.from_numpy(SINGULAR_VALUES[name](rank)), V.mT


def polynomial(steps: Steps, x: Tensor) -> Tensor:
    for a, b, c in steps:
        x = a * x + b * x**3 + c * x**5
    return x


def expected(G: Tensor, steps: Steps) -> Tensor:
    """U p(S / ‖S‖) Vᵀ in fp64, by SVD."""
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    return (U * polynomial(steps, S / S.norm(dim=-1, keepdim=True)).unsqueeze(-2)) @ Vh


def slope(steps: Steps) -> float:
    """p'(0): by how much the smallest singular values grow."""
    return math.prod(a for a, _, _ in steps)


def peak(steps: Steps) -> float:
    """The largest |p| on [0, 1]."""
    x = torch.cat([torch.logspace(-8, 0, 20001, dtype=torch.float64), torch.linspace(0, 1, 20001).double()])
    return float(polynomial(steps, x).abs().max())
