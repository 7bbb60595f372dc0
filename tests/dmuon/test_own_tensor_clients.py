"""Tensor parallelism under torch.compile and under loss scaling: equal to one process in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, WIDTH, batch, loss_of
from own_processes import run_ranks
from own_tensor_models import build, data_mesh, difference, mesh_of, wrap
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def train_compiled() -> float:
    """The largest difference from an eager model in one process, of weights and state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MLP(), MLP(), nn.Linear(WIDTH, 1)).double()
    reference = copy.deepcopy(model)
    mesh = mesh_of(2)
    for block in model[1:3]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    owned = dmuon.own(model, mesh["shard"])
    for module in (*model[1:3], model):
        fully_shard(module, mesh=mesh["shard"], ignored_params=owned.params)
    for block in model[1:3]:
        block.compile(backend="aot_eager", fullgraph=True)
    optimizer, alone = dmuon.Muon(model, **HOW), dmuon.Muon(reference, **HOW)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        for each, its in ((model, optimizer), (reference, alone)):
            each(x).square().sum().backward()
            its.step()
            its.zero_grad()
    return max(difference(owned, model, optimizer, reference, alone).values())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_compiled_blocks_equal_one_process(ranks: int) -> None:
    """Of the matrices of a block, all but the first lie somewhere in a buffer."""
    assert max(run_ranks(ranks, train_compiled)) < 1e-12


def train_scaled() -> dict[str, Any]:
    """Three steps, of which the second has an Inf in the last rank's part of one gradient."""
    model = build()
    reference = copy.deepcopy(model)
    mesh = mesh_of(2)
    owned = wrap(model, mesh)
    optimizer, alone = dmuon.Muon(model, **HOW), dmuon.Muon(reference, **HOW)
    scaler, theirs = (kind("cpu", init_scale=64.0) for kind in (dmuon.GradScaler, torch.amp.GradScaler))
    name, last = "blocks.1.up.weight", dist.get_rank() == dist.get_world_size() - 1
    ranks = data_mesh(mesh)
    part = slice(2 * ranks.get_local_rank(), 2 * ranks.get_local_rank() + 2)
    scales = []
    for step in range(3):
        tokens, targets = batch(step, 2 * ranks.size())
        hook = model.get_parameter(name).register_hook(_spoiled) if step == 1 and last else None
        scaler.scale(loss_of(model(tokens[part]), targets[part])).backward()
        theirs.scale(loss_of(reference(tokens), targets)).backward()
        if hook is not None:
            hook.remove()
        if step == 1:
            _spoiled(reference.get_parameter(name).grad)
        for each, its in ((optimizer, scaler), (alone, theirs)):
            its.step(each)
            its.update()
            each.zero_grad()
        scales.append((scaler.get_scale(), theirs.get_scale()))
    return {"scales": scales, **difference(owned, model, optimizer, reference, alone)}


def _spoiled(gradient: Any) -> Any:
    part = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    part.view(-1)[0] = float("inf")
    return gradient


@pytest.mark.case(row="N5")
@pytest.mark.case("N5")
def test_an_overflow_in_one_shard_makes_all_ranks_skip() -> None:
    for found in run_ranks(2, train_scaled):
        assert found["scales"] == [(64.0, 64.0), (32.0, 32.0), (32.0, 32.0)]
        assert max(found["weights"], found["state"]) < 1e-12
