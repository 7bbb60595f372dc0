"""A matrix that several blocks use."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from own_models import HOW, difference, mesh_of
from own_processes import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import dmuon

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def model_of(shared: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    if shared == "weight":
        model[2].up.weight = model[0].up.weight
    elif shared == "module":
        model[2].up = model[0].up
    else:
        model[2] = model[0]
    return model.double()


def train_shared(shared: str, zero_3: bool) -> tuple[float, list[str]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, mesh = model_of(shared), mesh_of()
    reference = copy.deepcopy(model)
    owned = dmuon.own(model, mesh, reshard_after_forward=zero_3)
    # FSDP needs what blocks share in one unit, so the model is the only one.
    fully_shard(model, mesh=mesh, reshard_after_forward=zero_3, ignored_params=owned.params)
    optimizer, alone = dmuon.Muon(model, **HOW), dmuon.Muon(reference, **HOW)
    for step in range(3):
        rows = torch.randn(ranks, 4, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        model(rows[rank]).square().mean().backward()
        reference(rows).square().mean().backward()
        for each in (optimizer, alone):
            each.step()
            each.zero_grad()
    return difference(model, owned, reference), list(owned.parameters)


def test_training_equals_one_process() -> None:
    for shared, distinct in (("weight", 5), ("module", 5), ("block", 4)):
        for zero_3 in (True, False):
            for deviation, names in run_ranks(2, train_shared, shared, zero_3):
                assert len(names) == distinct and deviation < 1e-12, (shared, zero_3)
