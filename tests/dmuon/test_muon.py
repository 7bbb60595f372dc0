"""The Muon update itself, against a re-derivation in fp64 and against torch.optim.Muon."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from muon_helpers import FP64, forced, gradient_like, parameter, relative
from muon_reference import KELLER, muon_step, orthogonalized
from torch import Tensor, nn

import dmuon
import dmuon.muon
from dmuon.kernels.coefficients import resolve_coefficients


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 24), (64, 16), (16, 64), (1, 9), (9, 1), (63, 65)])
def test_three_steps_equal_the_formula(shape: tuple[int, int], nesterov: bool) -> None:
    p = parameter(*shape)
    optimizer = forced(p, lr=0.1, weight_decay=0.3, momentum=0.9, nesterov=nesterov)
    W, B = p.detach().numpy().copy(), np.zeros(shape)
    for step in range(3):
        p.grad = gradient_like(p, seed=step + 1)
        W, B = muon_step(
            W,
            p.grad.numpy(),
            B,
            lr=0.1,
            weight_decay=0.3,
            momentum=0.9,
            nesterov=nesterov,
            factor=math.sqrt(max(1.0, shape[0] / shape[1])),
        )
        optimizer.step()
    assert relative(p, W) < 1e-12
    assert relative(optimizer.state[p]["momentum_buffer"], B) < 1e-14


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 40),
    lr=st.floats(0, 1),
    weight_decay=st.floats(0, 1),
    momentum=st.floats(0, 0.999),
    seed=st.integers(0, 1000),
)
def test_any_options_equal_the_formula(
    rows: int, cols: int, lr: float, weight_decay: float, momentum: float, seed: int
) -> None:
    p = parameter(rows, cols, seed=seed)
    W, B = p.detach().numpy().copy(), np.zeros((rows, cols))
    options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    optimizer = forced(p, adjust_lr=lambda rows, cols: 1.5 * rows / cols, **options)
    for step in range(2):
        p.grad = gradient_like(p, seed=seed + step + 1)
        W, B = muon_step(W, p.grad.numpy(), B, factor=1.5 * rows / cols, **options)
        optimizer.step()
    assert torch.allclose(p, torch.from_numpy(W), rtol=1e-10, atol=1e-10)


def test_custom_coefficients_are_the_ones_used() -> None:
    steps = [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)]
    p = parameter(12, 20)
    before = p.detach().clone()
    p.grad = gradient_like(p)
    forced(p, lr=1.0, weight_decay=0.0, momentum=0.0, coefficients=steps).step()
    assert relative(before - p, orthogonalized(p.grad.numpy(), tuple(steps))) < 1e-12


def test_the_default_is_polar_express() -> None:
    p = parameter(16, 48)
    before = p.detach().clone()
    p.grad = gradient_like(p)
    dmuon.Muon([p], lr=1.0, weight_decay=0.0).step()
    assert (
        relative(before - p, orthogonalized(p.grad.numpy(), resolve_coefficients("polar_express").steps))
        < 1e-12
    )


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(96, 32), (32, 96)])
def test_matches_torch_muon(shape: tuple[int, int], rule: str, nesterov: bool) -> None:
    ours, theirs = (parameter(*shape, dtype=torch.float32) for _ in range(2))
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.9, "nesterov": nesterov}
    optimizer = forced(ours, adjust_lr=rule, precision="bf16", **options)
    reference = torch.optim.Muon([theirs], adjust_lr_fn=rule, **options)
    start = ours.detach().clone()
    for step in range(4):
        ours.grad = gradient_like(ours, seed=step)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    # Both iterations run in bf16, in another order of operations.
    assert relative(ours - start, theirs.detach() - start) < 0.03
    buffers = (optimizer.state[ours]["momentum_buffer"], reference.state[theirs]["momentum_buffer"])
    assert torch.equal(*buffers)


@pytest.mark.case(row="N8")
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw", "spectral"])
def test_the_rule_scales_the_update_once(rule: str) -> None:
    p = parameter(64, 16)
    before = p.detach().clone()
    p.grad = gradient_like(p)
    forced(p, lr=0.5, weight_decay=0.0, adjust_lr=rule).step()
    factor = {"original": 2.0, "match_rms_adamw": 1.6, "spectral": 2.0}[rule]
    assert relative(before - p, 0.5 * factor * orthogonalized(p.grad.numpy())) < 1e-12


@pytest.mark.case(row="N7")
def test_learning_rate_zero_changes_only_the_momentum() -> None:
    p = parameter(8, 12)
    before = p.detach().clone()
    p.grad = gradient_like(p)
    optimizer = forced(p, lr=0.0, weight_decay=10.0)
    optimizer.step()
    assert torch.equal(p, before)
    assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.zeros_like(p).lerp(p.grad, 1 - 0.95))


@pytest.mark.case(row="N7")
def test_decay_is_exactly_the_formula() -> None:
    p = parameter(8, 12)
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    forced(p, lr=0.1, weight_decay=10.0, adjust_lr="match_rms_adamw").step()
    assert torch.equal(p, before * (1 - 0.1 * 10.0))
    q = parameter(8, 12)
    q.grad = torch.zeros_like(q)
    forced(q, lr=0.1, weight_decay=0.3).step()
    assert torch.equal(q, before * (1 - 0.1 * 0.3))


def test_maximize_is_descent_on_the_negative() -> None:
    up, down = ([parameter(6, 8), parameter(6, seed=1)] for _ in range(2))
    ascent, descent = (dmuon.Muon(ps, lr=0.1, maximize=ps is up, **FP64) for ps in (up, down))
    for step in range(3):
        for a, b in zip(up, down, strict=True):
            a.grad = gradient_like(a, seed=step)
            b.grad = -a.grad
        ascent.step()
        descent.step()
    assert all(torch.equal(a, b) for a, b in zip(up, down, strict=True))


@pytest.mark.case(row="T6")
def test_a_tensor_learning_rate_is_read_at_every_step() -> None:
    lr = torch.tensor(0.1, dtype=torch.float64)
    p, q = parameter(6, 8), parameter(6, 8)
    p.grad, q.grad = gradient_like(p), gradient_like(q)
    by_tensor, by_float = forced(p, lr=lr, weight_decay=0.5), forced(q, lr=0.1, weight_decay=0.5)
    by_tensor.step()
    by_float.step()
    lr.fill_(0.7)
    by_float.param_groups[0]["lr"] = 0.7
    by_tensor.step()
    by_float.step()
    assert relative(p, q.detach()) < 1e-14


def test_closure_is_called_with_gradients_and_its_loss_returned() -> None:
    model = nn.Linear(4, 4)
    optimizer = dmuon.Muon(model, lr=0.01)
    x = torch.randn(8, 4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert first is not None and optimizer.step(closure) < first


def test_steps_reduce_a_loss_in_bf16() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).bfloat16()
    x, y = torch.randn(64, 16).bfloat16(), torch.randint(4, (64,))
    optimizer = dmuon.Muon(model, lr=0.05, adamw_lr=3e-3)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(
        state["momentum_buffer"].dtype == torch.bfloat16
        for p, state in optimizer.state.items()
        if p.ndim == 2
    )


def test_keller_coefficients_of_the_reference_are_the_package_ones() -> None:
    assert resolve_coefficients("keller_jordan").steps == KELLER
