from __future__ import annotations

import math

import pytest
import torch
from simulated import PLAIN

from dmuon.autotune import ns_problem
from dmuon.autotune.probes import SPECTRA, Probes, gaussian_spectrum, known_pair
from dmuon.kernels.coefficients import keller_jordan, polar_express, resolve_coefficients
from dmuon.kernels.reference import polynomial_polar, relative_error
from dmuon.kernels.run import run_ns

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (31, 31), (24, 100), (64, 65)])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("coefficients", [polar_express(), keller_jordan()], ids=lambda each: each.name)
def test_the_known_result_is_what_an_svd_gives(shape, spectrum, coefficients):
    m, n = shape
    values = SPECTRA[spectrum](m, n)
    G, exact = known_pair(values, n, coefficients, CPU, seed=3)
    assert torch.linalg.svdvals(G).numpy() == pytest.approx(
        values.sort(descending=True)[0].numpy(), abs=1e-13
    )
    assert relative_error(exact, polynomial_polar(G, coefficients)) < 1e-11


def test_probes_are_dense_and_look_gaussian():
    for values in (spectrum(96, 256) for spectrum in SPECTRA.values()):
        G, _ = known_pair(values, 256, polar_express(), CPU, seed=0)
        scaled = G / G.std()
        assert scaled.abs().max() < 7
        assert (scaled.abs() > 0.1).double().mean() > 0.85
        assert 2.5 < (scaled**4).mean() < 4


@pytest.mark.parametrize("shape", [(128, 128), (128, 512)])
def test_the_gaussian_spectrum_is_that_of_gaussian_matrices(shape):
    m, n = shape
    G = torch.randn(8, m, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = (torch.linalg.svdvals(G) / math.sqrt(n)).mean(0)
    assert gaussian_spectrum(m, n).flip(0).numpy() == pytest.approx(seen.numpy(), abs=0.03)


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_every_spectrum_is_checked_and_a_right_result_passes(batch):
    problem = ns_problem(12, 40, batch, precision="fp64")
    probes = Probes(problem, polar_express(), CPU)
    seen = set()
    for group, G in enumerate(probes.batches):
        assert G.shape == (batch, 12, 40)
        errors = probes.errors(group, polynomial_polar(G, polar_express()))
        assert max(errors.values()) < 1e-11
        seen |= set(errors)
    assert seen == set(SPECTRA)


@pytest.mark.parametrize("batch", [1, 4, 90_000])
def test_one_wrong_matrix_shows_wherever_it_is(batch):
    problem = ns_problem(4, 16, batch)
    probes = Probes(problem, polar_express(), CPU)
    group = len(probes.batches) - 1
    result = run_ns(probes.batches[group], PLAIN, polar_express(), torch.float32)
    assert max(probes.errors(group, result).values()) < 1e-3
    for spoil in (lambda matrix: matrix.mul_(1.02), lambda matrix: matrix[1, 3].fill_(math.nan)):
        for place in (0, batch // 2, batch - 1):
            spoiled = result.clone()
            spoil(spoiled[place])
            assert any(not error < 0.01 for error in probes.errors(group, spoiled).values())


def test_mixing_up_two_matrices_shows():
    """Those 3 apart have the same spectrum, but signs of their own."""
    probes = Probes(ns_problem(8, 16, 6), polar_express(), CPU)
    result = run_ns(probes.batches[0], PLAIN, polar_express(), torch.float32)
    assert max(probes.errors(0, result[[3, 1, 2, 0, 4, 5]]).values()) > 0.5


def test_a_changed_input_shows_and_is_refilled():
    probes = Probes(ns_problem(8, 16, 3), polar_express(), CPU)
    assert probes.intact(0)
    probes.batches[0][2, 7, 15] += 1
    assert not probes.intact(0)
    probes.refill(0)
    assert probes.intact(0)


def test_a_callers_own_coefficients():
    own = resolve_coefficients([(2.0, -1.5, 0.5), (1.875, -1.25, 0.375)])
    G, exact = known_pair(gaussian_spectrum(20, 30), 30, own, CPU, seed=1)
    assert relative_error(exact, polynomial_polar(G, own)) < 1e-12
