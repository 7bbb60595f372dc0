"""Which matrices of a parameter are orthogonalised: experts, splits, transposed layers, adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from muon_helpers import FP64, forced, gradient_like, parameter, relative
from muon_reference import muon_step
from torch import Tensor, nn

import dmuon
import dmuon.matrix_step
from dmuon.policy import MatrixPolicy


@pytest.mark.case(row="P4")
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


@pytest.mark.case(row="P5")
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


@pytest.mark.case(row="N8")
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


@pytest.mark.case(row="P6")
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


@pytest.mark.case(row="P1")
def test_each_matrix_is_orthogonalized_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16))
    optimizer = dmuon.Muon(model)
    calls: list[tuple[int, ...]] = []
    run = dmuon.matrix_step.gram_ns

    def counting(G: Tensor, **options: Any) -> Tensor:
        calls.append(tuple(G.shape))
        return run(G, **options)

    monkeypatch.setattr(dmuon.matrix_step, "gram_ns", counting)
    for _ in range(4):  # micro-batches
        model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    assert sorted(calls) == [(1, 16, 32), (1, 32, 16), (2, 16, 16)]
