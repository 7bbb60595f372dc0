"""The AdamW half against torch.optim.AdamW, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmuon

OPTIONS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}


def pair(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    return [nn.Parameter(t.clone()) for t in tensors], [nn.Parameter(t.clone()) for t in tensors]


def run(
    ours: list[nn.Parameter], theirs: list[nn.Parameter], fused: bool, maximize: bool = False
) -> dmuon.Muon:
    group = {"params": ours, "algorithm": "adamw", "fused": fused, "maximize": maximize, **OPTIONS}
    optimizer = dmuon.Muon([group])
    reference = torch.optim.AdamW(theirs, fused=fused or None, maximize=maximize, **OPTIONS)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        state, expected = optimizer.state[a], reference.state[b]
        assert state.keys() == expected.keys()
        for key in state:
            assert torch.equal(state[key], expected[key]) and state[key].dtype == expected[key].dtype
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
def test_equals_torch(fused: bool, dtype: torch.dtype) -> None:
    run(*pair((7,), (3, 5), (2, 3, 4), dtype=dtype), fused=fused)


@pytest.mark.parametrize("fused", [True, False])
def test_maximize_equals_torch(fused: bool) -> None:
    run(*pair((7,), (3, 5)), fused=fused, maximize=True)


def test_fused_by_default_where_torch_can() -> None:
    dense = nn.Parameter(torch.randn(6))
    gaps = nn.Parameter(torch.randn(6, 2)[:, 0])
    for parameter, fused in ((dense, True), (gaps, False)):
        (group,) = dmuon.Muon([parameter]).param_groups
        assert group["algorithm"] == "adamw" and group["fused"] is fused


@pytest.mark.case(row="N10")
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_gradients_of_any_layout(layout: str) -> None:
    gradient: Tensor
    if layout == "transposed":
        gradient = torch.randn(5, 3).T
    elif layout == "strided":
        gradient = torch.randn(3, 10)[:, ::2]
    else:
        gradient = torch.randn(3, 1).expand(3, 5)
    (a,), (b,) = pair((3, 5))
    a.grad, b.grad = gradient, gradient.contiguous()
    for each in (a, b):
        optimizer = dmuon.Muon([{"params": [each], "algorithm": "adamw"}])
        assert optimizer.param_groups[0]["fused"]
        optimizer.step()
    assert torch.equal(a, b)


def test_a_transposed_parameter_takes_contiguous_gradients_and_state() -> None:
    (a,), (b,) = pair((3, 5))
    a.data = a.data.T.contiguous().T
    optimizers = [dmuon.Muon([{"params": [each], "algorithm": "adamw"}]) for each in (a, b)]
    for _ in range(2):
        a.grad = torch.randn(3, 5)
        b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        # A checkpoint gives the state back contiguous.
        saved = optimizers[0].state_dict()
        saved["state"][0] = {key: value.contiguous() for key, value in saved["state"][0].items()}
        optimizers[0].load_state_dict(saved)
    assert torch.equal(a, b)


def test_a_tensor_learning_rate_equals_a_float() -> None:
    (a,), (b,) = pair((7,))
    for each, lr in ((a, torch.tensor(0.25)), (b, 0.25)):
        each.grad = torch.arange(7.0) - 3
        dmuon.Muon([each], adamw_lr=lr).step()
    assert torch.equal(a, b)


def test_a_model_in_both_halves_equals_torch_on_its_half() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    twins = {
        name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters() if name != "1.weight"
    }
    optimizer = dmuon.Muon(
        model, lr=0.1, adamw_lr=0.05, adamw_betas=(0.8, 0.9), adamw_eps=1e-6, weight_decay=0.3
    )
    reference = torch.optim.AdamW(twins.values(), fused=True, **OPTIONS)
    for _ in range(3):
        for name, p in model.named_parameters():
            p.grad = torch.randn_like(p)
            if name in twins:
                twins[name].grad = p.grad.clone()
        optimizer.step()
        reference.step()
    assert all(torch.equal(p, twins[name]) for name, p in model.named_parameters() if name in twins)


def test_parameters_without_elements_do_no_harm(tmp_path: Path) -> None:
    model = nn.Module()
    shapes = {"weight": (6, 4), "rows": (0, 4), "vector": (0,), "experts": (0, 4, 4)}
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape)))
    optimizer = dmuon.Muon(model)
    for _ in range(2):
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
        dmuon.save_checkpoint(tmp_path / "run", model, optimizer)
    saved = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    dmuon.load_checkpoint(tmp_path / "run", model, optimizer)
    assert torch.equal(model.weight, saved)
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == shapes
