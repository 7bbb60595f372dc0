"""The plan of an owned model: one for all ranks, kept in a file, made anew for other ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from own_models import HOW, batch, build, difference, loss_of, mesh_of, wrap
from own_processes import outcome, run_ranks

import dmuon
from dmuon import matrix_step
from dmuon.autotune import Cost
from dmuon.batching import Piece, Update, batches
from dmuon.ownership import planning
from dmuon.ownership.control import Control
from dmuon.planner import Plan
from dmuon.tuning_cache import Store


class Timings:
    """What another rank has measured: the more of the rank's own number in it, the dearer."""

    def __init__(self, store: Store, *_: Any) -> None:
        self.rank = dist.get_rank()

    def cost(self, rows: int, cols: int, batch: int) -> Cost:
        return Cost(batch * (1 + (rows if self.rank else cols)), "measured")


def plans_by_different_timings(folder: str) -> dict[str, Any]:
    """Each rank has timings and a store of its own; then a rank that gets another plan, and one that cannot plan."""
    rank, first = dist.get_rank(), {}
    planning.StepCosts = Timings  # type: ignore[misc, assignment]
    os.environ["DMUON_CACHE"] = f"{folder}/{rank}.db"
    first["plan"] = dmuon.own(build(), mesh_of()).plan
    # Found in the store of one rank, made on another.
    first["again"] = dmuon.own(build(), mesh_of()).plan

    from_first, make_plan = Control.from_first, planning.make_plan

    def other(self: Control, value: Any) -> Any:
        plan = from_first(self, value)
        if not isinstance(plan, Plan) or rank == 0:
            return plan
        swapped = {name: ((owner + 1) % 2,) for name, (owner,) in plan.owners.items()}
        return replace(plan, owners=swapped, batches=plan.batches[::-1])

    Control.from_first = other  # type: ignore[method-assign]
    first["mismatch"] = outcome(lambda: dmuon.own(build(), mesh_of()))
    Control.from_first = from_first  # type: ignore[method-assign]
    planning.make_plan = lambda *given, **how: make_plan(*given, **how, memory_bytes=1)
    first["failure"] = outcome(lambda: dmuon.own(build(), mesh_of()))
    return first


@pytest.mark.case(row="R8")
def test_ranks_with_different_timings_make_one_plan(tmp_path: Path) -> None:
    (first, second) = run_ranks(2, plans_by_different_timings, str(tmp_path))
    assert first["plan"] == second["plan"] == first["again"] == second["again"]
    # By the first rank's timings: what they say it takes.
    costs = {batch.rows: batch.ms / batch.count for rank in first["plan"].batches for batch in rank}
    assert costs[48] == 17
    assert first["mismatch"] == second["mismatch"]
    assert "ranks disagree on the plan" in first["mismatch"]
    assert first["failure"].startswith("ValueError: memory_bytes: ")
    assert second["failure"] == f"RuntimeError: dmuon.own failed on rank 0: {first['failure']}"


def batches_run() -> dict[str, Any]:
    """What a rank's step puts together, in its order, and what the plan says."""
    model = build()
    owned = wrap(model, mesh_of())
    optimizer = dmuon.Muon(model, **HOW)
    tokens, targets = batch(0, 4)
    loss_of(model(tokens), targets).backward()
    names = {id(master): name for name, master in owned.masters.items()}
    run = []

    def recorded(updates: Sequence[Update]) -> Iterator[list[Piece]]:
        for pieces in batches(updates):
            shape = pieces[0].update.matrix.rows, pieces[0].update.matrix.cols
            run.append((tuple((names[id(each.update.parameter)], each.count) for each in pieces), *shape))
            yield pieces

    matrix_step.batches = recorded  # type: ignore[assignment]
    optimizer.step()
    planned = owned.plan.batches[dist.get_rank()]
    return {"run": run, "planned": [(each.pieces, each.rows, each.cols) for each in planned]}


def test_ranks_run_the_batches_that_the_plan_says() -> None:
    for rank in run_ranks(2, batches_run):
        assert len(rank["run"]) > 1
        assert rank["run"] == rank["planned"]


ROWS = 12
"""Of each step, whatever the ranks."""


def resumed(folder: str, start: int, stop: int) -> dict[str, Any]:
    """Steps ``start`` to ``stop``, from the last checkpoint and with the plan in a file beside it."""
    path, ranks = Path(folder), dist.get_world_size()
    model = build()
    owned = wrap(model, mesh_of(), plan=path / "plan.json")
    optimizer = dmuon.Muon(model, **HOW)
    if start:
        dmuon.load_checkpoint(path / "last", model, optimizer)
    share = ROWS // ranks
    for step in range(start, stop):
        tokens, targets = batch(step, ROWS)
        mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        loss_of(model(tokens[mine]), targets[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
    dmuon.save_checkpoint(path / "last", model, optimizer)
    reference = build()
    alone = dmuon.Muon(reference, **HOW)
    for step in range(stop):
        tokens, targets = batch(step, ROWS)
        loss_of(reference(tokens), targets).backward()
        alone.step()
        alone.zero_grad()
    return {"plan": owned.plan, "difference": difference(model, owned, reference)}


@pytest.mark.case(row="A3")
def test_a_run_resumed_on_other_ranks_is_planned_anew(tmp_path: Path) -> None:
    plans = []
    for ranks, start, stop in ((2, 0, 2), (2, 2, 3), (3, 3, 4)):
        results = run_ranks(ranks, resumed, str(tmp_path), start, stop)
        assert max(result["difference"] for result in results) < 1e-12
        assert all(result["plan"] == results[0]["plan"] for result in results)
        plans.append(results[0]["plan"])
        assert Plan.load(tmp_path / "plan.json") == plans[-1]
    assert plans[0] == plans[1]
    assert [plan.ranks for plan in plans] == [2, 2, 3]
    assert plans[2].notes[-1] == f"planned anew: {tmp_path / 'plan.json'} was for 2 ranks"


def bad_files(folder: str) -> dict[str, str]:
    text = Path(folder, "text")
    if dist.get_rank() == 0:
        text.write_text("no plan\n")
    dist.barrier()
    return {
        "text": outcome(lambda: dmuon.own(build(), mesh_of(), plan=text)),
        "missing folder": outcome(lambda: dmuon.own(build(), mesh_of(), plan=f"{folder}/none/plan.json")),
        "two files": outcome(lambda: dmuon.own(build(), mesh_of(), plan=f"{folder}/{dist.get_rank()}")),
    }


def test_a_file_that_is_no_plan_is_left_alone(tmp_path: Path) -> None:
    first, second = run_ranks(2, bad_files, str(tmp_path))
    assert first["text"].startswith(f"ValueError: {tmp_path / 'text'}: not a plan")
    assert second["text"] == f"RuntimeError: dmuon.own failed on rank 0: {first['text']}"
    assert (tmp_path / "text").read_text() == "no plan\n"
    assert first["missing folder"].startswith("FileNotFoundError")
    assert first["two files"] == second["two files"]
    assert "ranks disagree on the plan" in first["two files"]
    assert f"rank 1 has {tmp_path / '1'}" in first["two files"]
