from __future__ import annotations

import numpy as np
import pytest
import torch
from simulated import HEURISTIC, PLAIN, blocked, trial

from dmuon.autotune import CostTable, costs, ns_problem
from dmuon.autotune.costs import features, nonnegative_least_squares, operations
from dmuon.kernels import run
from dmuon.kernels.choose import NSChoice, heuristic_choice
from dmuon.kernels.coefficients import polar_express
from dmuon.tuning_cache import Store

TRUE_RATES = np.array([1 / 4e7, 1 / 2e6, 4e-3])


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch):
    monkeypatch.setattr(costs, "shipped_trials", lambda device: [])


def truth(choice: NSChoice, m: int, n: int, batch: int = 1) -> float:
    return float(np.dot(features(ns_problem(m, n, batch), choice), TRUE_RATES))


@pytest.mark.parametrize(("m", "n", "steps"), [(96, 256, 5), (100, 100, 7)])
def test_operations_are_what_the_products_add_up_to(m, n, steps, monkeypatch):
    """Counted from the products of a real run, against the closed formula."""
    counted = [0, 0]
    build = run._build

    def counting(op, choice):
        product = build(op, choice)

        def call(A, *rest, **options):
            rows, depth = A.shape[-2:]
            columns = {"gram": rows, "symmetric_product": rows, "apply": rest[0].shape[-1]}[op]
            counted[0] += 2 * rows * depth * columns * A.shape[0]
            counted[1] += 1
            return product(A, *rest, **options)

        return call

    monkeypatch.setattr(run, "_build", counting)
    coefficients = polar_express(steps)
    problem = ns_problem(m, n, 2, coefficients=coefficients)
    G = torch.randn(2, m, n)
    for choice in (PLAIN, NSChoice("gram"), NSChoice("gram", (2,)), NSChoice("gram", (1, 3))):
        counted[:] = 0, 0
        run.run_ns(G, choice, coefficients, torch.float32)
        assert operations(problem, choice) == counted[0]
        assert features(problem, choice)[2] == counted[1]


def test_symmetric_backends_need_half_of_all_but_apply():
    problem = ns_problem(128, 512)
    dense, halved = operations(problem, NSChoice("gram", (2,))), operations(problem, blocked(64, "gram"))
    assert operations(problem, NSChoice("gram", (2,))) == 8 * 128**2 * 512 + 28 * 128**3 == dense
    assert halved == 3 * 128**2 * 512 + 17 * 128**3


def test_a_measured_shape_costs_what_was_measured(store: Store):
    store.record(
        [trial(PLAIN, 7.0, ns_problem(64, 256, 3)), trial(blocked(128), 5.0, ns_problem(64, 256, 3))]
    )
    cost = CostTable(store, torch.device("cpu"), "fp32").ms(256, 64, 3)
    assert (cost.ms, cost.source) == (5.0, "measured")


def test_the_model_finds_the_true_rates(store: Store):
    shapes = [(64, 256, 1), (512, 512, 1), (512, 4096, 2), (128, 512, 32), (1024, 1024, 1)]
    store.record(
        trial(choice, truth(choice, *shape), ns_problem(*shape))
        for shape in shapes
        for choice in (PLAIN, HEURISTIC, blocked(256))
    )
    table = CostTable(store, torch.device("cpu"), "fp32")
    assert table._rates == pytest.approx(TRUE_RATES, rel=1e-6)
    far = table.ms(4096, 11008)
    assert far.source == "model"
    assert far.ms == pytest.approx(truth(heuristic(4096, 11008), 4096, 11008), rel=1e-6)


def test_the_model_is_close_under_noise(store: Store):
    noise = np.random.default_rng(0)
    shapes = [(64 * k, 256 * k, 1) for k in range(1, 9)] + [(256 * k, 256 * k, 1) for k in range(1, 6)]
    store.record(
        trial(choice, truth(choice, *shape) * noise.lognormal(0, 0.05), ns_problem(*shape))
        for shape in shapes
        for choice in (PLAIN, HEURISTIC)
    )
    cost = CostTable(store, torch.device("cpu"), "fp32").ms(2048, 11008)
    assert cost.ms == pytest.approx(truth(heuristic(2048, 11008), 2048, 11008), rel=0.15)


def test_a_large_shape_that_is_off_does_not_spoil_the_small_ones(store: Store):
    """The error that is minimised is relative: seconds at one shape must not outweigh milliseconds at others."""
    shapes = [(32, 64), (64, 64), (64, 256), (128, 128), (128, 512), (256, 256)]
    store.record(trial(PLAIN, truth(PLAIN, *shape), ns_problem(*shape)) for shape in shapes)
    store.record([trial(PLAIN, 1.1 * truth(PLAIN, 4096, 8192), ns_problem(4096, 8192))])
    cost = CostTable(store, torch.device("cpu"), "fp32").ms(12, 20)
    assert cost.ms == pytest.approx(truth(heuristic(12, 20), 12, 20), rel=0.2)


def test_near_a_measured_shape_its_time_is_carried_over(store: Store):
    """A device that is twice as slow at this shape as the model says stays so a little further on."""
    store.record([trial(HEURISTIC, 2 * truth(HEURISTIC, 512, 2048, 8), ns_problem(512, 2048, 8))])
    store.record(
        [trial(PLAIN, truth(PLAIN, *s), ns_problem(*s)) for s in ((64, 64), (2048, 2048), (128, 8192))]
    )
    cost = CostTable(store, torch.device("cpu"), "fp32").ms(512, 2048, 7)
    assert cost.source == "model"
    assert cost.ms == pytest.approx(2 * truth(HEURISTIC, 512, 2048, 7), rel=0.1)


def test_with_nothing_measured_it_is_labelled_default(store: Store):
    table = CostTable(store, torch.device("cpu"), "fp32")
    assert not table.calibrated
    small, large = table.ms(512, 2048), table.ms(1024, 4096)
    assert small.source == large.source == "default"
    assert 6 < large.ms / small.ms < 9
    assert not store.path.exists()


def test_other_precisions_and_stale_trials_do_not_count(store: Store):
    store.record(
        [
            trial(PLAIN, 7.0, ns_problem(64, 256, precision="bf16")),
            trial(PLAIN, 7.0, ns_problem(64, 256, coefficients="you")),
            trial(PLAIN, 7.0, ns_problem(64, 256), versions={"torch": "1.0"}),
        ]
    )
    assert CostTable(store, torch.device("cpu"), "fp32").ms(64, 256).source == "default"


def test_an_unknown_precision_is_refused(store: Store):
    with pytest.raises(ValueError, match="dtype must be one of"):
        CostTable(store, torch.device("cpu"), "float32")


@pytest.mark.parametrize("seed", range(20))
def test_least_squares_keeps_to_the_conditions_of_optimality(seed):
    """Of Karush, Kuhn and Tucker: the gradient is zero where x > 0 and does not point inwards where x = 0."""
    random = np.random.default_rng(seed)
    A, b = random.uniform(0, 1, (8, 3)) ** 3, random.normal(0.3, 1, 8)
    x = nonnegative_least_squares(A, b)
    gradient = A.T @ (A @ x - b)
    assert (x >= 0).all()
    assert gradient[x > 0] == pytest.approx(0, abs=1e-9)
    assert (gradient[x == 0] >= -1e-9).all()


def test_one_measurement_is_explained_by_arithmetic():
    assert nonnegative_least_squares(np.array([[2.0, 3.0, 5.0]]), np.ones(1)) == pytest.approx([0.5, 0, 0])


def heuristic(m: int, n: int) -> NSChoice:
    return heuristic_choice(ns_problem(m, n))
