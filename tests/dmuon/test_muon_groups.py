"""Parameter groups, options, names, errors, schedulers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LambdaLR, OneCycleLR

import dmuon
from dmuon.autotune import TunedChooser
from dmuon.kernels.choose import current_chooser, set_chooser
from dmuon.kernels.coefficients import resolve_coefficients
from dmuon.policy import MatrixPolicy


def model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4))


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape or (4, 6)))


def by_algorithm(optimizer: dmuon.Muon, key: str) -> list[tuple[str, Any]]:
    return [(group["algorithm"], group[key]) for group in optimizer.param_groups]


def test_a_model_becomes_two_groups_with_names() -> None:
    net = model()
    muon, adamw = dmuon.Muon(net, lr=0.5, adamw_lr=0.25, weight_decay=0.125, momentum=0.75).param_groups
    assert muon["params"] == [net[1].weight] and muon["param_names"] == ["1.weight"]
    assert adamw["param_names"] == ["0.weight", "1.bias", "2.weight", "2.bias"]
    assert (muon["lr"], muon["momentum"], muon["weight_decay"]) == (0.5, 0.75, 0.125)
    assert (adamw["lr"], adamw["betas"], adamw["weight_decay"]) == (0.25, (0.9, 0.95), 0.125)
    assert "betas" not in muon and "momentum" not in adamw


@pytest.mark.case(row="P3")
def test_groups_with_their_own_options_survive() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = dmuon.Muon(
        [
            {"params": first.parameters(), "lr": 1e-3, "weight_decay": 0.1, "name": "first"},
            {"params": second.parameters(), "lr": 1e-4, "weight_decay": 0, "adamw_lr": 1e-5, "momentum": 0.5},
        ],
        adamw_lr=3e-4,
    )
    assert by_algorithm(optimizer, "lr") == [("muon", 1e-3), ("adamw", 3e-4), ("muon", 1e-4), ("adamw", 1e-5)]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0, 0]
    assert [group.get("momentum") for group in optimizer.param_groups] == [0.95, None, 0.5, None]
    assert [group.get("name") for group in optimizer.param_groups] == ["first", "first", None, None]


def test_a_group_without_a_matrix_takes_its_lr_for_adamw() -> None:
    optimizer = dmuon.Muon(
        [
            {"params": [matrix()], "lr": 0.5},
            {"params": [nn.Parameter(torch.zeros(4))], "lr": 0.25, "betas": (0.1, 0.2), "eps": 0.5},
            {"params": [matrix()], "lr": 0.125, "algorithm": "adamw"},
        ]
    )
    assert by_algorithm(optimizer, "lr") == [("muon", 0.5), ("adamw", 0.25), ("adamw", 0.125)]
    assert (optimizer.param_groups[1]["betas"], optimizer.param_groups[1]["eps"]) == ((0.1, 0.2), 0.5)


def test_adamw_weight_decay_follows_muons_unless_given() -> None:
    params = [matrix(), nn.Parameter(torch.zeros(4))]
    assert [g["weight_decay"] for g in dmuon.Muon(params, weight_decay=0.5).param_groups] == [0.5, 0.5]
    optimizer = dmuon.Muon(params, weight_decay=0.5, adamw_weight_decay=0.0)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.0]


def test_tensors_pairs_and_groups_route_by_name_and_shape() -> None:
    named = [("embed.weight", matrix(9, 4)), ("blocks.0.up.weight", matrix()), ("norm.weight", matrix(4))]
    for params in (named, [{"params": named}], iter(named)):
        muon, adamw = dmuon.Muon(params).param_groups
        assert (muon["param_names"], adamw["param_names"]) == (
            ["blocks.0.up.weight"],
            ["embed.weight", "norm.weight"],
        )
    unnamed = dmuon.Muon(tensor for _, tensor in named)
    assert [len(group["params"]) for group in unnamed.param_groups] == [2, 1]
    assert "param_names" not in unnamed.param_groups[0]
    excluding = dmuon.Muon(named, policy=MatrixPolicy(exclude=["*.up.*"]))
    assert [group["algorithm"] for group in excluding.param_groups] == ["adamw"]


def test_the_groups_of_one_optimizer_make_another() -> None:
    first = dmuon.Muon(model(), lr=0.5, adamw_lr=0.25, adamw_betas=(0.5, 0.6), coefficients="you")
    second = dmuon.Muon(first.param_groups)
    strip = [{k: v for k, v in group.items() if k != "params"} for group in first.param_groups]
    assert [{k: v for k, v in group.items() if k != "params"} for group in second.param_groups] == strip


def test_add_param_group_splits_and_is_all_or_nothing() -> None:
    net, late = model(), nn.Linear(4, 4)
    optimizer = dmuon.Muon(net)
    optimizer.add_param_group({"params": late.named_parameters(), "lr": 0.5})
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"] * 2
    assert optimizer.param_groups[2]["lr"] == 0.5
    for p in (*net.parameters(), *late.parameters()):
        p.grad = torch.ones_like(p)
    before = late.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(late.weight, before)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("new", matrix()), ("2.bias", net[2].bias)]})
    assert len(optimizer.param_groups) == 4


def test_frozen_parameters_stay_out_and_join_by_their_layer_once_thawed() -> None:
    net = nn.Sequential(*model(), nn.Linear(4, 4, bias=False))
    frozen = {"0.weight": net[0].weight, "3.weight": net[3].weight}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    optimizer = dmuon.Muon(net)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
    for parameter in frozen.values():
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": frozen.items()})
    muon, adamw = optimizer.param_groups[2:]
    assert (muon["algorithm"], muon["param_names"]) == ("muon", ["3.weight"])
    assert (adamw["algorithm"], adamw["param_names"]) == ("adamw", ["0.weight"])


def test_a_frozen_parameter_given_by_the_caller_is_kept() -> None:
    frozen = matrix().requires_grad_(False)
    assert dmuon.Muon([frozen]).param_groups[0]["params"] == [frozen]


def test_coefficients_are_kept_as_plain_data() -> None:
    steps = [[2.0, -1.5, 0.5]]
    for given, kept in [
        ("you", "you"),
        (resolve_coefficients("you"), "you"),
        (steps, ((2.0, -1.5, 0.5),)),
        (resolve_coefficients(steps), ((2.0, -1.5, 0.5),)),
    ]:
        assert dmuon.Muon([matrix()], coefficients=given).param_groups[0]["coefficients"] == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr must be at least 0 and finite, got -0.1"),
        ({"lr": math.nan}, "lr must be at least 0 and finite"),
        ({"lr": torch.tensor(-1.0)}, "lr must be at least 0"),
        ({"lr": torch.ones(1)}, "lr must be a number or a 0-D tensor"),
        ({"adamw_lr": math.inf}, "adamw_lr must be at least 0 and finite"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0"),
        ({"adamw_weight_decay": -1.0}, "adamw_weight_decay must be at least 0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"adamw_betas": (0.9, 1.0)}, r"adamw_betas must be in \[0, 1\)"),
        ({"adamw_betas": (0.9,)}, "adamw_betas must be two numbers"),
        ({"adamw_betas": 0.9}, "adamw_betas must be two numbers, got 0.9"),
        ({"adamw_eps": -1e-8}, "adamw_eps must be at least 0"),
        ({"adjust_lr": "spectral_norm"}, "adjust_lr must be one of original"),
        ({"coefficients": "newton"}, "coefficients must be one of"),
        ({"coefficients": [(1.0, 2.0)]}, "coefficients must be"),
        ({"precision": "fp8"}, "precision must be 'auto' or one of"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dmuon.Muon([matrix()], **options)
    if not any(key.startswith("adamw_") for key in options):
        optimizer = dmuon.Muon([matrix()])
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [matrix()], **options})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("options", [{"lr": "0.1"}, {"momentum": None}, {"weight_decay": torch.tensor(0.1)}])
def test_options_of_the_wrong_kind_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(options))} must be a number"):
        dmuon.Muon([matrix()], **options)


def test_bad_parameters_are_named() -> None:
    vector = nn.Parameter(torch.zeros(4))
    twice = matrix()
    for params, error, message in [
        ([], ValueError, "empty parameter list"),
        ([{"params": []}], ValueError, "empty parameter list"),
        ([{"lr": 0.1}], ValueError, r"needs 'params', got \['lr'\]"),
        ([{"params": 3}], TypeError, r"params must be tensors or \(name, tensor\) pairs, got int"),
        (None, TypeError, "takes a module or an iterable of parameters.* got NoneType"),
        ("weight", TypeError, "takes a module .* got str"),
        (nn.Linear(2, 2).state_dict(), TypeError, "takes a module .* got OrderedDict"),
        ({matrix()}, TypeError, "ordered collection"),
        ([1.0], TypeError, "must hold tensors"),
        ([("a", matrix()), matrix()], ValueError, "all be named or all"),
        ([("w", matrix() * 2)], ValueError, "'w' is not a leaf"),
        ([("w", torch.zeros(4, 6, dtype=torch.complex64))], ValueError, "'w' is complex"),
        ([("w", torch.empty(4, 6, device="meta"))], ValueError, "'w' is on the meta device"),
        ([("w", twice), ("w2", twice)], ValueError, "'w2' is given twice"),
        ([{"params": [("b", vector)], "algorithm": "muon"}], ValueError, "'b' is none: "),
        (
            [{"params": [vector], "algorithm": "sgd"}],
            ValueError,
            "algorithm must be one of muon, adamw, got 'sgd'",
        ),
    ]:
        if isinstance(params, set):
            params = [{"params": params}]
        with pytest.raises(error, match=message):
            dmuon.Muon(params)


def test_a_model_without_matrices_says_what_it_has() -> None:
    with pytest.raises(ValueError, match="it has 1 x embedding, 1 x normalisation"):
        dmuon.Muon(nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)))
    with pytest.raises(ValueError, match="no parameter to train: they are all frozen"):
        dmuon.Muon(nn.Linear(4, 4).requires_grad_(False))
    with pytest.raises(ValueError, match="no parameter to train: it has none at all"):
        dmuon.Muon(nn.ReLU())
    with pytest.raises(ValueError, match="meta"):
        dmuon.Muon(nn.Linear(4, 4, device="meta"))


def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    net = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4))
    optimizer = dmuon.Muon(net)
    net(torch.tensor([1, 2])).sum().backward()
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(RuntimeError, match=r"shape \(7, 4\) is sparse"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    assert not optimizer.state


def test_schedulers_scale_both_halves() -> None:
    for kind, options in (
        (LambdaLR, {"lr_lambda": lambda step: 1 / (step + 1)}),
        (CosineAnnealingLR, {"T_max": 2}),
    ):
        optimizer = dmuon.Muon(model(), lr=0.5, adamw_lr=0.25)
        schedule = kind(optimizer, **options)
        optimizer.step()
        schedule.step()
        assert [lr for _, lr in by_algorithm(optimizer, "lr")] == pytest.approx([0.25, 0.125])


@pytest.mark.parametrize("kind", ["one cycle", "cyclic"])
def test_cycled_momentum_is_muons(kind: str) -> None:
    net = model()
    optimizer = dmuon.Muon(net)
    lrs = [group["lr"] for group in optimizer.param_groups]
    schedule: Any
    if kind == "one cycle":
        schedule = OneCycleLR(optimizer, max_lr=lrs, total_steps=10, max_momentum=0.9, base_momentum=0.5)
    else:
        schedule = CyclicLR(optimizer, base_lr=lrs, max_lr=lrs, max_momentum=0.9, base_momentum=0.5)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    net[1].weight.grad = torch.ones(4, 4)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[net[1].weight]["momentum_buffer"], torch.full((4, 4), 0.1))
    schedule.step()
    assert 0.5 <= optimizer.param_groups[0]["momentum"] < 0.9
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)


@pytest.mark.case(row="T6")
def test_a_scheduler_fills_a_tensor_learning_rate() -> None:
    lr = torch.tensor(0.5)
    optimizer = dmuon.Muon([matrix()], lr=lr)
    schedule = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is lr and lr.item() == 0.25


def test_zero_grad_and_hooks() -> None:
    net = model()
    optimizer = dmuon.Muon(net)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    net(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert seen == ["before", "after"]
    assert all(p.grad is None for p in net.parameters())


def test_a_parameter_that_was_swapped_under_the_optimizer_is_named() -> None:
    """As accelerate does with what it shards."""
    net = model()
    optimizer = dmuon.Muon(net)
    (muon,) = (group for group in optimizer.param_groups if group["algorithm"] == "muon")
    net[1].weight = nn.Parameter(net[1].weight.detach().clone())
    muon["params"][0] = net[1].weight
    net(torch.tensor([1, 2])).sum().backward()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(RuntimeError, match=r"'1\.weight' of a Muon group is now another Parameter"):
        optimizer.step()
    assert all(map(torch.equal, before, net.parameters()))


def test_autotune_installs_a_chooser_and_none_leaves_it_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path))
    previous = set_chooser(None)
    try:
        dmuon.Muon([matrix()])
        assert current_chooser() is None
        dmuon.Muon([matrix()], autotune="cache")
        installed = current_chooser()
        assert isinstance(installed, TunedChooser) and installed.mode == "cache"
        with pytest.raises(ValueError, match=r"mode must be one of .* got .sometimes."):
            dmuon.Muon([matrix()], autotune="sometimes")
        assert current_chooser() is installed
    finally:
        set_chooser(previous)
