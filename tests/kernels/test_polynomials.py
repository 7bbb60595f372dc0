"""That the derived Polar Express steps are the best quintics, by Chebyshev's criterion instead of the derivation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dmuon.kernels import polar_express
from dmuon.kernels.coefficients import (
    POLAR_EXPRESS_CUSHION,
    POLAR_EXPRESS_LOWER,
    CoefficientSet,
    coefficients_of,
    keller_jordan,
    resolve_coefficients,
    you,
)


def value(step: Sequence[float], x: np.ndarray) -> np.ndarray:
    a, b, c = step
    return a * x + b * x**3 + c * x**5


def intervals(coefficients: CoefficientSet) -> list[tuple[float, float]]:
    """Where the singular values lie before each step: [ℓ, 1], then what the steps before make of it."""
    found, lower, upper = [], POLAR_EXPRESS_LOWER, 1.0
    for step in coefficients.steps:
        found.append((lower, upper))
        y = value(step, np.geomspace(lower, upper, 200_001))
        lower, upper = y.min(), y.max()
    return found


@pytest.mark.parametrize("steps", [1, 5, 8])
def test_every_step_is_the_best_odd_quintic_for_its_interval(steps: int) -> None:
    """An odd quintic is the best approximation of 1 exactly if its error alternates at four points (Chebyshev):
    x, x³, x⁵ are a Haar system for x > 0. With the cushion in force the interval starts at a fraction of its
    upper end, and the step is that optimum, scaled to centre its range around 1.
    """
    coefficients = polar_express(steps, safety=1.0)
    for (lower, upper), step in zip(intervals(coefficients), coefficients.steps, strict=True):
        x = np.geomspace(max(lower, POLAR_EXPRESS_CUSHION * upper), upper, 400_001)
        y = value(step, x)
        error = y / ((y.min() + y.max()) / 2) - 1
        level = np.abs(error).max()
        if level < 1e-12:
            continue
        peaks = np.sign(error[np.abs(error) > (1 - 1e-6) * level])
        assert 1 + np.count_nonzero(np.diff(peaks)) >= 4
        y = value(step, np.geomspace(lower, upper, 400_001))
        assert y.min() + y.max() == pytest.approx(2, abs=1e-9)


def test_no_neighbour_of_a_step_is_better() -> None:
    coefficients = polar_express(3, safety=1.0)
    rng = np.random.default_rng(0)
    for (lower, upper), step in zip(intervals(coefficients), coefficients.steps, strict=True):
        x = np.geomspace(max(lower, POLAR_EXPRESS_CUSHION * upper), upper, 20_001)
        middle = (value(step, x).min() + value(step, x).max()) / 2
        best = np.abs(value(step, x) / middle - 1).max()
        for scale in (1e-4, 1e-2):
            for direction in rng.standard_normal((100, 3)):
                other = np.array(step) / middle * (1 + scale * direction)
                assert np.abs(value(other, x) - 1).max() > best


def test_safety_divides_the_argument() -> None:
    x = np.linspace(0, 1, 100)
    for plain, safe in zip(polar_express(5, 1.0).steps, polar_express(5, 1.05).steps, strict=True):
        assert value(safe, x) == pytest.approx(value(plain, x / 1.05), rel=1e-12)


@pytest.mark.parametrize(("steps", "worst"), [(keller_jordan().steps, 0.33), (you().steps, 0.15)])
def test_transcribed_sets_do_what_their_authors_say(
    steps: Sequence[tuple[float, float, float]], worst: float
) -> None:
    """Singular values from 1e-2 on end near 1: Keller Jordan's in [0.68, 1.2], YOU's closer."""
    x = np.linspace(1e-2, 1, 100_001)
    for step in steps:
        x = value(step, x)
    assert np.abs(x - 1).max() < worst


def test_a_list_is_a_set_of_its_own_with_a_key_of_its_own() -> None:
    one = resolve_coefficients([[1.5, -0.5, 0]])
    assert one.steps == ((1.5, -0.5, 0.0),) and len(one) == 1 and one.name == "custom"
    assert one == resolve_coefficients(((1.5, -0.5, 0.0),))
    assert one.key != resolve_coefficients([[1.5, -0.5, 1e-9]]).key
    assert resolve_coefficients(one) is one
    assert resolve_coefficients("polar_express") == polar_express()


@pytest.mark.parametrize(
    "key", ["", "polar_express", "polar_express:x", "polar_express:0", "you:6", "keller_jordan:5:1", "a:b:c"]
)
def test_a_key_that_no_named_set_has(key: str) -> None:
    assert coefficients_of(key) is None
