"""What an owner's step costs: whole steps as measured, and labelled where a model stands in."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmuon.autotune.versions import versions_now
from dmuon.kernels.backends import source_hash
from dmuon.kernels.choose import device_key
from dmuon.planner import Item, StepCosts, make_plan, profile, profiling
from dmuon.planner.costs import AROUND_BYTES, AROUND_LAUNCHES, STEP
from dmuon.tuning_cache import Store, Trial

CPU = torch.device("cpu")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "tuning.db")


def step(rows: int, cols: int, batch: int, ms: float, **changes: Any) -> Trial:
    """A measured step of torch's own products."""
    values: dict[str, Any] = {
        "op": STEP,
        "batch": batch,
        "m": rows,
        "n": cols,
        "dtype": "fp32",
        "device": device_key(CPU),
        "coefficients": "polar_express:5",
        "backend": "torch",
        "config": {},
        "status": "ok",
        "error": 0.0,
        "tolerance": 1e-3,
        "median_ms": ms,
        "spread": 0.0,
        "samples": 9,
        "message": "",
        "versions": versions_now(["torch"], device_key(CPU)),
        "source_hash": source_hash(["torch"]),
        "created_at": time.time(),
    }
    return Trial(**{**values, **changes})


def test_a_measured_step_costs_what_was_measured(store: Store) -> None:
    store.record([step(64, 256, 3, 7.0, created_at=1.0), step(64, 256, 3, 5.0, created_at=2.0)])
    cost = StepCosts(store, CPU, "fp32").cost(64, 256, 3)
    assert (cost.ms, cost.source) == (5.0, "measured")


def test_between_measured_batches_it_is_interpolated(store: Store) -> None:
    store.record([step(64, 256, 2, 4.0), step(64, 256, 6, 8.0), step(64, 256, 1, 3.0)])
    costs = StepCosts(store, CPU, "fp32")
    assert [costs.cost(64, 256, batch).ms for batch in (2, 3, 4, 5, 6)] == [4.0, 5.0, 6.0, 7.0, 8.0]
    assert costs.cost(64, 256, 3).source == "model"


def test_beyond_measured_batches_and_at_other_shapes_the_model_carries_on(store: Store) -> None:
    """Steps that obey the model, three times as slow as expected around Newton–Schulz."""
    bare = StepCosts(store, CPU, "fp32")
    truth = np.array([1.0, 3.0, 2.0]) * bare._weights

    def ms(rows: int, cols: int, batch: int) -> float:
        iteration = bare.table.ms(rows, cols, batch).ms
        features = [iteration, batch * rows * cols * AROUND_BYTES, AROUND_LAUNCHES]
        return float(np.dot(features, truth))

    shapes = [(64, 64, 1), (64, 256, 1), (512, 128, 2), (256, 1024, 1), (32, 32, 9), (96, 96, 4)]
    store.record(step(*shape, ms(*shape)) for shape in shapes)
    costs = StepCosts(store, CPU, "fp32")
    for shape in ((64, 256, 5), (768, 768, 2), (256, 64, 1)):
        cost = costs.cost(*shape)
        assert cost.source == "model"
        assert cost.ms == pytest.approx(ms(*shape), rel=1e-6)


def test_with_nothing_measured_it_says_so(store: Store) -> None:
    costs = StepCosts(store, CPU, "fp32")
    cost = costs.cost(512, 2048, 2)
    assert cost.source == "default"
    # Newton–Schulz, and the reads and writes around it.
    assert cost.ms > costs.table.ms(512, 2048, 2).ms
    assert not store.path.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": {"torch": "1.0"}},
        {"source_hash": "other"},
        {"dtype": "bf16"},
        {"device": "cpu:another:1"},
        {"coefficients": "you:5"},
        {"status": "rejected"},
    ],
)
def test_what_no_longer_holds_does_not_count(changes: dict[str, Any], store: Store) -> None:
    store.record([step(64, 256, 3, 7.0, **changes)])
    assert StepCosts(store, CPU, "fp32").cost(64, 256, 3).source == "default"


def test_a_plan_says_which_costs_were_modelled(store: Store) -> None:
    store.record([step(64, 256, 1, 7.0)])
    items = [Item("a", ((1, 64, 256),)), Item("b", ((1, 32, 32),))]
    plan = make_plan(items, 2, StepCosts(store, CPU, "fp32"))
    assert plan.modelled == ("1 × 32×32",)
    assert {batch.source for batches in plan.batches for batch in batches} == {"measured", "model"}


def test_a_profile_measures_each_batch_once(store: Store) -> None:
    items = [*(Item(f"a{k}", ((1, 16, 48),)) for k in range(5)), Item("experts", ((3, 32, 16),))]
    done = profile(items, store, "cpu", "fp32")
    assert (done.measured, done.left) == (7, ())
    trials = store.trials(op=STEP)
    assert {(t.m, t.n, t.batch) for t in trials} == {
        *((16, 48, batch) for batch in (1, 2, 4, 5)),
        *((32, 16, batch) for batch in (1, 2, 3)),
    }
    assert all(t.status == "ok" and t.error is not None and t.error < 1e-4 for t in trials)
    costs = StepCosts(store, CPU, "fp32")
    assert costs.cost(16, 48, 5).source == "measured"
    assert profile(items, store, "cpu", "fp32").measured == 0


def test_a_profile_keeps_to_its_budget(store: Store) -> None:
    clock = iter([0.0, *[0.5] * 3, *[2.0] * 9])
    items = [Item("a", ((4, 16, 48),)), Item("large", ((2, 48, 48),))]
    done = profile(items, store, "cpu", "fp32", budget_s=1.0, now=lambda: next(clock))
    assert done.measured == 3
    assert len(done.left) == 2
    assert len(store.trials(op=STEP)) == 3
    with pytest.raises(ValueError, match="budget_s must be a positive number of seconds, got 0"):
        profile(items, store, "cpu", "fp32", budget_s=0)


def test_a_step_that_is_wrong_is_never_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(profiling.MatrixStep):
        def run(self, updates: Any) -> Any:
            for update in updates:
                update.parameter.fill_(float("nan"))
                yield update.parameter

    monkeypatch.setattr(profiling, "MatrixStep", Wrong)
    profile([Item("a", ((1, 16, 48),))], store, "cpu", "fp32")
    (trial,) = store.trials(op=STEP)
    assert (trial.status, trial.error) == ("rejected", None)
    assert "off by nan" in trial.message
    assert StepCosts(store, CPU, "fp32").cost(16, 48, 1).source == "default"
