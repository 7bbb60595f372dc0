"""What goes wrong ends with an error on every rank that can still tell, within the time-out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, batch, build, loss_of, mesh_of, wrap
from own_processes import outcome, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.batching import Update

TIMEOUT = timedelta(seconds=4)


def backward(model: nn.Module) -> None:
    tokens, targets = batch(0, 2)
    loss_of(model(tokens), targets).backward()


def warmed_up(nodes: int) -> dict[str, Any]:
    """The process groups that ``own`` makes, and the collectives on them, in order."""
    mesh = mesh_of(nodes)
    distributed: Any = dist
    log: list[tuple[str, tuple[int, ...]]] = []
    index: dict[int, int] = {}

    def making(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(ranks: list[int], *args: Any, **options: Any) -> Any:
            group = function(ranks, *args, **options)
            log.append(("new", tuple(ranks)))
            if dist.get_rank() in ranks:
                index[id(group)] = len(log) - 1
            return group

        return call

    def connecting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, **options: Any) -> Any:
            connected.append(index[id(group)])
            return function(*args, group=group, **options)

        return call

    connected: list[int] = []
    distributed.new_group = making(dist.new_group)
    for name in ("all_reduce", "all_gather_object", "broadcast_object_list"):
        setattr(distributed, name, connecting(getattr(dist, name)))
    dmuon.own(build(), mesh)
    return {"log": log, "mine": sorted(index.values()), "connected": list(dict.fromkeys(connected))}


@pytest.mark.case(row="R7")
@pytest.mark.parametrize("nodes", [1, 2])
def test_groups_are_connected_at_construction_in_one_order(nodes: int) -> None:
    results = run_ranks(4, warmed_up, nodes)
    for result in results:
        assert result["log"] == results[0]["log"]
        # One for control, then for reductions and each lane of publications one, or one on each level.
        assert result["connected"] == result["mine"] and len(result["mine"]) == (4 if nodes == 1 else 7)


class Special(nn.Parameter):
    """Somebody's own kind."""


def built_too_early() -> dict[str, str]:
    """Optimizers that were built before the model was owned, wrapped, or replaced."""
    mesh = mesh_of()
    found = {}

    model = build()
    optimizer = dmuon.Muon(model, **HOW)
    wrap(model, mesh)
    backward(model)
    found["owned and wrapped"] = outcome(optimizer.step)

    model = build()
    optimizer = dmuon.Muon(model.parameters(), **HOW)
    wrap(model, mesh)
    backward(model)
    found["parameters, owned since"] = outcome(optimizer.step)

    model = build()
    owned = wrap(model, mesh)
    found["parameters of an owned model"] = outcome(lambda: dmuon.Muon(owned.params, **HOW))
    found["part of an owned model"] = outcome(lambda: dmuon.Muon(model.blocks[0], **HOW))
    other = build()
    other.mixer.weight = Special(other.mixer.weight.detach())
    found["subclass"] = outcome(lambda: dmuon.own(other, mesh))
    found["part owned again"] = outcome(lambda: dmuon.own(model.blocks[0], mesh))

    model = build()
    optimizer = dmuon.Muon(model, **HOW)
    fully_shard(model, mesh=mesh)
    backward(model)
    found["wrapped alone"] = outcome(optimizer.step)

    model = build()
    dmuon.own(model, mesh)
    found["not ignored"] = outcome(lambda: fully_shard(model, mesh=mesh))

    model = build()
    optimizer = dmuon.Muon(model, **HOW)
    model.mixer = nn.Linear(16, 16, bias=False).double()
    backward(model)
    found["replaced"] = outcome(optimizer.step)

    model = build()
    optimizer = dmuon.Muon(model, **HOW)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model.to(torch.float32)
    backward(model)
    found["moved"] = outcome(optimizer.step)
    torch.__future__.set_overwrite_module_params_on_conversion(False)

    model = build()
    owned = wrap(model, mesh)
    optimizer = dmuon.Muon(model, **HOW)
    model.order = [0, 2]
    with torch.no_grad():
        model(batch(0, 2)[0])  # leaves FSDP's parameters unsharded
    backward(model)
    found["fine, with some unused"] = outcome(optimizer.step)
    return found


@pytest.mark.case(row="P7")
def test_optimizers_that_were_built_too_early_say_so() -> None:
    for found in run_ranks(2, built_too_early):
        for key, needle in {
            "owned and wrapped": "has been owned since the optimizer was built",
            "parameters, owned since": "has been owned since the optimizer was built",
            "parameters of an owned model": "give the optimizer the whole model, dmuon.Muon(model)",
            "part of an owned model": "give the optimizer the whole model, dmuon.Muon(model)",
            "subclass": "'mixer.weight' is a Special, but only a plain nn.Parameter can be owned",
            "part owned again": "is owned already: call dmuon.own once, with the whole model",
            "wrapped alone": "is not in the model any more: it has been wrapped or replaced",
            "not ignored": "give fully_shard ignored_params=owned.params",
            "replaced": "'mixer.weight' is not in the model any more",
            "moved": "Build the optimizer last: after dmuon.own, fully_shard",
        }.items():
            assert needle in found[key], (key, found[key])
        assert found["fine, with some unused"] == ""


def killed_in_a_step(nodes: int) -> None:
    """The last rank is killed when one of its weights has moved. The others must get an error, in time."""
    model = build()
    wrap(model, mesh_of(nodes), timeout=TIMEOUT, reshard_after_forward=False)
    optimizer = dmuon.Muon(model, **HOW)
    run = optimizer._matrix_step.run

    def dying(updates: list[Update], **how: Any) -> Iterator[Tensor]:
        for master in run(updates, **how):
            yield master
            if dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    optimizer._matrix_step.run = dying
    start = time.monotonic()

    def train() -> None:
        for _ in range(3):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RuntimeError):
        train()
    assert time.monotonic() - start < 2 * TIMEOUT.total_seconds() + 5


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_killed_in_a_step_ends_the_others(nodes: int) -> None:
    with pytest.raises(AssertionError) as error:
        run_ranks(2 * nodes, killed_in_a_step, nodes, timeout=45)
    assert str(error.value) == f"rank {2 * nodes - 1}: died"


def fewer_steps() -> tuple[str, float]:
    """The second rank does not take the last step, but stays. What the first gets, and after how long."""
    model = build()
    wrap(model, mesh_of(), timeout=TIMEOUT)
    optimizer = dmuon.Muon(model, **HOW)
    backward(model)
    optimizer.step()
    backward(model)
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT.total_seconds() + 3)
        return "", 0.0
    start = time.monotonic()
    return outcome(optimizer.step), time.monotonic() - start


def test_another_number_of_steps_is_a_time_out() -> None:
    (error, seconds), _ = run_ranks(2, fewer_steps)
    assert "imed out" in error and seconds < TIMEOUT.total_seconds() + 2


def one_rank_fails() -> str:
    """A parameter is replaced on the second rank alone."""
    model = build()
    wrap(model, mesh_of(), reshard_after_forward=False)
    optimizer = dmuon.Muon(model, **HOW)
    backward(model)
    if dist.get_rank() == 1:
        model.blocks[0].up.weight = nn.Parameter(torch.ones(48, 16).double())
    return outcome(optimizer.step)


def test_what_one_rank_finds_at_a_step_all_raise() -> None:
    first, second = run_ranks(2, one_rank_fails)
    assert second.startswith("RuntimeError: owned parameter 'blocks.0.up.weight' has been replaced")
    assert first.startswith(f"RuntimeError: Muon.step failed on rank 1: {second}")
