"""Tensor parallelism beside ownership: training equals one process in fp64, whatever the layout of a matrix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, batch, loss_of
from own_processes import outcome, run_ranks
from own_tensor_models import SPLIT, Training, build, mesh_of, parallelize, train_each, wrap
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import dmuon
from dmuon.ownership import tensor_step
from dmuon.ownership.tensor_parallel import shares

ZERO2 = {"reshard_after_forward": False}
SCENARIOS = {
    "zero3": Training(clip=0.5),
    "zero2, split": Training(own={**ZERO2, "policy": SPLIT}, muon={"adjust_lr": "spectral"}),
    "accumulation": Training(micro_batches=2, own=ZERO2, clip=0.5, muon={"nesterov": False}),
    "no FSDP": Training(sharded=False, clip=0.5, micro_batches=2),
    "accumulation without sync": Training(micro_batches=2, sync_all=False, muon={"cautious_decay": True}),
}


def check(ranks: int, trainings: dict[str, Training], timeout: float = 60.0) -> None:
    results = run_ranks(ranks, train_each, list(trainings.values()), timeout=timeout)
    worst = {name: max(max(result[k].values()) for result in results) for k, name in enumerate(trainings)}
    assert not {name: found for name, found in worst.items() if not found < 1e-12}


@pytest.mark.case(row="R14")
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_process(ranks: int) -> None:
    """On two ranks all data is one's."""
    names = (
        ["zero3", "no FSDP", "accumulation"] if ranks == 2 else ["zero2, split", "accumulation without sync"]
    )
    check(ranks, {name: SCENARIOS[name] for name in names})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "tensor", "replicas"), [(2, 2, 1), (4, 2, 1), (3, 3, 1), (4, 2, 2), (4, 1, 1)]
)
def test_any_mesh_equals_one_process(ranks: int, tensor: int, replicas: int) -> None:
    """With three tensor-parallel ranks, shards are uneven; with one, there is nobody to share with."""
    trainings = {
        name: Training(**{**vars(each), "tensor": tensor, "replicas": replicas})
        for name, each in SCENARIOS.items()
        if each.sharded
    }
    check(ranks, trainings, timeout=200)


@pytest.mark.slow
def test_hybrid_sharding_and_more_ranks_than_experts_equal_one_process() -> None:
    check(8, {"hsdp": Training(replicas=2, clip=0.5), "four": Training(tensor=4)}, timeout=200)


def small_waves() -> list[dict[str, float]]:
    tensor_step.BATCH_ELEMENTS = 300  # a job or two each
    return train_each([SCENARIOS["zero2, split"]])


def test_many_waves_equal_one_process() -> None:
    """Each gathers while the one before is orthogonalised."""
    for (found,) in run_ranks(2, small_waves):
        assert max(found.values()) < 1e-12


def replicas_and_bytes() -> dict[str, Any]:
    """A model of one matrix of each layout, after a step in which the ranks were given different weights and data."""
    rank, mesh = dist.get_rank(), mesh_of(2)
    torch.manual_seed(rank)
    model = nn.ModuleDict(
        {name: nn.Linear(8, 8, bias=False) for name in ("rows", "columns", "all", "plain")}
    ).double()
    for name, placement in {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}.items():
        weight = distribute_tensor(model[name].weight.detach(), mesh["tp"], [placement])
        model[name].weight = nn.Parameter(weight)
    owned = dmuon.own(model, mesh["shard"])
    optimizer = dmuon.Muon(model, **HOW)
    for master in owned.masters.values():
        gradient = torch.randn_like(master.to_local() if isinstance(master, DTensor) else master)
        master.grad = (
            DTensor.from_local(gradient, mesh["tp"], master.placements)
            if isinstance(master, DTensor)
            else gradient
        )
    owned.statistics.reset()
    optimizer.step()
    exchanges = owned.statistics.as_dict()["exchanges"]
    everywhere = {
        "all": owned.masters["all.weight"].to_local().detach().clone().numpy(),
        "plain": owned.masters["plain.weight"].detach().clone().numpy(),
    }
    dmuon.check_consistency(model)
    if rank == 1:
        with torch.no_grad():
            owned.masters["plain.weight"].add_(1)
    owned.refresh()
    return {
        **everywhere,
        "apart": outcome(lambda: dmuon.check_consistency(model)),
        "bytes": {e["kind"]: e["bytes"] for e in exchanges if e["level"] == "tensor"},
    }


def test_what_every_rank_has_stays_equal_and_little_travels() -> None:
    first, second = run_ranks(2, replicas_and_bytes)
    assert (first["all"] == second["all"]).all() and (first["plain"] == second["plain"]).all()
    for found in (first, second):
        assert "the owners of 'plain.weight', the ranks [0, 1], hold different weights" in found["apart"]
    # Two sharded matrices and two whole ones, of 64 elements: half of a sharded one travels to and fro,
    # and of a whole one all of the result.
    gathered, scattered = (first["bytes"][kind] + second["bytes"][kind] for kind in ("gather", "scatter"))
    assert gathered == 2 * 32 * 8
    assert scattered == (2 * 32 + 2 * 64) * 8


def absences() -> dict[str, str]:
    model, mesh = build(), mesh_of(2)
    owned = wrap(model, mesh)
    weight = model.blocks[0].q.weight
    found = {
        "read": outcome(lambda: weight.sum()),
        "local": outcome(lambda: weight.to_local()),
        "whole": outcome(lambda: weight.detach().full_tensor()),
        "shape": f"{tuple(weight.shape)} {weight.placements} {isinstance(weight, nn.Parameter)}",
        "summary": owned.describe(),
    }
    tokens, targets = batch(0, 2)
    loss_of(model(tokens), targets).backward()
    optimizer = dmuon.Muon(model, **HOW)
    before = {
        name: master.full_tensor() for name, master in owned.masters.items() if isinstance(master, DTensor)
    }
    model.blocks[0].q.weight = nn.Parameter(torch.ones(16, 16))
    found["replaced"] = outcome(optimizer.step)
    changed = [name for name in before if not (owned.masters[name].full_tensor() == before[name]).all()]
    return found | {"changed": str(changed), "half": outcome(model.half)}


def test_absent_shards_cannot_be_read() -> None:
    for found in run_ranks(2, absences):
        for key in ("read", "local", "whole"):
            assert "the values of 'blocks.0.q.weight' are not here" in found[key]
        assert "cannot be converted or moved" in found["half"]
        assert found["shape"] == "(16, 16) (Shard(dim=0),) True"
        assert "on 1 rank of 2 tensor-parallel ones each" in found["summary"]
        assert "'blocks.0.q.weight' has been replaced" in found["replaced"] and found["changed"] == "[]"


def misuses() -> dict[str, str]:
    mesh = mesh_of(2)
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "data"))
    skewed = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("one", "other"))

    def divided(weight: Any = None) -> Any:
        """With a mixer of this ``weight``, if any."""
        model = build()
        parallelize(model, mesh["tp"])
        if weight is not None:
            model.mixer.weight = nn.Parameter(weight)
        return model

    ones, rows = torch.ones(16, 16).double(), 4 + 8 * mesh["tp"].get_local_rank()
    uneven = DTensor.from_local(
        ones[:rows], mesh["tp"], [Shard(0)], run_check=False, shape=torch.Size((16, 16)), stride=(16, 1)
    )
    partial = DTensor.from_local(ones, mesh["tp"], [Partial()], run_check=False)
    with torch.device("meta"):
        empty = build()
    parallelize(empty, mesh["tp"])
    fine, unwrapped = build(), divided()
    wrap(fine, mesh)
    dmuon.own(unwrapped, mesh["shard"])

    def own(model: Any, on: DeviceMesh) -> str:
        return outcome(lambda: dmuon.own(model, on))

    return {
        "whole mesh": own(divided(), mesh),
        "tensor mesh": own(divided(), mesh["tp"]),
        "before": own(build(), mesh["shard"]),
        "two meshes": own(divided(distribute_tensor(ones, turned["data"], [Shard(0)])), mesh["shard"]),
        "fsdp": own(divided(distribute_tensor(ones, mesh["shard"], [Shard(0)])), mesh["shard"]),
        "uneven": own(divided(uneven), mesh["shard"]),
        "partial": own(divided(partial), mesh["shard"]),
        "meta": own(empty, mesh["shard"]),
        "skewed": own(divided(), skewed["other"]),
        "muon alone": outcome(lambda: dmuon.Muon(divided())),
        "no fsdp": outcome(lambda: dmuon.Muon(unwrapped, **HOW)),
        "normuon": outcome(lambda: dmuon.Muon(fine, normuon_beta2=0.9)),
        "rounding": outcome(lambda: dmuon.Muon(fine, stochastic_rounding=True)),
        "hooks": outcome(lambda: dmuon.Muon(fine, **HOW).register_update_hook(print)),
        "measure": outcome(lambda: dmuon.measure_network(mesh["shard"])),
    }


def test_misuse_is_named_on_all_ranks() -> None:
    for found in run_ranks(4, misuses):
        for key, needle in {
            "whole mesh": "sharded already: call dmuon.own before fully_shard, and with a mesh of the data-parallel",
            "tensor mesh": "sharded already",
            "before": "parallelize_module comes before dmuon.own",
            "two meshes": "are sharded over two meshes",
            "fsdp": "'mixer.weight' is sharded already",
            "uneven": "'mixer.weight' has a shard of",
            "partial": "placed as",
            "meta": "is on the meta device: give a tensor-parallel model its values before dmuon.own",
            "skewed": "must span a grid of all ranks",
            "muon alone": "(where it is tensor-parallel, after parallelize_module)",
            "no fsdp": "call fully_shard(module, mesh=mesh, ignored_params=owned.params)",
            "normuon": "normuon_beta2=0.9 is not to be had with tensor parallelism",
            "rounding": "stochastic_rounding=True is not to be had with tensor parallelism",
            "hooks": "update hooks are not to be had with tensor parallelism",
            "measure": "mesh must hold all 4 ranks, got 2",
        }.items():
            assert needle in found[key], (key, found[key])


@pytest.mark.parametrize(("length", "ranks"), [(0, 2), (1, 4), (5, 2), (5, 4), (6, 4), (49, 2), (64, 8)])
def test_shares_are_those_of_chunk(length: int, ranks: int) -> None:
    expected = [len(chunk) for chunk in torch.arange(length).chunk(ranks) if length]
    found = shares(length, ranks)
    assert [stop - start for start, stop in found] == expected + [0] * (ranks - len(expected))
    assert [start for start, _ in found[1:]] == [stop for _, stop in found[:-1]] and found[-1][1] == length


def follow_the_guide() -> float:
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"## Tensor parallel\n.*?```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"device": "cpu"}
    exec("import dmuon\nimport torch.distributed as dist\nfrom torch import nn", names)
    exec("from torch.distributed.device_mesh import init_device_mesh", names)
    exec("from torch.distributed.fsdp import fully_shard", names)
    torch.manual_seed(0)
    exec(code, names)
    losses = []
    for _ in range(3):
        losses.append(names["model"](torch.ones(4, 64)).square().mean())
        losses[-1].backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    return losses[-1].item() / losses[0].item()


def test_the_guide_learns() -> None:
    assert max(run_ranks(4, follow_the_guide)) < 0.9
