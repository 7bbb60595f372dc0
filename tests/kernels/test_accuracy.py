"""Newton–Schulz against the polynomial of an SVD in fp64: forms, precisions, scales, spectra and shapes."""

from __future__ import annotations

import math

import pytest
import torch
from spectra import DTYPES, ROUNDOFF, SPECTRA, expected, factors, matrix, peak, polynomial, slope

from dmuon.kernels import (
    default_restarts,
    exact_polar,
    gram_ns,
    keller_jordan,
    polar_express,
    polynomial_polar,
    you,
)
from dmuon.kernels.choose import NSChoice, ProductChoice
from dmuon.kernels.reference import relative_error
from dmuon.kernels.run import run_ns

SETS = {"polar_express": polar_express(), "keller_jordan": keller_jordan(), "you": you()}
SHAPES = [
    (64, 64),
    (40, 100),
    (100, 40),
    (1, 50),
    (50, 1),
    (1, 1),
    (63, 63),
    (127, 129),
    (3, 20, 50),
    (2, 2, 50, 20),
]
HALVES = ProductChoice("blocked", {"block": 24, "split": "halves"})
PANELS = ProductChoice("blocked", {"block": 24, "split": "panel"})


@pytest.mark.case(row="N6")
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_forms_equal_the_polynomial_in_fp64(name: str, shape: tuple[int, ...]) -> None:
    G = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact = expected(G, SETS[name].steps)
    for method in ("gram", "standard"):
        result = gram_ns(G, coefficients=name, method=method)
        assert relative_error(result, exact).max() < 1e-12, method
    assert relative_error(polynomial_polar(G, SETS[name]), exact).max() < 1e-13


@pytest.mark.parametrize("name", SETS)
def test_the_reference_is_the_polynomial_of_known_singular_values(name: str) -> None:
    """A matrix built from its factors: its exact result needs no decomposition."""
    U, s, Vh = factors("decaying", 40, 100)
    exact = (U * polynomial(SETS[name].steps, s / s.norm())) @ Vh
    assert relative_error(polynomial_polar((U * s) @ Vh, SETS[name]), exact) < 1e-13


BOUNDS = {  # precision: of the standard form in p'(0)·u, of the Gram form in p'(0)·u or p'(0)²·u
    "bf16": (1, (1, 1)),
    "fp16": (1, (1, 1)),
    "fp32": (4, (1, 2)),
    "fp64": (100, (10, 2)),
}
"""docs/kernels.md states and explains these."""


@pytest.mark.case(row="N3")
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_error_stays_within_the_documented_bound(spectrum: str, name: str, precision: str) -> None:
    """The singular values included: the polynomial's own largest value, and 64 u for rounding."""
    coefficients, working, u = SETS[name], DTYPES[precision], ROUNDOFF[precision]
    G = matrix(spectrum, 96, 192)
    exact, p = expected(G, coefficients.steps), slope(coefficients.steps)
    factor, (gram_factor, power) = BOUNDS[precision]
    restarts = default_restarts(coefficients, working)
    choices = {
        "standard": (NSChoice("standard"), factor * p * u),
        "gram": (NSChoice("gram", restarts), gram_factor * p**power * u),
        "halves": (NSChoice("gram", restarts, HALVES, HALVES), gram_factor * p**power * u),
        "panels": (NSChoice("gram", restarts, PANELS, PANELS), gram_factor * p**power * u),
    }
    for label, (choice, limit) in choices.items():
        result = run_ns(G, choice, coefficients, working, torch.empty_like(G))
        error = torch.linalg.matrix_norm(result - exact)
        assert error <= limit, label
        assert torch.linalg.matrix_norm(result, 2) <= peak(coefficients.steps) + 64 * u + 1e-6, label


@pytest.mark.case(row="N3")
@pytest.mark.parametrize("name", SETS)
def test_equal_rows_round_alike_within_the_documented_bound(name: str) -> None:
    """Rounding of few distinct rows does not average out; large enough for bf16 products on a CPU too."""
    coefficients = SETS[name]
    choice = NSChoice("gram", default_restarts(coefficients, torch.bfloat16))
    for seed, distinct in ((0, 2), (1, 3), (2, 3), (3, 6)):
        rows = torch.randn(distinct, 520, generator=torch.Generator().manual_seed(seed))
        G = rows[torch.arange(260) % distinct]
        result = run_ns(G, choice, coefficients, torch.bfloat16, torch.empty_like(G))
        largest = torch.linalg.matrix_norm(result.double(), 2)
        assert largest <= peak(coefficients.steps) + 128 * ROUNDOFF["bf16"]


def test_without_restarts_half_precision_blows_up() -> None:
    """What the restarts are for: rows that are nearly the same, as gradients at initialisation can be."""
    G = 1 + 0.05 * torch.randn(48, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for dtype in (torch.float16, torch.bfloat16):
        bare = run_ns(G, NSChoice("gram"), polar_express(), dtype).double()
        assert not torch.linalg.matrix_norm(bare, 2) < 10
        restarts = default_restarts(polar_express(), dtype)
        safe = run_ns(G, NSChoice("gram", restarts), polar_express(), dtype).double()
        assert torch.linalg.matrix_norm(safe, 2) < 1.3


def test_blocks_lose_nothing_on_low_rank() -> None:
    """Mirroring P·Q, or transposing the second factor of P·(R·P), would show here: 0.15 was measured."""
    G = matrix("rank_1", 96, 192)
    exact = expected(G, polar_express().steps)
    whole = run_ns(G, NSChoice("gram"), polar_express(), torch.float32)
    for products in (HALVES, PANELS):
        blocked = run_ns(G, NSChoice("gram", (), products, products), polar_express(), torch.float32)
        assert relative_error(blocked, exact) < 4 * relative_error(whole, exact) + 1e-4


def test_nearly_square_matrices_take_the_standard_form_in_half_precision() -> None:
    G = matrix("gaussian", 127, 129)
    exact = expected(G, polar_express().steps)
    chosen = relative_error(gram_ns(G, precision="fp16"), exact)
    standard = relative_error(gram_ns(G, precision="fp16", method="standard"), exact)
    gram = relative_error(gram_ns(G, precision="fp16", method="gram"), exact)
    assert chosen == standard
    assert gram > 2 * standard


@pytest.mark.case(row="N1")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_the_result_does_not_depend_on_scale(precision: str, dtype: torch.dtype, method: str) -> None:
    shape = (2, 32, 80) if precision == "bf16" else (32, 80)  # a small lone one is computed in fp32
    G = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(2))
    reference = gram_ns(G, precision=precision, method=method).double()
    for scale in (1e-30, 1e-12, 1e-9, 1e4, 1e15, 1e18, 1e30):
        result = gram_ns(G * scale, precision=precision, method=method).double()
        tolerance = {
            "fp64": 1e-6 if dtype == torch.float32 else 1e-13,
            "fp32": 2e-5,
            "fp16": 1e-2,
            "bf16": 1e-1,
        }
        assert relative_error(result, reference).max() < tolerance[precision], scale
    if dtype == torch.float64:
        for scale in (1e-290, 1e290):
            result = gram_ns(G * scale, precision=precision, method=method)
            assert relative_error(result, reference).max() < 0.1


@pytest.mark.case(row="N1")
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_nor_does_that_of_a_narrow_matrix_in_fp32(method: str) -> None:
    G = torch.randn(80, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    reference = gram_ns(G, precision="fp32", method=method, out=torch.empty(80, 32))
    for power in (-110, -45, 20, 65, 120):
        result = gram_ns(G * 2.0**power, precision="fp32", method=method, out=torch.empty(80, 32))
        assert relative_error(result, reference) < 2e-5, power


@pytest.mark.case(row="N2")
@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_nan_and_inf_keep_to_their_own_matrix(precision: str, method: str, dtype: torch.dtype) -> None:
    G = torch.randn(5, 24, 60, generator=torch.Generator().manual_seed(3)).to(dtype)
    clean = gram_ns(G, precision=precision, method=method)
    G[1] = 0
    G[2, 3, 4] = math.nan
    G[3, 0, 0] = -math.inf
    result = gram_ns(G, precision=precision, method=method)
    assert (result[1] == 0).all()
    assert result[2].isnan().all()
    assert result[3].isnan().all()
    assert torch.equal(result[0], clean[0]) and torch.equal(result[4], clean[4])


def test_the_exact_polar_factor_is_orthogonal_and_leaves_missing_directions_out() -> None:
    G = matrix("gaussian", 20, 30)
    polar = exact_polar(G)
    assert (polar @ polar.mT - torch.eye(20)).abs().max() < 1e-12
    low = matrix("rank_1", 20, 30)
    assert torch.linalg.svdvals(exact_polar(low)).sum() == pytest.approx(1, abs=1e-9)
    assert exact_polar(torch.zeros(3, 4)).count_nonzero() == 0
