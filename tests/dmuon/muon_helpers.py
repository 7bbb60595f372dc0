"""Parameters, gradients and optimizers for the tests of Muon."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dmuon

FP64: dict[str, Any] = {"coefficients": "keller_jordan", "precision": "fp64"}


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype))


def gradient_like(tensor: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


def forced(*params: Tensor, **options: Any) -> dmuon.Muon:
    return dmuon.Muon([{"params": list(params), "algorithm": "muon"}], **{**FP64, **options})


def relative(actual: Tensor, expected: Any) -> float:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    return ((actual.double() - expected).norm() / expected.norm()).item()
