"""The Muon update itself, against a re-derivation in fp64 and against torch.optim.Muon."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from muon_reference import KELLER, muon_step, orthogonalized
from torch import Tensor, nn

import dmuon
import dmuon.muon
from dmuon.kernels.coefficients import resolve_coefficients
from dmuon.policy import MatrixPolicy

FP64: dict[str, Any] = {"coefficients": "keller_jordan", "precision": "fp64"}


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype))


def gradient_like(tensor: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


def forced(*params: Tensor, **options: Any) -> dmuon.Muon:
    return dmuon.Muon([{"params": list(params), "algorithm": "muon"}], **{**FP64, **options})


def relative(actual: Tensor, expected: Any) -> float:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    return ((actual.double() - expected).norm() / expected.norm()).item()


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


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw", "spectral"])
def test_the_rule_scales_the_update_once(rule: str) -> None:
    p = parameter(64, 16)
    before = p.detach().clone()
    p.grad = gradient_like(p)
    forced(p, lr=0.5, weight_decay=0.0, adjust_lr=rule).step()
    factor = {"original": 2.0, "match_rms_adamw": 1.6, "spectral": 2.0}[rule]
    assert relative(before - p, 0.5 * factor * orthogonalized(p.grad.numpy())) < 1e-12


def test_learning_rate_zero_changes_only_the_momentum() -> None:
    p = parameter(8, 12)
    before = p.detach().clone()
    p.grad = gradient_like(p)
    optimizer = forced(p, lr=0.0, weight_decay=10.0)
    optimizer.step()
    assert torch.equal(p, before)
    assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.zeros_like(p).lerp(p.grad, 1 - 0.95))


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


def test_one_huge_gradient_leaves_the_others_a_full_step() -> None:
    small, huge = parameter(16, 16), parameter(16, 16, seed=1)
    before = small.detach().clone()
    small.grad, huge.grad = gradient_like(small), gradient_like(huge) * 1e11
    gradient = small.grad.clone()
    nn.utils.clip_grad_norm_([small, huge], 1.0)
    assert small.grad.norm() < 1e-9
    forced(small, huge, lr=1.0, weight_decay=0.0).step()
    assert relative(before - small, orthogonalized(gradient.numpy())) < 1e-9


def test_a_zero_gradient_makes_no_update() -> None:
    p = parameter(8, 12)
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    forced(p, lr=1.0, weight_decay=0.0).step()
    assert torch.equal(p, before)


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


def test_experts_equal_a_loop_over_experts() -> None:
    stack = parameter(5, 12, 20)
    experts = [nn.Parameter(expert.clone()) for expert in stack.detach()]
    stack.grad = gradient_like(stack)
    for expert, gradient in zip(experts, stack.grad, strict=True):
        expert.grad = gradient.clone()
    dmuon.Muon([stack], lr=1.0, **FP64).step()
    for expert in experts:
        forced(expert, lr=1.0).step()
    assert relative(stack, torch.stack([expert.detach() for expert in experts])) < 1e-12


def test_a_split_qkv_equals_three_matrices() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 128, bias=False, dtype=torch.float64)

    model = Attention()
    sizes = (96, 16, 16)
    parts = [nn.Parameter(part.clone()) for part in model.qkv.weight.detach().split(sizes)]
    model.qkv.weight.grad = gradient_like(model.qkv.weight)
    for part, gradient in zip(parts, model.qkv.weight.grad.split(sizes), strict=True):
        part.grad = gradient.clone()
    dmuon.Muon(model, lr=1.0, policy=MatrixPolicy(splits={"*qkv.weight": sizes}), **FP64).step()
    forced(*parts, lr=1.0).step()
    assert relative(model.qkv.weight, torch.cat([part.detach() for part in parts])) < 1e-12
    with pytest.raises(ValueError, match="128"):
        dmuon.Muon(model, policy=MatrixPolicy(splits={"*qkv.weight": (96, 16)}))


def test_a_transposed_layer_scales_by_its_fan_out() -> None:
    class Conv1D(nn.Module):  # as transformers has it: (in, out), y = xW
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf, self.weight = nf, nn.Parameter(torch.randn(nx, nf, dtype=torch.float64))

    model = Conv1D(64, 16)
    W = model.weight.detach().T.numpy().copy()
    model.weight.grad = gradient_like(model.weight)
    dmuon.Muon(model, lr=1.0, weight_decay=0.0, adjust_lr="spectral", **FP64).step()
    expected, _ = muon_step(
        W, model.weight.grad.T.numpy(), np.zeros_like(W), lr=1.0, weight_decay=0.0, factor=2.0
    )
    assert relative(model.weight, expected.T) < 1e-12


def test_lora_factors_are_adamw_until_named() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(16, 16, bias=False)
            self.lora_A, self.lora_B = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)

    by_default = dmuon.Muon(Adapted()).param_groups
    assert [group["param_names"] for group in by_default] == [
        ["base.weight"],
        ["lora_A.weight", "lora_B.weight"],
    ]
    named = dmuon.Muon(Adapted(), policy=MatrixPolicy(include=["lora_A.weight"])).param_groups
    assert [group["param_names"] for group in named] == [["base.weight", "lora_A.weight"], ["lora_B.weight"]]


def test_each_matrix_is_orthogonalized_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16))
    optimizer = dmuon.Muon(model)
    calls: list[tuple[int, ...]] = []
    run = dmuon.muon.gram_ns

    def counting(G: Tensor, **options: Any) -> Tensor:
        calls.append(tuple(G.shape))
        return run(G, **options)

    monkeypatch.setattr(dmuon.muon, "gram_ns", counting)
    for _ in range(4):  # micro-batches
        model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    assert sorted(calls) == [(1, 16, 32), (1, 32, 16), (2, 16, 16)]


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
