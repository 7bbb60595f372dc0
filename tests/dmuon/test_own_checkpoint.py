"""A training that is interrupted, and goes on elsewhere, equals one that was not, in fp64."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from own_models import HOW, build, mesh_of
from own_processes import run_ranks
from own_sessions import Session, reference, run, train, worst
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon

ZERO2 = {"reshard_after_forward": False}


def check(path: Path, sessions: list[Session]) -> None:
    for session in sessions:
        found = run(path, session)
        assert worst(found, reference(session.stop)) < 1e-12, session


@pytest.mark.case(row="A3")
@pytest.mark.case(row="A4")
def test_resumes_on_other_ranks_meshes_and_plans(tmp_path: Path) -> None:
    check(
        tmp_path,
        [
            Session(0, 2, 4),
            Session(2, 3, 4, nodes=2),
            Session(3, 4, 3, own=ZERO2, mirrored=True),
            Session(4, 5, 0),
            Session(5, 6, 2, meta=True),
        ],
    )


def test_torchs_own_functions_save_and_load_the_same(tmp_path: Path) -> None:
    check(
        tmp_path,
        [
            Session(0, 2, 0),
            Session(2, 3, 4, nodes=2, by="async"),
            Session(3, 4, 3, by="dcp", mirrored=True),
            Session(4, 5, 2),
        ],
    )


def test_flat_optimizer_states(tmp_path: Path) -> None:
    check(tmp_path, [Session(0, 2, 3, by="dcp", flat=True), Session(2, 3, 2, by="async", flat=True)])


def elsewhere(path: str) -> dict[str, Any]:
    """Loads into a model that FSDP alone shards, and goes on with DistributedDataParallel."""
    sharded = build(seed=7)
    fully_shard(sharded, mesh=mesh_of())
    dmuon.load_checkpoint(f"{path}/2", sharded)
    found = {"sharded": {name: value.numpy() for name, value in dmuon.full_state_dict(sharded).items()}}
    model = DistributedDataParallel(build(seed=7), find_unused_parameters=True)
    optimizer = dmuon.Muon(model, **HOW)
    dmuon.load_checkpoint(f"{path}/2", model, optimizer)
    train(model, optimizer, range(2, 3), dist.get_rank(), dist.get_world_size())
    dmuon.save_checkpoint(f"{path}/3", model, optimizer, extra={"step": 3})
    return found


def test_loads_where_nothing_is_owned(tmp_path: Path) -> None:
    run(tmp_path, Session(0, 2, 2))
    found = run_ranks(2, elsewhere, str(tmp_path))[0]
    trained = reference(2)
    assert worst(found["sharded"], {name: trained[name] for name in found["sharded"]}) < 1e-12
    plain = build(seed=7)
    weights = plain.state_dict()
    dcp.load({"model": weights}, checkpoint_id=tmp_path / "2")
    assert worst(weights, {name: trained[name] for name in weights}) < 1e-12
    check(tmp_path, [Session(3, 4, 3)])


def page(folder: str) -> None:
    os.chdir(folder)
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    torch.manual_seed(dist.get_rank())  # generators that differ by rank
    for block in blocks:
        exec(compile(block, "checkpoints.md", "exec"), names)
        if "set_rng_state" in block:
            states = names["states"]
            assert not torch.equal(states[0], states[1])
            assert torch.equal(torch.get_rng_state(), states[dist.get_rank()])
    assert names["start"] == 1 and len(states) == 2 and len(blocks) == 5


def test_the_page_runs(tmp_path: Path) -> None:
    run_ranks(2, page, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "ranks"), [("helpers", 1), ("helpers", 4), ("helpers", 8), ("dcp", 2), ("dcp", 8), ("async", 8)]
)
def test_resumes_everywhere(by: str, ranks: int, tmp_path: Path) -> None:
    check(tmp_path, [Session(0, 2, ranks, nodes=2 if ranks > 2 else 1, by=by)])
    for resumed in (
        Session(2, 3, 0, by=by),
        Session(3, 4, 6, nodes=3, by=by),
        Session(4, 5, 1, own=ZERO2, by=by),
    ):
        check(tmp_path, [resumed])


@pytest.mark.case(row="A5")
def test_a_learning_rate_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    """A number or a tensor, whatever the optimizer here was built with; so does load_state_dict."""
    rates = {"number": 0.05, "tensor": torch.tensor(0.05)}
    for name, rate in rates.items():
        model = build(seed=3)
        dmuon.save_checkpoint(tmp_path / name, model, dmuon.Muon(model, lr=rate))
        for other in (0.7, torch.tensor(0.7)):
            resumed = dmuon.Muon(model, lr=other)
            dmuon.load_checkpoint(tmp_path / name, model, resumed)
            found = resumed.param_groups[0]["lr"]
            assert float(found) == float(rate), (name, other)
