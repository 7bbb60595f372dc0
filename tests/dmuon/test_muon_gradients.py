"""What gradients may be: of any size and layout, zero, not finite, skipped, accumulated, absent."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from muon_helpers import FP64, forced, gradient_like, parameter, relative
from muon_reference import muon_step, orthogonalized
from torch import nn

import dmuon
import dmuon.muon


@pytest.mark.case(row="N1")
@pytest.mark.case("N1")
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-9, 1e4, 1e15, 1e18])
def test_the_scale_of_the_gradient_does_not_matter(scale: float) -> None:
    updates = []
    for factor in (1.0, scale):
        p = parameter(24, 40, dtype=torch.float32)
        before = p.detach().clone()
        p.grad = gradient_like(p) * factor
        forced(p, lr=1.0, weight_decay=0.0, precision="fp32").step()
        updates.append(before - p)
    assert relative(updates[1], updates[0]) < 1e-5


@pytest.mark.case(row="N4")
@pytest.mark.case("N4")
def test_one_huge_gradient_leaves_the_others_a_full_step() -> None:
    small, huge = parameter(16, 16), parameter(16, 16, seed=1)
    before = small.detach().clone()
    small.grad, huge.grad = gradient_like(small), gradient_like(huge) * 1e11
    gradient = small.grad.clone()
    nn.utils.clip_grad_norm_([small, huge], 1.0)
    assert small.grad.norm() < 1e-9
    forced(small, huge, lr=1.0, weight_decay=0.0).step()
    assert relative(before - small, orthogonalized(gradient.numpy())) < 1e-9


@pytest.mark.case(row="N2")
@pytest.mark.case("N2")
def test_a_zero_gradient_makes_no_update() -> None:
    p = parameter(8, 12)
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    forced(p, lr=1.0, weight_decay=0.0).step()
    assert torch.equal(p, before)


@pytest.mark.case(row="N2")
@pytest.mark.case("N2")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_its_own_matrix_alone(bad: float) -> None:
    spoiled, sound, alone = (parameter(8, 12, seed=seed) for seed in (0, 1, 1))
    spoiled.grad = gradient_like(spoiled)
    spoiled.grad[3, 4] = bad
    sound.grad = gradient_like(sound)
    alone.grad = sound.grad.clone()
    forced(spoiled, sound, lr=1.0).step()
    forced(alone, lr=1.0).step()
    assert not torch.isfinite(spoiled).all()
    assert relative(sound, alone.detach()) < 1e-12


@pytest.mark.case(row="N5")
@pytest.mark.case("N5")
def test_a_step_skipped_by_the_scaler_leaves_the_momentum_alone() -> None:
    model = nn.Linear(6, 4)
    optimizer = dmuon.Muon(model, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def train(bad: float) -> None:
        loss = model(torch.full((3, 6), bad)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    before = [p.detach().clone() for p in model.parameters()]
    train(math.inf)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert not optimizer.state
    train(1.0)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert all(torch.isfinite(value).all() for state in optimizer.state.values() for value in state.values())
    assert not torch.equal(model.weight, before[0])


@pytest.mark.parametrize("unscale", [False, True])
def test_scaled_training_equals_unscaled_training(unscale: bool) -> None:
    """Of any size of scale; bit for bit, since scales are powers of two."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    other = copy.deepcopy(model)
    optimizer, plain = dmuon.Muon(model, lr=0.1), dmuon.Muon(other, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for step in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        scaler.scale(model(x).square().mean()).backward()
        other(x).square().mean().backward()
        if unscale:
            scaler.unscale_(optimizer)
            for each in (model, other):
                nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    assert scaler.get_scale() == 2.0**13
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.case(row="N9")
@pytest.mark.case("N9")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_momentum_is_no_scratch_and_gradients_are_only_read(dtype: torch.dtype, nesterov: bool) -> None:
    p = parameter(16, 24, dtype=dtype)
    optimizer = forced(p, lr=0.1, nesterov=nesterov, precision="fp32")
    expected = torch.zeros_like(p)
    for step in range(3):
        p.grad = gradient_like(p, seed=step)
        kept = p.grad.clone()
        expected.lerp_(kept, 1 - 0.95)
        optimizer.step()
        assert torch.equal(p.grad, kept)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], expected)


@pytest.mark.case(row="N10")
@pytest.mark.case("N10")
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_gradients_of_any_layout(layout: str) -> None:
    p, q = parameter(12, 20), parameter(12, 20)
    base = gradient_like(parameter(20, 12))
    if layout == "transposed":
        gradient = base.T
    elif layout == "strided":
        gradient = gradient_like(parameter(12, 40))[:, ::2]
    else:
        gradient = gradient_like(parameter(12, 1)).expand(12, 20)
    p.grad, q.grad = gradient, gradient.contiguous()
    for each in (p, q):
        forced(each, lr=1.0).step()
    assert torch.equal(p, q)


@pytest.mark.case(row="N10")
@pytest.mark.case("N10")
@pytest.mark.parametrize("which", ["gradient", "weight", "both"])
def test_channels_last_convolutions(which: str) -> None:
    plain, other = nn.Conv2d(3, 8, 3, bias=False).double(), nn.Conv2d(3, 8, 3, bias=False).double()
    other.load_state_dict(plain.state_dict())
    if which != "gradient":
        other = other.to(memory_format=torch.channels_last)
    gradient = gradient_like(plain.weight)
    W = plain.weight.detach().flatten(1).numpy().copy()
    plain.weight.grad = gradient
    other.weight.grad = gradient if which == "weight" else gradient.to(memory_format=torch.channels_last)
    for module in (plain, other):
        dmuon.Muon(module, lr=1.0, weight_decay=0.0, adjust_lr="spectral", **FP64).step()
    expected, _ = muon_step(
        W, gradient.flatten(1).numpy(), np.zeros_like(W), lr=1.0, weight_decay=0.0, factor=math.sqrt(8 / 27)
    )
    assert relative(plain.weight.flatten(1), expected) < 1e-12
    assert relative(other.weight.flatten(1), expected) < 1e-12


def test_accumulated_gradients_equal_one_batch() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    parts = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    parts.load_state_dict(whole.state_dict())
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    optimizers = [dmuon.Muon(model, lr=0.1, **FP64) for model in (whole, parts)]
    for _ in range(2):
        nn.functional.mse_loss(whole(x), y).backward()
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            (nn.functional.mse_loss(parts(a), b) / 4).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert relative(other, one.detach()) < 1e-11


def test_no_gradient_means_no_decay_and_no_state() -> None:
    used, unused, bias = parameter(6, 8), parameter(6, 8, seed=1), parameter(6, seed=2)
    kept = [tensor.detach().clone() for tensor in (unused, bias)]
    used.grad = gradient_like(used)
    optimizer = dmuon.Muon([used, unused, bias], lr=0.1, weight_decay=10.0, **FP64)
    optimizer.step()
    assert torch.equal(unused, kept[0]) and torch.equal(bias, kept[1])
    assert list(optimizer.state) == [used]
