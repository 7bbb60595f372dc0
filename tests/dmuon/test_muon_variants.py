"""NorMuon's second moment and cautious decay, against numpy, for every way in which a matrix is stored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from muon_helpers import FP64, forced, gradient_like, parameter, relative
from muon_reference import Array, orthogonalized
from torch import nn

import dmuon
import dmuon.batching
from dmuon.lr_adjust import RULES
from dmuon.policy import MatrixPolicy

LR, DECAY, BETA2 = 0.3, 0.2, 0.9
VARIANTS: list[dict[str, Any]] = [
    {"normuon_beta2": BETA2},
    {"cautious_decay": True},
    {"normuon_beta2": BETA2, "cautious_decay": True},
]


def expected_step(
    W: Array,
    G: Array,
    B: Array,
    v: Array,
    *,
    factor: float,
    normuon_beta2: float | None = None,
    cautious_decay: bool = False,
    maximize: bool = False,
) -> tuple[Array, Array, Array]:
    """The new weight, momentum and second moment of one matrix, whose rows are its outputs."""
    B = 0.95 * B + 0.05 * G
    O = orthogonalized(0.95 * B + 0.05 * G)  # noqa: E741
    if normuon_beta2 is not None:
        v = normuon_beta2 * v + (1 - normuon_beta2) * np.mean(O**2, axis=1)
        normalized = O / np.sqrt(v)[:, None]
        O = normalized * np.linalg.norm(O) / np.linalg.norm(normalized)  # noqa: E741
    u = (-factor if maximize else factor) * O
    decay = DECAY * np.where(u * W >= 0, W, 0.0) if cautious_decay else DECAY * W
    return W - LR * (u + decay), B, v


class Conv1D(nn.Module):
    """As transformers has it: (in, out), y = xW."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.weight = nf, nn.Parameter(torch.randn(nx, nf))


class Experts(nn.Module):
    """Three: (out, in) each, or (in, out) as some of transformers' have it."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed, self.weight = is_transposed, nn.Parameter(torch.randn(3, 6, 10))


def conv(kind: type[nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(8, 12, 3, bias=False, **options)


@dataclass
class Layer:
    """A layer, the matrices in its weight as numpy's views, and the shape of their second moments."""

    build: Callable[[], nn.Module]
    matrices: Callable[[Array], list[Array]]
    second: tuple[int, ...]
    policy: dict[str, Any] = field(default_factory=dict)


LAYERS = {
    "wide": Layer(lambda: nn.Linear(9, 6, bias=False), lambda w: [w], (6, 1)),
    "tall": Layer(lambda: nn.Linear(6, 9, bias=False), lambda w: [w], (9, 1)),
    "transposed": Layer(lambda: Conv1D(7, 5), lambda w: [w.T], (1, 7)),
    "experts": Layer(lambda: Experts(False), list, (3, 6, 1)),
    "transposed experts": Layer(lambda: Experts(True), lambda w: [each.T for each in w], (3, 1, 10)),
    "convolution": Layer(conv(nn.Conv2d), lambda w: [w.reshape(12, -1)], (12, 1, 1, 1)),
    "groups": Layer(conv(nn.Conv2d, groups=2), lambda w: list(w.reshape(2, 6, -1)), (12, 1, 1, 1)),
    "transposed convolution": Layer(conv(nn.ConvTranspose2d), lambda w: [w.reshape(8, -1).T], (1, 12, 3, 3)),
    "transposed groups": Layer(
        conv(nn.ConvTranspose2d, groups=2), lambda w: [each.T for each in w.reshape(2, 4, -1)], (2, 6, 3, 3)
    ),
    "split": Layer(
        lambda: nn.Linear(6, 10, bias=False),
        lambda w: [w[:4], w[4:6], w[6:]],
        (10, 1),
        {"splits": {"*weight": (4, 2, 4)}},
    ),
    "split, transposed": Layer(
        lambda: Conv1D(10, 6), lambda w: [w.T[:7], w.T[7:]], (1, 10), {"splits": {"*weight": (7, 3)}}
    ),
    "split experts": Layer(
        lambda: Experts(False),
        lambda w: [part for each in w for part in (each[:2], each[2:])],
        (3, 6, 1),
        {"splits": {"*weight": (2, 4)}},
    ),
}


@pytest.mark.case(row="P4")
@pytest.mark.case(row="P5")
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("variant", VARIANTS, ids=["normuon", "cautious", "both"])
def test_steps_equal_the_formula(
    layer: Layer, variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dmuon.batching, "BATCH_ELEMENTS", 130)  # two experts at most share a batch
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": layer.build().double()})
    p = model["layer"].weight
    how = {**FP64, **variant, "lr": LR, "weight_decay": DECAY, "adjust_lr": "spectral"}
    optimizer = dmuon.Muon(model, policy=MatrixPolicy(include=["*"], **layer.policy), **how)
    W, B = p.detach().numpy().copy(), np.zeros(p.shape)
    moments = [np.zeros(len(each)) for each in layer.matrices(W)]
    for step in range(3):
        p.grad = gradient_like(p, seed=step)
        G = p.grad.numpy().copy()
        views = [layer.matrices(each) for each in (W, G, B)]
        for k, (w, g, b) in enumerate(zip(*views, strict=True)):
            factor = RULES["spectral"](*w.shape)
            w[...], b[...], moments[k] = expected_step(w, g, b, moments[k], factor=factor, **variant)
        optimizer.step()
        assert relative(p, W) < 1e-12
    state = optimizer.state[p]
    assert relative(state["momentum_buffer"], B) < 1e-12
    if "normuon_beta2" in variant:
        assert state["second_momentum_buffer"].shape == layer.second
        assert relative(state["second_momentum_buffer"].flatten(), np.concatenate(moments)) < 1e-12
    else:
        assert state.keys() == {"momentum_buffer"}


@pytest.mark.parametrize("variant", VARIANTS, ids=["normuon", "cautious", "both"])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("rule", [*RULES, lambda rows, cols: rows / 50])
@pytest.mark.parametrize("rate", [LR, torch.tensor(LR, dtype=torch.float64)])
def test_composes_with_every_rule_direction_and_rate(
    variant: dict[str, Any], maximize: bool, rule: Any, rate: Any
) -> None:
    p = parameter(7, 5)
    how = {**variant, "lr": rate, "weight_decay": DECAY, "adjust_lr": rule, "maximize": maximize}
    optimizer = forced(p, **how)
    W, B, v = p.detach().numpy().copy(), np.zeros((7, 5)), np.zeros(7)
    factor = (rule if callable(rule) else RULES[rule])(7, 5)
    for step in range(2):
        p.grad = gradient_like(p, seed=step)
        W, B, v = expected_step(W, p.grad.numpy(), B, v, factor=factor, maximize=maximize, **variant)
        optimizer.step()
    assert relative(p, W) < 1e-12


@pytest.mark.case(row="P3")
def test_groups_of_one_shape_keep_their_own_options() -> None:
    options: list[dict[str, Any]] = [{}, *VARIANTS, {"normuon_beta2": 0.5}]
    together = [parameter(6, 8, seed=k) for k in range(5)]
    apart = [copy.deepcopy(p) for p in together]
    groups = [{"params": [p], "algorithm": "muon", **how} for p, how in zip(together, options, strict=True)]
    optimizers = [dmuon.Muon(groups, lr=LR, **FP64)]
    optimizers += [forced(p, lr=LR, **how) for p, how in zip(apart, options, strict=True)]
    for step in range(2):
        for p, q in zip(together, apart, strict=True):
            p.grad, q.grad = gradient_like(p, seed=step), gradient_like(q, seed=step)
        for optimizer in optimizers:
            optimizer.step()
    assert all(relative(p, q.detach()) < 1e-14 for p, q in zip(together, apart, strict=True))


def test_rows_and_matrices_of_zeros_do_not_move() -> None:
    row, whole = parameter(4, 6), parameter(4, 6)
    row.grad, whole.grad = gradient_like(row), torch.zeros_like(whole)
    row.grad[1] = 0
    before = [p.detach().clone() for p in (row, whole)]
    optimizer = forced(row, whole, weight_decay=0.0, normuon_beta2=0.9)
    for _ in range(2):
        optimizer.step()
    assert torch.equal(row[1], before[0][1]) and torch.equal(whole, before[1])
    assert row.isfinite().all() and not torch.equal(row, before[0])


def test_an_update_of_zero_decays() -> None:
    still, unmoved = parameter(4, 6), parameter(4, 6)
    expected = still.detach() * (1 - LR * DECAY)
    still.grad, unmoved.grad = torch.zeros_like(still), gradient_like(unmoved)
    forced(still, lr=LR, weight_decay=DECAY, cautious_decay=True).step()
    forced(unmoved, lr=LR, weight_decay=DECAY, cautious_decay=True, adjust_lr=lambda rows, cols: 0.0).step()
    assert torch.equal(still, expected) and torch.equal(unmoved, expected)


@pytest.mark.case(row="N2")
def test_what_is_not_finite_stays_in_its_matrix() -> None:
    stack = parameter(3, 4, 6)
    stack.grad = gradient_like(stack)
    stack.grad[1, 2, 3] = torch.nan
    optimizer = forced(stack, normuon_beta2=0.9, cautious_decay=True)
    optimizer.step()
    assert stack[[0, 2]].isfinite().all() and stack[1].isnan().all() and optimizer.nonfinite() == 1
    assert optimizer.state[stack]["second_momentum_buffer"][[0, 2]].isfinite().all()


def trained(model: nn.Module, optimizer: dmuon.Muon, steps: range) -> None:
    for step in steps:
        for p in model.parameters():
            p.grad = gradient_like(p, seed=step)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_resuming_equals_going_on(dtype: torch.dtype) -> None:
    def built(seed: int) -> tuple[nn.Module, dmuon.Muon]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), Conv1D(6, 8)).to(dtype)
        return model, dmuon.Muon(model, lr=LR, normuon_beta2=0.9, cautious_decay=True)

    model, optimizer = built(0)
    trained(model, optimizer, range(3))
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    copies = copy.deepcopy((model, optimizer))
    trained(model, optimizer, range(3, 6))
    trained(*copies, range(3, 6))
    resumed, restored = built(1)
    resumed.load_state_dict(weights)
    restored.load_state_dict(state)
    trained(resumed, restored, range(3, 6))
    wide = torch.promote_types(dtype, torch.float32)
    for p, q, r in zip(model.parameters(), resumed.parameters(), copies[0].parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(p, r)
        if p.ndim == 2:
            assert restored.state[q]["second_momentum_buffer"].dtype == wide


def test_memory_formats_share_states() -> None:
    """The rows of a transposed convolution lie in another order in another memory format."""
    models = [nn.Sequential(conv(nn.ConvTranspose2d)()).double() for _ in range(3)]
    for other in models[1:]:
        other.load_state_dict(models[0].state_dict())
    models[1].to(memory_format=torch.channels_last)
    optimizers = [dmuon.Muon(m, normuon_beta2=0.9, **FP64) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        trained(model, optimizer, range(2))
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    seconds = [state["state"][0]["second_momentum_buffer"] for state in states]
    assert relative(seconds[1], seconds[0]) < 1e-13
    optimizers[0].load_state_dict(states[1])
    optimizers[1].load_state_dict(states[0])
    models[2].to(memory_format=torch.channels_last)
    for model, optimizer in zip(models, optimizers, strict=True):
        trained(model, optimizer, range(2, 4))
    for model in models[1:]:
        assert relative(model[0].weight, models[0][0].weight.detach()) < 1e-13


def test_a_state_without_the_second_moment_says_so() -> None:
    plain, normuon = (forced(parameter(4, 6), **how) for how in ({}, {"normuon_beta2": 0.9}))
    for optimizer in (plain, normuon):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(4, 6, dtype=torch.float64)
        optimizer.step()
    without, having = copy.deepcopy((plain.state_dict(), normuon.state_dict()))
    with pytest.raises(ValueError, match=r"the optimizer has NorMuon.* the state dict has not.*beta2=None"):
        normuon.load_state_dict(without)
    with pytest.raises(ValueError, match=r"the state dict has NorMuon.* the optimizer has not.*beta2=0\.9"):
        plain.load_state_dict(having)
    lacking = copy.deepcopy(having)
    del lacking["state"][0]["second_momentum_buffer"]
    with pytest.raises(ValueError, match=r"parameter 0 is \['momentum_buffer'\], not \['mom.*', 'second_m"):
        normuon.load_state_dict(lacking)
    having["state"][0]["second_momentum_buffer"] = torch.zeros(1, 6)
    with pytest.raises(
        ValueError, match=r"second_momentum_buffer of parameter 0 has shape \(1, 6\), not \(4, 1\)"
    ):
        normuon.load_state_dict(having)


def test_the_second_moment_is_switched_on_and_off() -> None:
    p = parameter(4, 6)
    optimizer = forced(p)
    p.grad = gradient_like(p)
    optimizer.step()
    optimizer.param_groups[0]["normuon_beta2"] = 0.9
    assert not optimizer.state_dict()["state"][0]["second_momentum_buffer"].any()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert optimizer.state[p]["second_momentum_buffer"].all()
    optimizer.param_groups[0]["normuon_beta2"] = None
    optimizer.step()
    assert optimizer.state[p].keys() == {"momentum_buffer"}


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"normuon_beta2": 1.0}, ValueError, r"normuon_beta2 must be in \[0, 1\), got 1"),
        ({"normuon_beta2": "0.9"}, TypeError, "normuon_beta2 must be a number"),
        ({"cautious_decay": 0.1}, TypeError, "cautious_decay must be True or False, got 0.1"),
        ({"stochastic_rounding": None}, TypeError, "stochastic_rounding must be True or False, got None"),
    ],
)
def test_options_are_checked(option: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dmuon.Muon([parameter(4, 6)], **option)
    with pytest.raises(error, match=message):
        dmuon.Muon([{"params": [parameter(4, 6)], **option}])
