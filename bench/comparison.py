"""One shape in one precision: DMuon, torch and the peers on the same input, checked, then timed in turn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
from cases import Shape
from contenders import Contender, Local, PeerProcess, failure
from peers import (
    DTYPES,
    KELLER_JORDAN,
    PEERS,
    NotAvailable,
    Steps,
    build_peer,
    build_torch,
    torch_newton_schulz,
)
from timing import Ratio, interleave, ratio
from torch import Tensor

from dmuon.autotune.describe import choice_text
from dmuon.kernels import gram_ns
from dmuon.kernels.choose import current_chooser, heuristic_choice
from dmuon.kernels.reference import relative_error, tolerance

OURS, TORCH = "dmuon", "torch.optim.Muon"

SAMPLE_MS = 10.0
"""A sample repeats a quicker run until it lasts about this long."""

CASE_LIMIT_S, LEAST_ROUNDS = 60.0, 5
"""A shape that has taken this long is left after so many rounds."""


class WrongResult(Exception):
    """DMuon's or torch's numbers are off: there is nothing to time."""


@dataclass(frozen=True)
class Timing:
    """One contender's samples, and how many times DMuon's time it takes in the same rounds.

    ``error`` is the relative Frobenius error against the same polynomials in fp64, the worst of a batch.
    """

    samples_ms: list[float]
    error: float
    over_dmuon: Ratio

    @property
    def median_ms(self) -> float:
        return median(self.samples_ms)


@dataclass(frozen=True)
class Result:
    """``timings`` by contender, DMuon and torch first; ``absent`` says why a peer is not among them."""

    shape: Shape
    precision: str
    choice: str
    target: float | None
    timings: dict[str, Timing]
    absent: dict[str, str]

    @property
    def speedup(self) -> Ratio:
        """DMuon's over torch."""
        return self.timings[TORCH].over_dmuon

    @property
    def passed(self) -> bool | None:
        return None if self.target is None else self.speedup.of_medians >= self.target


def compare(
    shape: Shape, precision: str, device: str, rounds: int, processes: Mapping[str, PeerProcess]
) -> Result:
    """Check all contenders on one Gaussian input, in fp32 unless the precision is fp64, and time them.

    Raises:
        WrongResult: DMuon or torch misses the precision's documented tolerance. A peer that does is left out.
    """
    size = (shape.rows, shape.cols) if shape.batch == 1 else (shape.batch, shape.rows, shape.cols)
    given = torch.float64 if precision == "fp64" else torch.float32
    G = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=given).to(device)
    references: dict[Steps, Tensor] = {}
    contenders: dict[str, Contender] = {
        OURS: Local(lambda G: gram_ns(G, coefficients="keller_jordan", precision=precision), G),
        TORCH: Local(build_torch(precision, device), G),
    }
    errors = {name: _error(each, G, KELLER_JORDAN, references) for name, each in contenders.items()}
    limit = tolerance(DTYPES[precision])
    for name, error in errors.items():
        if not error <= limit:
            raise WrongResult(f"{name}, {shape} in {precision}: error {error:.1e} is above {limit:.0e}")
    absent = {}
    for name, peer in PEERS.items():
        try:
            contender = _peer(name, precision, G, processes)
            error = _error(contender, G, peer.steps, references)
            if not error <= limit:
                raise NotAvailable(f"wrong by {error:.1e}, above {limit:.0e}")
        except NotAvailable as reason:
            absent[name] = str(reason)
        except Exception as reason:
            absent[name] = failure(reason)
        else:
            contenders[name], errors[name] = contender, error

    samplers = {}
    for name, contender in contenders.items():
        repeats = math.ceil(SAMPLE_MS / contender.sample(1))
        samplers[name] = lambda contender=contender, repeats=repeats: contender.sample(repeats)
    samples = interleave(samplers, rounds, CASE_LIMIT_S, LEAST_ROUNDS)
    timings = {
        name: Timing(times, errors[name], ratio(times, samples[OURS])) for name, times in samples.items()
    }
    choice = _choice(shape, precision, device)
    return Result(shape, precision, choice, shape.target(precision, device), timings, absent)


def _peer(name: str, precision: str, G: Tensor, processes: Mapping[str, PeerProcess]) -> Contender:
    if name in processes:
        return processes[name].contender(precision, G)
    return Local(build_peer(name, precision, G.device.type), G)


def _error(contender: Contender, G: Tensor, steps: Steps, references: dict[Steps, Tensor]) -> float:
    if steps not in references:
        exact = [torch_newton_schulz(matrix, torch.float64, steps) for matrix in G.reshape(-1, *G.shape[-2:])]
        references[steps] = torch.stack(exact).reshape(G.shape)
    result = contender.result().to(G.device)
    return float(relative_error(result, references[steps]).max())


def _choice(shape: Shape, precision: str, device: str) -> str:
    """What ``gram_ns`` ran: the tuned choice, or the heuristics'."""
    problem = shape.problem(precision, device)
    chooser = current_chooser()
    tuned = None if chooser is None else chooser.choose(problem)
    return choice_text(tuned or heuristic_choice(problem)) + ("" if tuned else " (untuned)")
