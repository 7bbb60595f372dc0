"""Checkpoints go between tensor-parallel, sharded and single-process training, and training goes on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from own_models import HOW, batch, loss_of
from own_models import mesh_of as flat_mesh
from own_models import wrap as wrap_flat
from own_processes import outcome, run_ranks
from own_tensor_models import build, mesh_of, wrap
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import dmuon

ROWS = 8


def train(model: nn.Module, optimizer: dmuon.Muon, steps: range, place: int = 0, places: int = 1) -> None:
    for step in steps:
        tokens, targets = batch(step, ROWS)
        part = slice(place * ROWS // places, (place + 1) * ROWS // places)
        loss_of(model(tokens[part]), targets[part]).backward()
        optimizer.step()
        optimizer.zero_grad()


def session(path: str, start: int, stop: int, tensor: int) -> dict[str, Any]:
    """Train from what was saved at ``start`` on ``tensor`` ranks for each part of the data, and save; 0 for alone.

    The whole weights afterwards, and the whole momenta under ``state.``.
    """
    model, place, places = build(seed=start), 0, 1
    if tensor > 1:
        mesh = mesh_of(tensor)
        wrap(model, mesh)
        place, places = mesh["shard"].get_local_rank(), mesh["shard"].size()
    elif tensor:
        wrap_flat(model, flat_mesh())
        place, places = dist.get_rank(), dist.get_world_size()
    optimizer = dmuon.Muon(model, **{**HOW, "lr": HOW["lr"] if start == 0 else 0.7})
    if start:
        assert dmuon.load_checkpoint(f"{path}/{start}", model, optimizer) == {"step": start}
    train(model, optimizer, range(start, stop), place, places)
    dmuon.save_checkpoint(f"{path}/{stop}", model, optimizer, extra={"step": stop})
    found = {name: value.numpy() for name, value in dmuon.full_state_dict(model).items()}
    group, every = optimizer.param_groups[0], [{}]
    mine = {
        f"state.{name}": whole(optimizer.state[parameter]["momentum_buffer"]).numpy()
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if optimizer.state[parameter]
    }
    if tensor:
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    return {**found, **{name: value for each in [*every, mine] for name, value in each.items()}}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(path: Path, start: int, stop: int, ranks: int, tensor: int) -> dict[str, Any]:
    if not ranks:
        return session(str(path), start, stop, 0)
    return dict(run_ranks(ranks, session, str(path), start, stop, tensor)[0])


def differs(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - expected[name]).max()) for name in expected)


@pytest.mark.case(row="A3")
def test_a_tensor_parallel_run_goes_on_anywhere(tmp_path: Path) -> None:
    expected = {stop: run(tmp_path / f"alone{stop}", 0, stop, 0, 0) for stop in (2, 3, 4)}
    assert differs(run(tmp_path, 0, 2, 4, 2), expected[2]) < 1e-12
    assert differs(run(tmp_path, 2, 3, 2, 1), expected[3]) < 1e-12  # FSDP alone
    assert differs(run(tmp_path, 2, 4, 0, 0), expected[4]) < 1e-12  # one process
    assert differs(run(tmp_path, 3, 4, 2, 2), expected[4]) < 1e-12  # from FSDP alone to tensor-parallel alone


@pytest.mark.slow
def test_one_process_goes_on_over_other_tensor_parallel_sizes(tmp_path: Path) -> None:
    expected = {stop: run(tmp_path / f"alone{stop}", 0, stop, 0, 0) for stop in (3, 4)}
    run(tmp_path, 0, 2, 0, 0)
    assert differs(run(tmp_path, 2, 3, 4, 4), expected[3]) < 1e-12
    assert differs(run(tmp_path, 3, 4, 4, 2), expected[4]) < 1e-12


def state_dicts(path: str) -> dict[str, Any]:
    """By torch's own functions, to another model and optimizer; and a whole state dict on every rank."""
    mesh = mesh_of(2)
    place = mesh["shard"].get_local_rank(), mesh["shard"].size()
    first, second, third = build(), build(1), build(2)
    for model in (first, second, third):
        wrap(model, mesh)
    ones, twos = dmuon.Muon(first, **HOW), dmuon.Muon(second, **HOW)
    train(first, ones, range(2), *place)
    weights, state = get_state_dict(first, ones)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    weights, state = get_state_dict(second, twos)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(second, twos, model_state_dict=weights, optim_state_dict=state)
    whole_weights: list[Any] = [dmuon.full_state_dict(first)]
    dist.broadcast_object_list(whole_weights)
    third.load_state_dict(whole_weights[0])
    for model, optimizer in ((first, ones), (second, twos)):
        train(model, optimizer, range(2, 3), *place)
    found = [dmuon.full_state_dict(model) for model in (first, second, third)]
    wrong = {
        name: torch.ones(3, 3) if name.endswith("q.weight") else v for name, v in whole_weights[0].items()
    }
    return {
        "torch": max(
            ((found[0][name] - found[1][name]).abs().max().item() for name in found[0]), default=0.0
        ),
        "whole": all((found[2][name] == whole_weights[0][name]).all() for name in found[2]),
        "size": outcome(lambda: third.load_state_dict(wrong)),
        "kinds": str(
            {type(value).__name__ for name, value in weights.items() if name.endswith("q.weight")} or ""
        ),
    }


def test_state_dicts_are_dtensors_and_load_whole_or_divided(tmp_path: Path) -> None:
    results = run_ranks(4, state_dicts, str(tmp_path))
    for found in results:
        assert found["torch"] == 0.0 and found["whole"]
        assert "size mismatch for blocks.0.q.weight: (3, 3), but the model has (16, 16)" in found["size"]
        assert found["kinds"] in ("", "{'DTensor'}")
    assert any(found["kinds"] for found in results)
