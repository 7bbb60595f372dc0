"""Ten steps on several ranks against ten in one process: equal in fp64; in fp32 and bf16 as good as one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, Training, batch, build, loss_of, mesh_of, train_each
from own_processes import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon

ZERO2 = {"reshard_after_forward": False}
STEPS = 10
TRAININGS = {
    "zero3": Training(),
    "zero2": Training(own=ZERO2),
    "accumulation": Training(micro_batches=2, own=ZERO2),
    "accumulation without sync": Training(micro_batches=2, sync_all=False),
    "checkpointing": Training(checkpointing="nonreentrant"),
    "unused": Training(unused={1: {1}}, clip=0.1),
}


def train_long(trainings: list[Training]) -> list[dict[str, float]]:
    # Newton–Schulz amplifies a difference in a direction of small gradient up to a thousandfold, step by step.
    HOW["lr"] = 0.02
    return train_each(trainings)


def check(ranks: int, trainings: dict[str, Training], nodes: int = 1) -> None:
    for training in trainings.values():
        training.steps, training.nodes = STEPS, nodes
    results = run_ranks(ranks, train_long, list(trainings.values()), timeout=250)
    worst = {name: max(max(result[k].values()) for result in results) for k, name in enumerate(trainings)}
    assert not {name: found for name, found in worst.items() if not found < 1e-12}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (3, 1), (4, 1), (8, 1), (4, 2), (8, 2)])
def test_ten_steps_equal_one_process(ranks: int, nodes: int) -> None:
    check(ranks, copy.deepcopy(TRAININGS), nodes)


@pytest.mark.slow
def test_ten_compiled_steps_equal_one_process() -> None:
    check(2, {"block": Training(compiled="block"), "model": Training(compiled="model", own=ZERO2)})


def deviations(dtype: torch.dtype, nodes: int) -> dict[str, float]:
    """From fp64 in one process, relative to how far ten steps move the weights: of several ranks and of one.

    Both compute in ``dtype``, keep fp32 masters and add up gradients in fp32.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build(dtype=torch.float32)
    start, alone = copy.deepcopy(model), copy.deepcopy(model)
    exact = copy.deepcopy(model).double()
    mesh = mesh_of(nodes)
    owned = dmuon.own(model, mesh, compute_dtype=dtype)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=precision, ignored_params=owned.params)
    how = {**HOW, "precision": {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]}
    optimizer = dmuon.Muon(model, **how)
    optimizers = [optimizer, dmuon.Muon(alone, **how), dmuon.Muon(exact, **HOW)]
    rows = [slice(2 * r, 2 * r + 2) for r in range(ranks)]
    for step in range(STEPS):
        tokens, targets = batch(step, 2 * ranks)
        loss_of(model(tokens[rows[rank]]).float(), targets[rows[rank]]).backward()
        add_gradients(alone, dtype, tokens, targets, rows)
        add_gradients(exact, torch.float64, tokens, targets, rows)
        for each in optimizers:
            each.step()
            each.zero_grad()
    expected, before = dict(exact.named_parameters()), dict(start.named_parameters())
    ours: dict[str, Tensor] = dict(owned.masters)
    for name, parameter in model.named_parameters():
        if parameter not in owned.params:
            whole = parameter.full_tensor()
            if rank == 0:
                ours[name] = whole
    moved = distance({name: before[name] for name in ours}, expected)
    return {
        "several": distance(ours, expected) / moved,
        "one": distance({name: p for name, p in alone.named_parameters() if name in ours}, expected) / moved,
    }


def add_gradients(
    model: nn.Module, dtype: torch.dtype, tokens: Tensor, targets: Tensor, rows: list[slice]
) -> None:
    """The mean over ``rows``, each computed in ``dtype``, into the gradients of ``model``."""
    for part in rows:
        cast = copy.deepcopy(model).to(dtype)
        cast.zero_grad()
        loss_of(cast(tokens[part]).to(torch.promote_types(dtype, torch.float32)), targets[part]).backward()
        for parameter, source in zip(model.parameters(), cast.parameters(), strict=True):
            mean = source.grad.to(parameter.dtype) / len(rows)
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean


def distance(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Root of the sum of squares of all differences, those on other ranks included."""
    total = sum((weight.detach().double() - others[name]).square().sum() for name, weight in weights.items())
    total = torch.as_tensor(total, dtype=torch.float64).detach()
    dist.all_reduce(total)
    return total.sqrt().item()


BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""As docs/distributed.md states them."""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_rounding_is_that_of_one_process(ranks: int, nodes: int, dtype: torch.dtype) -> None:
    for found in run_ranks(ranks, deviations, dtype, nodes, timeout=120):
        assert found["several"] < BOUNDS[dtype] and found["several"] < 2 * found["one"]
