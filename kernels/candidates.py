"""The whole Newton–Schulz configurations that are worth timing for a problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dmuon.kernels.backends import BACKENDS
from dmuon.kernels.choose import (
    NEAR_SQUARE,
    TINY,
    NSChoice,
    Problem,
    ProductChoice,
    computing_dtype,
    heuristic_choice,
)
from dmuon.kernels.coefficients import CoefficientSet
from dmuon.kernels.gpu.arch import Arch, arch_of
from dmuon.kernels.restarts import default_restarts

MIXED_LIMIT = 768
"""The largest m at which the Gram product may be worth a backend that the m×m products are not."""


def plain_choice(problem: Problem) -> NSChoice:
    """The standard form with whole torch products, batched: what a library without tuning runs."""
    return NSChoice("standard")


def ns_candidates(
    problem: Problem, coefficients: CoefficientSet, backends: Sequence[str] | None = None
) -> list[NSChoice]:
    """Every configuration worth timing, :func:`heuristic_choice` first; none twice.

    The Gram form enters from an aspect of 1 up in fp64 and fp32; in half precision from
    :data:`NEAR_SQUARE` and m = :data:`TINY` up, since below its error exceeds the standard form's severalfold. The
    standard form enters below an aspect of 3, from where it costs twice as many operations, and for tiny matrices.

    Args:
        problem: a ``gram_ns`` problem.
        coefficients: its polynomials.
        backends: names to draw from; all that can run on the problem's device if ``None``.
    """
    device = torch.device(problem.device.split(":")[0])
    names = list(BACKENDS) if backends is None else list(backends)
    usable = [name for name in names if BACKENDS[name].unavailable(device) is None]
    first = heuristic_choice(problem, coefficients)
    found = [first] if set(first.backends) <= set(usable) else []
    arch = arch_of(device)
    for whole in _wholes(problem, usable, arch):
        for method, restarts in _forms(problem, coefficients):
            found.append(NSChoice(method, restarts, whole=whole))
    for products in _products(problem, usable, arch):
        for method, restarts in _forms(problem, coefficients):
            for loop in _loops(problem, products[0].backend):
                choice = NSChoice(method, restarts, *products, loop=loop)
                if choice not in found:
                    found.append(choice)
    return found


def _forms(problem: Problem, coefficients: CoefficientSet) -> Iterator[tuple[str, tuple[int, ...]]]:
    dtype = computing_dtype(problem)
    half = dtype.itemsize == 2
    if problem.n >= (NEAR_SQUARE if half else 1.0) * problem.m and not (half and problem.m < TINY):
        yield "gram", default_restarts(coefficients, dtype)
    if problem.n < 3 * problem.m or problem.m < TINY:
        yield "standard", ()


def _loops(problem: Problem, backend: str) -> tuple[bool, ...]:
    """Batched, one matrix at a time, or both.

    A CPU's batched products copy operands with gaps between rows, as all lower blocks are: measured, up to
    three times slower in bf16. So blocks go one matrix at a time there.
    """
    if problem.batch == 1:
        return (False,)
    if backend == "blocked" and problem.device.startswith("cpu"):
        return (True,)
    return (False, True)


def _wholes(problem: Problem, backends: Sequence[str], arch: Arch | None) -> Iterator[ProductChoice]:
    """Kernels that run the whole iteration."""
    for name in backends:
        for config in BACKENDS[name].configs("gram_ns", problem.m, problem.n, problem.dtype, arch):
            yield ProductChoice(name, config)


def _products(
    problem: Problem, backends: Sequence[str], arch: Arch | None
) -> Iterator[tuple[ProductChoice, ProductChoice, ProductChoice]]:
    """(gram, symmetric_product, apply): one backend and configuration for both symmetric products, or for the
    Gram product alone: its operand is longer, so there a backend pays at smaller m.

    What a backend has no product for is completed by torch's.
    """
    m, n, dtype = problem.m, problem.n, problem.dtype
    for name in backends:
        # On a GPU the full products are cuBLAS's: other kernels for them serve the weight update alone.
        applies = [] if arch else BACKENDS[name].configs("apply", m, n, dtype)
        apply = ProductChoice(name, applies[0]) if applies else ProductChoice("torch")
        squares = BACKENDS[name].configs("symmetric_product", m, n, dtype, arch)
        for config in BACKENDS[name].configs("gram", m, n, dtype, arch):
            product = ProductChoice(name, config)
            yield product, ProductChoice(name, _beside(config, squares)), apply
            if name != "torch" and m <= MIXED_LIMIT and "lower" not in config:
                yield product, ProductChoice("torch"), apply


def _beside(config: dict[str, Any], squares: list[dict[str, Any]]) -> dict[str, Any]:
    """The configuration of the m×m products beside that of the Gram product: the same, but that they read what it
    writes, and that their inner dimension is theirs to divide, if it is worth it."""
    if "lower" in config:
        return {**config, "lower": "both"}
    if "splits" in config:
        tiles = {name: value for name, value in config.items() if name != "splits"}
        divided = (square for square in squares if "splits" in square and tiles.items() <= square.items())
        return next(divided, tiles)
    return config
