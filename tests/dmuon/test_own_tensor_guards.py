"""What tensor-parallel ownership would lose or not notice is refused, on all ranks; the rest is carried over."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, batch, loss_of
from own_processes import outcome, run_ranks
from own_tensor_models import build, mesh_of, parallelize, wrap
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import dmuon

ZERO2 = {"reshard_after_forward": False}


def refusals() -> dict[str, str]:
    """What ``own`` says on each rank of a model that it cannot take over, by what was done on the last one alone."""
    mesh, last = mesh_of(2), dist.get_rank() == dist.get_world_size() - 1
    found = {}
    kept: list[Any] = []

    def hook(weight: Tensor) -> None:
        weight.register_hook(lambda gradient: gradient * 0)

    def hook_after(weight: Any) -> None:
        weight.register_post_accumulate_grad_hook(lambda _: None)

    troubles: dict[str, Callable[[Any], Any]] = {
        "hook": hook,
        "hook after": hook_after,
        "weak": weakref.ref,
        "view": lambda weight: weight.view_as(weight),
    }
    for name, trouble in troubles.items():
        model = build()
        parallelize(model, mesh["tp"])
        if last:
            kept.append(trouble(model.blocks[1].q.weight))
        before = {
            key: value.full_tensor() for key, value in model.named_parameters() if isinstance(value, DTensor)
        }
        found[name] = outcome(lambda model=model: dmuon.own(model, mesh["shard"]))
        kept.clear()
        changed = [
            key
            for key, value in before.items()
            if not (model.get_parameter(key).full_tensor() == value).all()
        ]
        found[name] += f"; changed {changed}"
        # Nothing is left of the attempt: without the trouble it is owned.
        if name in ("weak", "view"):
            found[name] += outcome(lambda model=model: dmuon.own(model, mesh["shard"]))
    model = build()
    if dist.get_rank() >= mesh["tp"].size():
        parallelize(model, mesh["tp"])
    found["not parallelized"] = outcome(lambda: dmuon.own(model, mesh["shard"]))
    return found


def test_what_own_would_lose_is_refused_on_all_ranks() -> None:
    for found in run_ranks(4, refusals):
        for name in ("hook", "hook after"):
            assert "'blocks.1.q.weight' has gradient hooks" in found[name]
            assert found[name].endswith("register them after dmuon.own; changed []")
        for name in ("weak", "view"):
            assert "'blocks.1.q.weight' is still referred to" in found[name]
            assert found[name].endswith("; changed []")
        assert "parallelize_module comes before dmuon.own" in found["not parallelized"]


def left_alone() -> str:
    """The last rank calls ``own`` of a model that it has not divided, and the others never do."""
    model, mesh = build(), mesh_of(2)
    if dist.get_rank() == 0:
        return ""
    return outcome(lambda: dmuon.own(model, mesh["shard"], timeout=timedelta(seconds=1)))


def test_a_rank_that_nobody_joins_says_what_is_wrong_with_it() -> None:
    assert "parallelize_module comes before dmuon.own" in run_ranks(2, left_alone)[1]


def writes() -> dict[str, str]:
    found = {}
    for name, write in {
        "mul_": lambda w: w.mul_(2),
        "copy_": lambda w: w.copy_(w * 2),
        "init": nn.init.ones_,
    }.items():
        model = build()
        wrap(model, mesh_of(2), **ZERO2)
        optimizer = dmuon.Muon(model, **HOW)
        tokens, targets = batch(0, 2)
        loss_of(model(tokens), targets).backward()
        with torch.no_grad():
            write(model.blocks[0].q.weight)
        found[name] = outcome(optimizer.step)
    found["second moment"] = outcome(lambda: dmuon.Muon(model, normuon_beta2=0.0))
    return found


@pytest.mark.parametrize("debug", ["0", "1"])
def test_writing_to_a_published_shard_is_noticed(debug: str) -> None:
    for found in run_ranks(2, _debugging, debug):
        second_moment = found.pop("second moment")
        assert "normuon_beta2=0.0 is not to be had with tensor parallelism" in second_moment
        for text in found.values():
            assert "owned parameter 'blocks.0.q.weight' was written to" in text


def _debugging(debug: str) -> dict[str, str]:
    os.environ["DMUON_DEBUG"] = debug
    return writes()


def whole_state_dicts() -> dict[str, Any]:
    mesh = mesh_of(2)
    model = build(1)
    wrap(model, mesh, sharded=False)  # torch fails to divide uneven biases over both axes
    state = build().state_dict()
    full = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, dict(state), options=full)
    loaded = [dmuon.full_state_dict(model)]
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    others = dict(state) if dist.get_rank() == 0 else {}
    refused = outcome(lambda: set_model_state_dict(model, others, options=sent))
    return {
        "equal": all((loaded[0][name] == state[name]).all() for name in loaded[0]),
        "names": len(loaded[0]) in (0, len(state)),
        "broadcast": refused,
    }


def test_torch_loads_whole_state_dicts_on_every_rank() -> None:
    for found in run_ranks(4, whole_state_dicts):
        assert found["equal"] and found["names"]
        assert "have them on every rank and leave out broadcast_from_rank0" in found["broadcast"]


def partial_gradient() -> tuple[float, float]:
    """Of a matrix that every rank has whole, each with a gradient from rows of its own: the sum's error and size."""
    mesh = mesh_of(2)
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    weight, rows = layer.weight.detach().clone(), torch.randn(16, 64).bfloat16()
    model = nn.Sequential(layer)
    layer.weight = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Replicate()]))
    distribute_module(layer, mesh["tp"], input_fn=_enter, output_fn=lambda _, output, __: output.to_local())
    owned = dmuon.own(model, mesh["shard"], compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model(rows).float().square().sum().backward()
    owned.finish("test")
    expected = torch.zeros(64, 64)
    for part in rows.chunk(2):
        alone = weight.bfloat16().requires_grad_()
        nn.functional.linear(part, alone).float().square().sum().backward()
        expected += alone.grad
    found = owned.masters["0.weight"].grad.full_tensor()
    return (found - expected).abs().max().item(), expected.abs().max().item()


def _enter(module: nn.Module, args: Any, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(args[0], mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(0)])


def test_parts_of_a_gradient_are_added_up_in_the_dtype_of_the_reduction() -> None:
    for error, size in run_ranks(2, partial_gradient):
        assert error < 1e-6 * size
