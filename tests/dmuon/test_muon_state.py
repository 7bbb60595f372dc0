"""Saving, loading, copying and pickling the optimizer."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import dmuon


def build(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(5, 6, generator=generator).to(dtype)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)  # weights_only, torch's default: a state dict is plain data


def own_rule(rows: int, cols: int) -> float:
    return rows / cols


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"adjust_lr": own_rule, "coefficients": [(2.0, -1.5, 0.5)] * 3}])
def test_resuming_equals_going_on(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = build(dtype)
    optimizer = dmuon.Muon(model, lr=0.05, **options)
    train(model, optimizer, range(3))
    weights, state = through_a_file(model.state_dict()), through_a_file(optimizer.state_dict())
    train(model, optimizer, range(3, 6))

    resumed = build(dtype, seed=1)
    resumed.load_state_dict(weights)
    restored = dmuon.Muon(resumed, lr=0.9, **options)
    restored.load_state_dict(state)
    for saved, loaded in zip(state["state"].values(), restored.state_dict()["state"].values(), strict=True):
        for key, value in saved.items():
            assert torch.equal(loaded[key], value) and loaded[key].dtype == value.dtype
    train(resumed, restored, range(3, 6))
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_momentum_keeps_the_dtype_of_its_parameter() -> None:
    model = build(torch.bfloat16)
    optimizer = dmuon.Muon(model)
    train(model, optimizer, range(1))
    state = through_a_file(optimizer.state_dict())
    assert state["state"][0]["momentum_buffer"].dtype == torch.bfloat16


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_trains_alike(copier: Callable[[Any], Any]) -> None:
    model = build()
    optimizer = dmuon.Muon(model, lr=0.05, adjust_lr=own_rule)
    train(model, optimizer, range(2))
    other_model, other = copier((model, optimizer))
    train(model, optimizer, range(2, 4))
    train(other_model, other, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))
    other.add_param_group({"params": [("late", nn.Parameter(torch.ones(3, 3)))]})
    assert other.param_groups[-1]["adjust_lr"] == "custom"


def test_frozen_groups_are_restored_too() -> None:
    def groups(frozen: bool) -> dmuon.Muon:
        parameters = [nn.Parameter(torch.ones(3, 4)) for _ in range(3)]
        parameters[1].requires_grad_(not frozen)
        for p in parameters:
            p.grad = torch.ones_like(p) if p.requires_grad else None
        return dmuon.Muon([{"params": [p], "lr": 0.1 * (k + 1)} for k, p in enumerate(parameters)])

    saved = groups(frozen=True)
    saved.step()
    state = saved.state_dict()
    loaded = groups(frozen=True)
    loaded.load_state_dict(state)
    assert [group["lr"] for group in loaded.param_groups] == pytest.approx([0.1, 0.2, 0.3])
    assert state["state"].keys() == loaded.state_dict()["state"].keys() == {0, 2}


def refused(optimizer: dmuon.Muon, state: dict[str, Any], message: str) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    train(model, optimizer, range(1))
    return optimizer.state_dict()


def test_states_of_other_optimizers_are_refused() -> None:
    optimizer = dmuon.Muon(build())
    model = build()
    refused(optimizer, stepped(model, torch.optim.AdamW(model.parameters())), "groups name no algorithm")
    matrices = [p for p in model.parameters() if p.ndim == 2]
    refused(optimizer, stepped(model, torch.optim.Muon(matrices)), "groups name no algorithm")


def test_what_is_no_state_dict_is_refused() -> None:
    model = build()
    optimizer = dmuon.Muon(model)
    refused(optimizer, {}, "lacks 'state' and 'param_groups', it has nothing")
    whole = stepped(model, dmuon.Muon(model))
    refused(optimizer, {"model": {}, "optimizer": whole}, r"it has \['model', 'optimizer'\]")
    refused(optimizer, {"state": whole["state"]}, "lacks 'param_groups'")
    del whole["param_groups"][0]["momentum"]
    refused(optimizer, whole, "a muon group of the state dict lacks momentum")
    with pytest.raises(TypeError, match="must be a dict, got NoneType"):
        optimizer.load_state_dict(None)  # type: ignore[arg-type]


def test_missing_and_extra_names_are_listed() -> None:
    optimizer = dmuon.Muon(build())
    larger = nn.Sequential(*build(), nn.Linear(8, 6))
    refused(optimizer, stepped(larger, dmuon.Muon(larger)), r"has \['4.bias', '4.weight'\] too many")
    larger_optimizer, smaller = dmuon.Muon(larger), build()
    refused(larger_optimizer, stepped(smaller, dmuon.Muon(smaller)), r"lacks \['4.bias', '4.weight'\]")


def test_another_order_or_structure_is_refused() -> None:
    model = build()
    named = list(model.named_parameters())
    reversed_state = stepped(model, dmuon.Muon(reversed(named)))
    refused(dmuon.Muon(named), reversed_state, "the order must agree")
    as_adamw = stepped(model, dmuon.Muon([{"params": named, "algorithm": "adamw"}]))
    refused(dmuon.Muon(named), as_adamw, "groups are")
    unnamed = stepped(model, dmuon.Muon(model.parameters()))
    refused(
        dmuon.Muon([*model.parameters(), nn.Parameter(torch.zeros(2))]), unnamed, "doesn't match the size"
    )
    unnamed["state"][0]["momentum_buffer"] = torch.zeros(3, 3)
    refused(dmuon.Muon(model.parameters()), unnamed, r"momentum_buffer of parameter 0 has shape \(3, 3\)")
    unnamed["state"][0] = {"momentum": torch.zeros(8, 6)}
    refused(dmuon.Muon(model.parameters()), unnamed, r"state of parameter 0 is \['momentum'\]")


def test_a_custom_rule_has_to_be_there_on_loading() -> None:
    model = build()
    state = stepped(model, dmuon.Muon(model, adjust_lr=own_rule))
    refused(dmuon.Muon(model), state, "'custom'")


def test_names_of_wrappers_and_of_hooks_are_accepted() -> None:
    model = build()
    state = stepped(model, dmuon.Muon((f"module.{name}", p) for name, p in model.named_parameters()))
    dmuon.Muon(model).load_state_dict(state)

    renamed = stepped(model, dmuon.Muon((f"old.{name}", p) for name, p in model.named_parameters()))
    optimizer = dmuon.Muon(model)
    refused(optimizer, renamed, "lacks")

    def rename(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = [
            {**group, "param_names": [name.removeprefix("old.") for name in group["param_names"]]}
            for group in state["param_groups"]
        ]
        return {**state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.load_state_dict(renamed)
    assert len(optimizer.state) == 6


@pytest.mark.parametrize("flatten", [False, True])
def test_the_distributed_state_dict_functions_work(flatten: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = build()
    optimizer = dmuon.Muon(model, lr=0.05)
    train(model, optimizer, range(2))
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    assert any("0.weight" in str(key) for key in (state if flatten else state["state"]))
    train(model, optimizer, range(2, 4))

    resumed = build(seed=1)
    resumed.load_state_dict(weights)
    restored = dmuon.Muon(resumed, lr=0.05)
    set_optimizer_state_dict(resumed, restored, state, options=options)
    train(resumed, restored, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
