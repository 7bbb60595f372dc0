"""Inputs whose exact answer is known, for checking candidates at the very shape they will run at.

Comparing with an SVD in fp64 takes minutes at 4096×11008 on a CPU, longer than the tuning it guards. So a
probe is built *from* its SVD: G = U S Vᵀ with a chosen spectrum S and pseudo-random orthogonal U and V,
applied by fast transforms in O(mn log m), and the exact result U p(S) Vᵀ comes from the same transforms,
without ever running an iteration. Every matrix of a batch gets row and column signs of its own, which carry
over to the result exactly: so each is checked, and a mix-up between two of them shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dmuon.kernels.choose import Problem
from dmuon.kernels.coefficients import CoefficientSet
from dmuon.kernels.reference import relative_error

_CHUNK = 1 << 22
"""Elements that are compared in fp64 at a time."""


class Probes:
    """The inputs that check one problem: ``batches`` of (batch, m, n), in which every spectrum occurs.

    Inputs are fp32 (fp64 for fp64 problems), whatever the working precision. Small batches need several
    ``batches`` to hold every spectrum.
    """

    def __init__(self, problem: Problem, coefficients: CoefficientSet, device: torch.device) -> None:
        self.shape = (problem.batch, problem.m, problem.n)
        dtype = torch.float64 if problem.dtype == "fp64" else torch.float32
        pairs = [
            known_pair(spectrum(problem.m, problem.n), problem.n, coefficients, device, seed)
            for seed, spectrum in enumerate(SPECTRA.values())
        ]
        self._inputs = torch.stack([pair[0].to(dtype) for pair in pairs])
        self._results = torch.stack([pair[1].to(dtype) for pair in pairs])
        groups = math.ceil(len(SPECTRA) / problem.batch)
        generator = torch.Generator().manual_seed(20)
        self._rows = _signs((groups, problem.batch, problem.m, 1), generator, dtype, device)
        self._columns = _signs((groups, problem.batch, 1, problem.n), generator, dtype, device)
        empty = torch.empty(groups, *self.shape, dtype=dtype, device=device)
        self.batches = list(empty)
        for group in range(groups):
            self.refill(group)

    def errors(self, group: int, result: Tensor) -> dict[str, float]:
        """The largest relative Frobenius error among the matrices of each spectrum in ``batches[group]``.

        NaN where any of them has a NaN.
        """
        worst: dict[str, float] = {}
        for part in self._parts():
            kinds = self._kinds(group, part)
            exact = self._results[kinds].double() * self._rows[group, part] * self._columns[group, part]
            errors = relative_error(result[part], exact)
            for index, name in enumerate(SPECTRA):
                found = errors[kinds == index]
                if found.numel():
                    # Maximum of tensors: unlike max(), it lets a NaN through.
                    worst[name] = float(torch.maximum(found.max(), found.new_tensor(worst.get(name, 0.0))))
        return worst

    def refill(self, group: int) -> None:
        """Write ``batches[group]`` anew."""
        for part in self._parts():
            self.batches[group][part] = self._matrices(group, part)

    def intact(self, group: int) -> bool:
        """Whether ``batches[group]`` still holds what was put there."""
        return all(
            torch.equal(self.batches[group][part], self._matrices(group, part)) for part in self._parts()
        )

    def _matrices(self, group: int, part: slice) -> Tensor:
        return self._inputs[self._kinds(group, part)] * self._rows[group, part] * self._columns[group, part]

    def _kinds(self, group: int, part: slice) -> Tensor:
        first = group * self.shape[0]
        indices = torch.arange(first + part.start, first + part.stop, device=self._inputs.device)
        return indices % len(SPECTRA)

    def _parts(self) -> list[slice]:
        batch, m, n = self.shape
        step = max(1, _CHUNK // (m * n))
        return [slice(start, min(start + step, batch)) for start in range(0, batch, step)]


def known_pair(
    spectrum: Tensor, n: int, coefficients: CoefficientSet, device: torch.device, seed: int
) -> tuple[Tensor, Tensor]:
    """G (m, n) in fp64 with the singular values ``spectrum`` (m,), and what the iteration makes of it.

    G = H_m D S H_n[:m], with H the Hartley matrices, which are orthogonal, and D random signs, which make the
    entries of the sum look Gaussian. S is shuffled, lest large values mean smooth vectors.
    """
    m = len(spectrum)
    generator = torch.Generator().manual_seed(seed)
    shuffle = torch.randperm(m, generator=generator)
    signs = _signs((m,), generator, torch.float64, device)
    steps = torch.arange(n, device=device)
    angles = torch.outer(steps, steps[:m]).remainder_(n)
    wave = 2 * math.pi / n * steps.double()
    right = ((wave.cos() + wave.sin()) / math.sqrt(n))[angles]

    def assemble(values: Tensor) -> Tensor:
        waves = torch.fft.fft(right * (values[shuffle].to(device) * signs), dim=-1, norm="ortho")
        G: Tensor = (waves.real - waves.imag).mT
        return G

    return assemble(spectrum), assemble(iterated(spectrum, coefficients))


def iterated(spectrum: Tensor, coefficients: CoefficientSet) -> Tensor:
    """What the iteration makes of all the singular values of a matrix: p(spectrum / ‖spectrum‖₂)."""
    x: Tensor = spectrum / torch.linalg.vector_norm(spectrum)
    for a, b, c in coefficients.steps:
        x = a * x + b * x**3 + c * x**5
    return x


def gaussian_spectrum(m: int, n: int) -> Tensor:
    """The singular values of a Gaussian (m, n) matrix / √n, as quantiles of the Marchenko–Pastur law."""
    ratio = math.sqrt(m / n)
    middle, radius = 1 + ratio * ratio, 2 * ratio
    # λ = middle + radius·cos θ makes the density smooth up to both edges, even where λ reaches 0 (m = n).
    angle = np.linspace(np.pi, 0, 8193)
    centres = (angle[1:] + angle[:-1]) / 2
    weight = np.sin(centres) ** 2 / (middle + radius * np.cos(centres))
    cumulative = np.concatenate([[0.0], np.cumsum(weight)])
    quantiles = np.interp((np.arange(m) + 0.5) / m, cumulative / cumulative[-1], angle)
    return torch.from_numpy(np.sqrt(np.maximum(middle + radius * np.cos(quantiles), 0.0)))


def decaying_spectrum(m: int, n: int) -> Tensor:
    """Singular values from 1 down to e⁻⁸, evenly in the logarithm."""
    return torch.exp(-8 * torch.arange(m, dtype=torch.float64) / max(m - 1, 1))


def deficient_spectrum(m: int, n: int) -> Tensor:
    """Rank m/8 (at least 1): singular values from 1 to 1/2, then exact zeros."""
    rank = max(m // 8, 1)
    return torch.cat(
        [torch.linspace(1, 0.5, rank, dtype=torch.float64), torch.zeros(m - rank, dtype=torch.float64)]
    )


SPECTRA: dict[str, Callable[[int, int], Tensor]] = {
    "gaussian": gaussian_spectrum,
    "decaying": decaying_spectrum,
    "rank-deficient": deficient_spectrum,
}


def _signs(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return (torch.randint(0, 2, shape, generator=generator) * 2 - 1).to(device, dtype)
