"""Real runs of tiny problems, with backends that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from simulated import PLAIN

from dmuon.autotune import ns_problem, tune
from dmuon.autotune.measure import Bench, device_of, operations_per_ms, wall_ms
from dmuon.kernels.backends import BACKENDS
from dmuon.kernels.choose import NSChoice, ProductChoice
from dmuon.kernels.coefficients import polar_express
from dmuon.tuning_cache import Store


class Misbehaving:
    """The torch backend, but for what ``spoil`` does to the result of an apply."""

    name = "misbehaving"
    requires = ("torch",)
    sources: tuple[str, ...] = ()

    def __init__(self, spoil: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        self._spoil = spoil

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def configs(self, op: str, m: int, n: int, dtype: str, arch: object = None) -> list[dict[str, Any]]:
        return [{}]

    def check(self, op: str, config: Mapping[str, Any]) -> None:
        pass

    def build(self, op: str, config: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
        product = BACKENDS["torch"].build(op, config)
        if op != "apply":
            return product

        def apply(Q: torch.Tensor, X: torch.Tensor, out: torch.Tensor, **rest: Any) -> torch.Tensor:
            result = product(Q, X, out, **rest)
            self._spoil(X, result)
            return result

        return apply


MISBEHAVING = NSChoice("standard", (), *[ProductChoice("misbehaving")] * 3)


def raise_error(X: torch.Tensor, result: torch.Tensor) -> None:
    raise RuntimeError("the compiler gave up")


FAULTS = {
    "last of the batch": lambda X, result: result[-1].mul_(1.01),
    "one column": lambda X, result: result[..., -1].zero_(),
    "NaN": lambda X, result: result[0, 0, 0].fill_(float("nan")),
    "zeros": lambda X, result: result.zero_(),
    "matrices swapped": lambda X, result: result.copy_(result.roll(3, 0)),
}


@pytest.mark.case(row="T4")
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_numbers_are_rejected_and_never_chosen(fault, monkeypatch, store: Store):
    monkeypatch.setitem(BACKENDS, "misbehaving", Misbehaving(FAULTS[fault]))
    problem = ns_problem(16, 48, 6)
    monkeypatch.setattr("dmuon.autotune.tuner.ns_candidates", lambda *_: [PLAIN, MISBEHAVING])
    outcome = tune([problem], store=store, budget_s=5).of(problem)
    assert outcome is not None and outcome.choice == PLAIN
    [rejected] = store.trials(status="rejected")
    assert rejected.backend == "misbehaving"
    assert rejected.tolerance is not None
    assert rejected.error is None or rejected.error > rejected.tolerance
    assert rejected.message


@pytest.mark.case(row="T3")
def test_a_backend_that_raises_is_recorded_and_the_next_one_used(monkeypatch, store: Store):
    monkeypatch.setitem(BACKENDS, "misbehaving", Misbehaving(raise_error))
    monkeypatch.setattr("dmuon.autotune.tuner.ns_candidates", lambda *_: [MISBEHAVING, PLAIN])
    problem = ns_problem(16, 48)
    outcome = tune([problem], store=store, budget_s=5).of(problem)
    assert outcome is not None and outcome.choice == PLAIN
    [failed] = store.trials(status="failed")
    assert failed.message == "RuntimeError: the compiler gave up"


def test_a_candidate_that_writes_to_its_input_fails(monkeypatch):
    bench = Bench(ns_problem(16, 48, 3), polar_express())
    G = bench._probes.batches[0]
    monkeypatch.setitem(BACKENDS, "misbehaving", Misbehaving(lambda X, result: G.mul_(2)))
    with pytest.raises(RuntimeError, match="wrote to its input"):
        bench.check(MISBEHAVING, 0)
    assert bench._probes.intact(0)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_right_candidate_passes_in_every_precision(precision):
    bench = Bench(ns_problem(24, 72, 3, precision=precision), polar_express())
    errors, taken = bench.check(PLAIN, 0)
    assert taken > 0
    assert set(errors) == {"gaussian", "decaying", "rank-deficient"}
    assert errors["gaussian"] < {"fp64": 1e-12, "fp32": 1e-5, "bf16": 0.05}[precision]


def test_inputs_rotate_beyond_the_cache():
    bench = Bench(ns_problem(64, 256, 3), polar_express())
    seen = {next(bench._rotation).data_ptr() for _ in range(200)}
    assert len(seen) == 64  # 64 × 192 KiB, the limit on copies: any cache would hold fewer than all


def test_a_part_of_the_batch_is_timed_as_such(monkeypatch):
    bench = Bench(ns_problem(8, 16, 5), polar_express())
    sizes = []
    monkeypatch.setattr("dmuon.autotune.measure.run_ns", lambda G, *_, **__: sizes.append(len(G)))
    bench.time(PLAIN, 2)
    bench.time(PLAIN)
    assert sizes == [2, 5]


def test_wall_ms():
    import time

    assert 5 <= wall_ms(lambda: time.sleep(0.005)) < 500


@pytest.mark.parametrize("device", ["cpu:another processor:64", "cuda:NVIDIA H200", "mps", "tpu:5"])
def test_a_problem_of_another_machine_is_refused(device):
    problem = replace(ns_problem(8, 16), device=device)
    if not torch.cuda.is_available() or device != "cuda:NVIDIA H200":
        with pytest.raises(ValueError, match="device"):
            device_of(problem)


def test_the_rate_is_plausible():
    assert 1e5 < operations_per_ms(ns_problem(8, 16)) < 1e11
