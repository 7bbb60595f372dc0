"""Coefficient sets and restart positions against published figures."""

from __future__ import annotations

import pytest
import torch

from dmuon.kernels import CoefficientSet, default_restarts, keller_jordan, polar_express, search_restarts, you
from dmuon.kernels.coefficients import POLAR_EXPRESS_SAFETY, coefficients_of, resolve_coefficients
from dmuon.kernels.restarts import ROUNDING, SHIPPED, SPREAD_LIMIT

POLAR_EXPRESS_5 = [
    (8.28721, -23.59589, 17.30039),
    (4.10706, -2.94785, 0.54484),
    (3.94869, -2.90890, 0.55182),
    (3.31842, -2.48849, 0.51005),
    (2.30065, -1.66890, 0.41881),
]
GOLDEN = [  # set, δ, count, positions, spread
    (you(), -4e-4, 1, (2,), 53),
    (you(), -4e-4, 2, (1, 3), 35),
    (you(), -4e-3, 1, (1,), 7.6e5),
    (you(), -4e-3, 2, (1, 3), 35),
    (polar_express(), -4e-4, 1, (2,), 85),
    (polar_express(), -4e-4, 2, (1, 2), 61),
    (polar_express(), -4e-3, 1, (1,), 6.4e4),
    (polar_express(), -4e-3, 2, (1, 3), 87),
    (keller_jordan(), -4e-4, 1, (3,), 62),
    (keller_jordan(), -4e-4, 2, (2, 3), 19),
    (keller_jordan(), -4e-3, 1, (2,), 1150),
    (keller_jordan(), -4e-3, 2, (1, 3), 23),
]


def test_polar_express_is_derived_to_the_published_figures() -> None:
    for (a, b, c), row in zip(polar_express().steps, POLAR_EXPRESS_5, strict=True):
        s = POLAR_EXPRESS_SAFETY
        assert (a * s, b * s**3, c * s**5) == pytest.approx(row, abs=6e-6)


def test_polar_express_extends_and_converges() -> None:
    x = torch.logspace(-3, 0, 5000, dtype=torch.float64)
    errors = []
    for steps in (5, 7, 10):
        y = x
        for a, b, c in polar_express(steps, safety=1.0).steps:
            y = a * y + b * y**3 + c * y**5
        errors.append(float((y - 1).abs().max()))
    assert errors[0] < 0.13 and errors[1] < 5e-3 and errors[2] < 1e-9


@pytest.mark.parametrize(("coefficients", "delta", "count", "places", "spread"), GOLDEN)
def test_search_reproduces_the_golden_table(
    coefficients: CoefficientSet, delta: float, count: int, places: tuple[int, ...], spread: float
) -> None:
    found, found_spread = search_restarts(coefficients.steps, count, delta)
    assert found == places
    assert found_spread == pytest.approx(spread, rel=0.02)


@pytest.mark.parametrize(("key", "precision"), SHIPPED)
def test_shipped_positions_are_what_the_search_finds(key: str, precision: str) -> None:
    coefficients = coefficients_of(key)
    assert coefficients is not None
    shipped = SHIPPED[key, precision]
    for count in range(len(shipped)):
        assert search_restarts(coefficients.steps, count, ROUNDING[precision])[1] > SPREAD_LIMIT[precision]
    places, spread = search_restarts(coefficients.steps, len(shipped), ROUNDING[precision])
    assert places == shipped and spread <= SPREAD_LIMIT[precision]


def test_wide_precisions_need_no_restart_and_long_sets_need_more() -> None:
    assert default_restarts(polar_express(), torch.float32) == ()
    assert default_restarts(polar_express(), torch.float64) == ()
    assert len(default_restarts(polar_express(10), torch.bfloat16)) == 3
    own = resolve_coefficients([*keller_jordan().steps])
    assert default_restarts(own, torch.bfloat16) == default_restarts(keller_jordan(), torch.bfloat16)


@pytest.mark.parametrize(("count", "delta"), [(5, -1e-3), (-1, -1e-3), (1, 1e-3)])
def test_bad_search_arguments(count: int, delta: float) -> None:
    with pytest.raises(ValueError, match=r"count|rounding"):
        search_restarts(you().steps, count, delta)


@pytest.mark.parametrize("spec", ["muon", [], [(1, 2)], [(1, 2, float("nan"))], [(1, 2, "x")], 3, None])
def test_bad_coefficients(spec: object) -> None:
    with pytest.raises((ValueError, TypeError), match="coefficients"):
        resolve_coefficients(spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "made", [polar_express(), polar_express(7), polar_express(5, 1.02), keller_jordan(9), you()]
)
def test_a_key_leads_back_to_its_set(made: CoefficientSet) -> None:
    assert coefficients_of(made.key) == made
    assert coefficients_of("custom:5:0123") is None


def test_step_counts_are_checked() -> None:
    for make in (polar_express, keller_jordan):
        with pytest.raises(ValueError, match="steps"):
            make(0)
    with pytest.raises(ValueError, match="safety"):
        polar_express(5, 0.5)
