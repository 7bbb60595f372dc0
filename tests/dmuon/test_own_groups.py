"""Options of their own for some owned matrices."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
import torch.distributed as dist
from own_models import HOW, difference, mesh_of
from own_processes import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import dmuon

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def train_divided() -> tuple[float, list[float]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()
    reference = copy.deepcopy(model)
    owned = dmuon.own(model, mesh_of())
    fully_shard(model, mesh=mesh_of(), ignored_params=owned.params)
    optimizer = dmuon.Muon(model, **HOW)
    (recipe,) = re.findall(r"```python\n(matrices = .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(recipe, {"optimizer": optimizer})
    first = [pair for pair in reference.named_parameters() if pair[0] == "0.weight"]
    rest = [pair for pair in reference.named_parameters() if pair[0] != "0.weight"]
    groups = [{"params": rest}, {"params": first, "lr": 0.01, "weight_decay": 0.0}]
    alone = dmuon.Muon(groups, **HOW)
    for step in range(3):
        rows = torch.randn(ranks, 4, 8, generator=torch.Generator().manual_seed(step)).double()
        model(rows[rank]).square().mean().backward()
        reference(rows).square().mean().backward()
        for each in (optimizer, alone):
            each.step()
            each.zero_grad()
    rates = [group["lr"] for group in optimizer.param_groups]
    return difference(model, owned, reference), rates


def test_the_muon_group_can_be_divided() -> None:
    for deviation, rates in run_ranks(2, train_divided):
        assert rates == [HOW["lr"], HOW["adamw_lr"], 0.01] and deviation < 1e-12
