"""torch's learning-rate schedulers over the optimizer of an owned model, against those over one process's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, batch, build, difference, loss_of, mesh_of, wrap
from own_processes import run_ranks
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import dmuon

STEPS = 4


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "one cycle": lambda o: OneCycleLR(
        o, rates(o), total_steps=STEPS + 1, base_momentum=0.8, max_momentum=0.9
    ),
    "cyclic": lambda o: CyclicLR(o, [0.0] * len(rates(o)), rates(o), step_size_up=2),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=STEPS),
    "sequence": lambda o: SequentialLR(
        o, [LinearLR(o, start_factor=0.1, total_iters=2), CosineAnnealingLR(o, T_max=3)], milestones=[2]
    ),
    "a function for each group": lambda o: LambdaLR(o, [lambda step: 1 / (step + 1), lambda step: 0.5**step]),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0, threshold=1e9),
    "constant": lambda o: ConstantLR(o, factor=0.5, total_iters=2),
}


def train(name: str) -> tuple[float, list[list[float]]]:
    """How far the weights are from one process's in the end; the rates of the groups in each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build(layers=2)
    reference = copy.deepcopy(model)
    owned = wrap(model, mesh_of())
    optimizers = dmuon.Muon(model, **HOW), dmuon.Muon(reference, **HOW)
    schedules: list[Any] = [SCHEDULES[name](optimizer) for optimizer in optimizers]
    seen = []
    for step in range(STEPS):
        tokens, targets = batch(step, 2 * ranks)
        mine = slice(2 * rank, 2 * rank + 2)
        loss_of(model(tokens[mine]), targets[mine]).backward()
        loss_of(reference(tokens), targets).backward()
        seen.append([value for o in optimizers for value in (*rates(o), o.param_groups[0]["momentum"])])
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(*([1.0] if name == "plateau" else []))
    return difference(model, owned, reference), seen


def train_each() -> dict[str, tuple[float, list[list[float]]]]:
    return {name: train(name) for name in SCHEDULES}


def test_schedulers_drive_the_optimizer_of_an_owned_model() -> None:
    for found in run_ranks(2, train_each):
        for name, (apart, seen) in found.items():
            assert apart < 1e-12, (name, apart)
            for step in seen:
                assert step[:3] == step[3:], name
            assert len({tuple(step) for step in seen}) > 1, name
        momenta = [step[2] for step in found["one cycle"][1]]
        assert min(momenta) < 0.81 and max(momenta) == pytest.approx(0.9)
        muon, adamw = zip(*(step[:2] for step in found["a function for each group"][1]), strict=True)
        assert muon == pytest.approx([0.05 / (k + 1) for k in range(STEPS)])
        assert adamw == pytest.approx([1e-2 * 0.5**k for k in range(STEPS)])
