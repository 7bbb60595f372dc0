"""Options that are misspelt, set by hand, loaded, or of numpy; and what is registered by mistake."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from muon_helpers import gradient_like, parameter
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import dmuon


def two_groups(**options: Any) -> tuple[dmuon.Muon, list[nn.Parameter]]:
    """A Muon group for each of two matrices, with gradients."""
    params = [parameter(4, 6, seed=seed, dtype=torch.float32) for seed in range(2)]
    for p in params:
        p.grad = gradient_like(p)
    return dmuon.Muon([{"params": [p]} for p in params], **options), params


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("Lr", "lr"),
        ("normuon", "normuon_beta2"),
        ("normuon_beta", "normuon_beta2"),
        ("weightdecay", "weight_decay"),
        ("cautious", "cautious_decay"),
        ("momentun", "momentum"),
        ("algoritm", "algorithm"),
        ("param_name", "param_names"),
    ],
)
def test_a_misspelt_option_is_named(key: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"no option '{key}': did you mean '{meant}'"):
        dmuon.Muon([{"params": [parameter(4, 6)], key: 0.5}])
    optimizer = dmuon.Muon([parameter(4, 6)])
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        optimizer.add_param_group({"params": [parameter(4, 6)], key: 0.5})
    assert len(optimizer.param_groups) == 1


def test_keys_of_schedulers_and_of_the_caller_are_kept() -> None:
    keys = ["initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "base_momentum", "max_momentum", "name"]
    keys += ["initial_weight_decay", "decoupled_weight_decay", "lr_scale", "wd_mult", "foreach", "amsgrad"]
    group = dmuon.Muon([{"params": [parameter(4, 6)], **dict.fromkeys(keys, 0.5)}]).param_groups[0]
    assert all(group[key] == 0.5 for key in keys)
    optimizer, _ = two_groups()
    OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    again = dmuon.Muon(optimizer.param_groups)
    assert again.param_groups[0]["max_lr"] == 0.1


BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("lr", -1.0, ValueError, "lr must be at least 0 and finite, got -1.0"),
    ("lr", [0.1], TypeError, r"lr must be a number, got \[0.1\]"),
    ("lr", torch.tensor(-1.0), ValueError, "lr must be at least 0"),
    ("momentum", 1.5, ValueError, r"momentum must be in \[0, 1\), got 1.5"),
    (
        "normuon_beta2",
        True,
        TypeError,
        r"normuon_beta2 must be a number in \[0, 1\), or None for Muon, got True",
    ),
    ("cautious_decay", "yes", TypeError, "cautious_decay must be True or False, got 'yes'"),
    ("precision", "fp8", ValueError, "precision must be 'auto' or one of"),
    ("adjust_lr", "moonlight", ValueError, "adjust_lr must be one of original"),
    ("coefficients", "newton", ValueError, "coefficients must be one of"),
]


@pytest.mark.parametrize(("key", "value", "error", "message"), BAD)
def test_a_bad_value_set_by_hand_is_found_before_anything_changes(
    key: str, value: Any, error: type[Exception], message: str
) -> None:
    optimizer, params = two_groups(lr=0.1)
    optimizer.step()
    before = [p.detach().clone() for p in params], copy.deepcopy(list(optimizer.state.values()))
    good = optimizer.param_groups[1][key]
    optimizer.param_groups[1][key] = value
    for _ in range(2):
        with pytest.raises(error, match=message):
            optimizer.step()
    assert all(map(torch.equal, before[0], params))
    torch.testing.assert_close(list(optimizer.state.values()), before[1], rtol=0, atol=0)
    optimizer.param_groups[1][key] = good
    optimizer.step()
    assert not any(map(torch.equal, before[0], params))


def test_an_option_that_is_gone_is_named() -> None:
    optimizer, _ = two_groups()
    del optimizer.param_groups[1]["nesterov"]
    with pytest.raises(ValueError, match="group 1 of the optimizer lacks nesterov"):
        optimizer.step()
    assert not optimizer.state


def test_what_is_set_by_hand_in_another_form_is_used() -> None:
    optimizer, params = two_groups()
    other, others = two_groups(coefficients=[(2.0, -1.5, 0.5)], lr=0.25)
    for group in optimizer.param_groups:
        group.update(coefficients=[[2.0, -1.5, 0.5]], lr=np.float64(0.25))
    optimizer.step()
    other.step()
    assert all(map(torch.equal, params, others))


@pytest.mark.parametrize(("key", "value", "error", "message"), BAD)
def test_a_bad_value_in_a_state_dict_is_refused(
    key: str, value: Any, error: type[Exception], message: str
) -> None:
    optimizer, _ = two_groups(normuon_beta2=0.5)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["param_groups"][1][key] = value
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(saved)
    assert [dict(group) for group in optimizer.param_groups] == before


def test_state_dicts_from_before_the_variants_load() -> None:
    optimizer, _ = two_groups()
    optimizer.step()
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        for key in ("normuon_beta2", "cautious_decay", "stochastic_rounding"):
            del group[key]
    resumed, _ = two_groups(cautious_decay=True, stochastic_rounding=True)
    resumed.load_state_dict(saved)
    for group in resumed.param_groups:
        assert (group["normuon_beta2"], group["cautious_decay"], group["stochastic_rounding"]) == (
            None,
            False,
            False,
        )
    assert "cautious_decay" not in saved["param_groups"][0]
    with pytest.raises(ValueError, match="normuon_beta2=None"):
        two_groups(normuon_beta2=0.5)[0].load_state_dict(saved)


def test_numbers_of_numpy_become_plain_ones() -> None:
    optimizer, _ = two_groups(
        lr=np.float32(0.5), normuon_beta2=np.float64(0.5), adamw_betas=(np.float32(0.5), np.float64(0.25))
    )
    group = optimizer.param_groups[0]
    assert (group["lr"], group["normuon_beta2"]) == (0.5, 0.5)
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer, weights_only=True))


@pytest.mark.parametrize("value", [False, True])
def test_a_bool_is_no_coefficient_of_normuon(value: bool) -> None:
    with pytest.raises(TypeError, match=f"normuon_beta2 must be a number .* or None for Muon, got {value}"):
        dmuon.Muon([parameter(4, 6)], normuon_beta2=value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seed_is_drawn_only_where_something_is_rounded(dtype: torch.dtype) -> None:
    weight = parameter(4, 6, dtype=dtype)
    weight.grad = gradient_like(weight)
    optimizer = dmuon.Muon([weight], precision="fp32", stochastic_rounding=True)
    before = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(before, torch.get_rng_state()) == (dtype != torch.bfloat16)


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda optimizer: optimizer.register_update_hook(3), "hook must be callable, got 3"),
        (
            lambda optimizer: optimizer.register_update_hook(print, orthogonality=1),
            "orthogonality must be True or False, got 1",
        ),
    ],
)
def test_what_is_no_hook_is_refused(register: Callable[[dmuon.Muon], Any], message: str) -> None:
    optimizer, _ = two_groups()
    with pytest.raises(TypeError, match=message):
        register(optimizer)
    optimizer.step()
