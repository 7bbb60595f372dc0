"""Bad input to own and its optimizer raises on every rank, and says what to do."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, Block, batch, build, loss_of, mesh_of, wrap
from own_processes import outcome, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.policy import MatrixPolicy


def disagreements() -> dict[str, str]:
    """On two ranks, of which the second differs."""
    other = dist.get_rank() == 1
    mesh = mesh_of()
    names = [r.name for r in MatrixPolicy().route_model(build()) if r.algorithm == "muon"]
    plan = {name: k % 2 for k, name in enumerate(names)}
    swapped = {name: 1 - owner for name, owner in plan.items()} if other else plan

    class Lopsided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8 + 4 * other, 8)

    return {
        "plan": outcome(lambda: dmuon.own(build(), mesh, plan=swapped)),
        "plan or none": outcome(lambda: dmuon.own(build(), mesh, plan=plan if other else None)),
        "layers": outcome(lambda: dmuon.own(build(layers=2 + other), mesh)),
        "shape": outcome(lambda: dmuon.own(Lopsided(), mesh)),
        "dtype": outcome(lambda: dmuon.own(build(dtype=torch.float32 if other else torch.float64), mesh)),
        "reshard": outcome(lambda: dmuon.own(build(), mesh, reshard_after_forward=other)),
        "failure": outcome(lambda: dmuon.own(nn.Embedding(4, 4) if other else build(), mesh)),
    }


@pytest.mark.case(row="R8")
def test_ranks_that_disagree_all_raise() -> None:
    first, second = run_ranks(2, disagreements)
    for key, needle in {
        "plan": "disagree on the plan",
        "plan or none": "disagree on the plan",
        "layers": "rank 0 has mixer.weight (16, 16) torch.float64 as 1 x 16 x 16, rank 1 has blocks.2.experts",
        "shape": "rank 0 has layer.weight (8, 8) torch.float32 as 1 x 8 x 8, rank 1 has layer.weight (8, 12)",
        "dtype": "rank 1 has blocks.0.experts (3, 8, 16) torch.float32",
        "reshard": "disagree on the options",
    }.items():
        assert first[key] == second[key] and needle in first[key], (key, first[key], second[key])
    assert first["failure"].startswith(
        "RuntimeError: dmuon.own failed on rank 1: ValueError: the policy finds"
    )
    assert second["failure"].startswith("ValueError: the policy finds no trainable matrix")


def misuses() -> dict[str, str]:
    mesh = mesh_of()
    wrapped = build()
    fully_shard(wrapped, mesh=mesh)
    owned = build()
    dmuon.own(owned, mesh)
    fine = build()
    wrap(fine, mesh)
    trained = build()
    trained.head(torch.ones(16, dtype=torch.float64)).sum().backward()
    mixed = build()
    mixed.blocks[0].float()
    with torch.device("meta"):
        meta = Block()
    nothing: Any = MatrixPolicy(exclude=["*"])
    deep = init_device_mesh("cpu", (1, 1, dist.get_world_size()))
    turned = DeviceMesh("cpu", [1, 0])
    return {
        "dimensions": outcome(lambda: dmuon.own(build(), deep)),
        "order": outcome(lambda: dmuon.own(build(), turned)),
        "wrapped": outcome(lambda: dmuon.own(wrapped, mesh)),
        "second": outcome(lambda: dmuon.own(owned, mesh)),
        "inside": outcome(lambda: dmuon.own(nn.Sequential(owned), mesh)),
        "nothing": outcome(lambda: dmuon.own(build(), mesh, policy=nothing)),
        "gradient": outcome(lambda: dmuon.own(trained, mesh)),
        "dtypes": outcome(lambda: dmuon.own(mixed, mesh)),
        "meta": outcome(lambda: dmuon.own(Block() if dist.get_rank() else meta, mesh)),
        "bucket": outcome(lambda: dmuon.own(build(), mesh, buckets=[nn.Linear(2, 2)])),
        "no model": outcome(lambda: dmuon.own([nn.Linear(2, 2)], mesh)),  # type: ignore[arg-type]
        "converted": outcome(owned.half),
        "converted to what it is": outcome(owned.double) or "no error",
        "no mesh": outcome(lambda: dmuon.own(build(), "cpu")),  # type: ignore[arg-type]
        "never wrapped": outcome(lambda: dmuon.Muon(owned, **HOW)),
        "policy": outcome(lambda: dmuon.Muon(fine, policy=MatrixPolicy(), **HOW)),
        "copy": outcome(lambda: copy.deepcopy(owned)),
        "clip": outcome(lambda: dmuon.clip_grad_norm_(fine, 0.0)),
    }


def test_misuse_is_named() -> None:
    for found in run_ranks(2, misuses):
        for key, needle in {
            "dimensions": "mesh must have one dimension or two (replicate, shard), got 3",
            "order": "the ranks 0 to 1 of the process group in ascending order, got [1, 0]",
            "wrapped": "sharded already: call dmuon.own before fully_shard",
            "second": "owned already",
            "inside": "owned already",
            "nothing": "the policy finds no trainable matrix",
            "gradient": "'head.weight' has a gradient already",
            "dtypes": "several dtypes (torch.float32, torch.float64)",
            "meta": "on the meta device, rank 1 has",
            "bucket": "buckets must be modules of the model, got another Linear",
            "no model": "TypeError: model must be an nn.Module, got list",
            "converted": "cannot be converted or moved: do that before dmuon.own",
            "converted to what it is": "no error",
            "no mesh": "TypeError: mesh must be a DeviceMesh",
            "never wrapped": "nobody reduces the gradients",
            "policy": "the one that dmuon.own was given",
            "copy": "copy it before dmuon.own",
            "clip": "max_norm must be positive",
        }.items():
            assert needle in found[key], (key, found[key])


def killed() -> str:
    """The second rank dies in the middle of a backward."""
    model = build()
    wrap(model, mesh_of())
    if dist.get_rank() == 1:
        model.blocks[1].register_full_backward_hook(lambda *_: os._exit(1))
    tokens, targets = batch(0, 2)

    def step() -> None:
        loss_of(model(tokens), targets).backward()
        dmuon.clip_grad_norm_(model, 1.0)

    return outcome(step)


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(AssertionError) as error:
        run_ranks(2, killed, timeout=45)
    assert str(error.value).startswith("rank 1: died")


def leave_gradients() -> list[list[str]]:
    """What is warned of in a second step, after gradients were dropped in each way."""
    model = build()
    wrap(model, mesh_of())
    optimizer = dmuon.Muon(model, **HOW)
    found = []
    for drop in (optimizer.zero_grad, model.zero_grad):
        for step in range(2):
            tokens, targets = batch(step, 2)
            loss_of(model(tokens), targets).backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            drop()
        found.append([str(warning.message) for warning in caught])
    return found


def test_gradients_that_are_left_from_the_last_step_are_warned_of() -> None:
    for right, wrong in run_ranks(2, leave_gradients):
        assert not right and len(wrong) == 1 and "call optimizer.zero_grad()" in wrong[0]


def scale() -> list[str]:
    """A GradScaler's step: with and without unscaling before it, and switched off."""
    found = []
    for unscale, enabled in ((False, True), (True, True), (False, False)):
        model = build(dtype=torch.float32)
        wrap(model, mesh_of())
        optimizer, scaler = dmuon.Muon(model), torch.amp.GradScaler("cpu", enabled=enabled)
        tokens, targets = batch(0, 2)
        scaler.scale(loss_of(model(tokens), targets)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        found.append(outcome(lambda: scaler.step(optimizer)))  # noqa: B023 - called at once
        optimizer.zero_grad()
    return found


def test_torchs_grad_scaler_is_refused() -> None:
    for at_once, unscaled, off in run_ranks(2, scale):
        assert "use dmuon.GradScaler" in at_once and at_once == unscaled and not off, (at_once, unscaled, off)
