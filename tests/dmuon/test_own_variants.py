"""NorMuon, cautious decay and stochastic rounding on owners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, Training, batch, build, difference, loss_of, mesh_of, train_each, wrap
from own_processes import outcome, run_ranks
from own_sessions import Session, reference, run, train, worst

import dmuon

VARIANTS: list[dict[str, Any]] = [
    {"normuon_beta2": 0.9, "cautious_decay": True},
    {"normuon_beta2": 0.9},
    {"cautious_decay": True},
]
BOTH = VARIANTS[0]


def check(ranks: int, trainings: list[Training]) -> None:
    for result in run_ranks(ranks, train_each, trainings, timeout=150):
        for training, found in zip(trainings, result, strict=True):
            assert max(found.values()) < 1e-12, (training, found)


def test_steps_equal_one_process() -> None:
    check(2, [Training(steps=3, how=VARIANTS[0], unused={1: {1}})])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_many_steps_equal_one_process(ranks: int) -> None:
    splits = dmuon.MatrixPolicy(splits={"*up.weight": (32, 16), "*experts": (3, 5)})
    trainings = [Training(steps=6, how=how, own={"reshard_after_forward": False}) for how in VARIANTS]
    check(ranks, [*trainings, Training(steps=6, nodes=2, how=BOTH, own={"policy": splits})])


def divide(optimizer: dmuon.Muon) -> None:
    """Give the first block's matrices options of their own."""
    group = optimizer.param_groups[0]
    named = dict(zip(group["param_names"], group["params"], strict=True))
    first = [(name, named.pop(name)) for name in list(named) if name.startswith("blocks.0.")]
    group.update(param_names=list(named), params=list(named.values()))
    optimizer.add_param_group({"params": first, **BOTH})


def in_groups() -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, reference = build(), build()
    owned = wrap(model, mesh_of())
    optimizer, alone = dmuon.Muon(model, **HOW), dmuon.Muon(reference, **HOW)
    divide(optimizer)
    divide(alone)
    train(model, optimizer, range(3), rank, ranks)
    train(reference, alone, range(3))
    return difference(model, owned, reference)


def test_some_matrices_have_it_in_a_group_of_their_own() -> None:
    assert max(run_ranks(2, in_groups)) < 1e-12


def check_sessions(path: Path, sessions: list[Session]) -> None:
    for session in sessions:
        session.how = BOTH
        found = run(path, session)
        assert worst(found, reference(session.stop, BOTH)) < 1e-12, session


@pytest.mark.case(row="A3")
@pytest.mark.case(row="A4")
def test_the_second_moment_is_resumed_on_other_ranks(tmp_path: Path) -> None:
    check_sessions(tmp_path, [Session(0, 2, 4), Session(2, 3, 0), Session(3, 4, 2, mirrored=True)])


@pytest.mark.slow
def test_torchs_own_functions_resume_it_too(tmp_path: Path) -> None:
    check_sessions(
        tmp_path / "nested", [Session(0, 2, 0, by="dcp"), Session(2, 3, 3, by="async"), Session(3, 4, 0)]
    )
    check_sessions(
        tmp_path / "flat", [Session(0, 2, 3, by="dcp", flat=True), Session(2, 3, 2, by="dcp", flat=True)]
    )


def adopt(folder: str) -> dict[str, Any]:
    """Load a checkpoint of Muon into NorMuon."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build()
    owned = wrap(model, mesh_of())
    optimizer = dmuon.Muon(model, **HOW, **BOTH)
    before = {name: master.detach().clone() for name, master in owned.masters.items()}
    error = outcome(lambda: dmuon.load_checkpoint(f"{folder}/2", model, optimizer))
    untouched = all(torch.equal(owned.masters[name], value) for name, value in before.items())
    dmuon.load_checkpoint(f"{folder}/2", model, optimizer, strict=False)
    states = [optimizer.state[parameter] for parameter in owned.masters_of]
    zero = not any(state["second_momentum_buffer"].any() for state in states)
    loaded = any(state["momentum_buffer"].any() for state in states)
    on = optimizer.param_groups[0]["normuon_beta2"]
    train(model, optimizer, range(2, 3), rank, ranks)
    return {"error": error, "untouched": untouched, "zero": zero, "loaded": loaded, "on": on}


def test_a_checkpoint_of_muon_is_refused_or_begins_from_zero(tmp_path: Path) -> None:
    run(tmp_path, Session(0, 2, 0))
    for result in run_ranks(2, adopt, str(tmp_path)):
        error = result.pop("error")
        assert error.startswith(
            "ValueError: the optimizer has NorMuon's second moment, the checkpoint has not: build"
        )
        assert result == {"untouched": True, "zero": True, "loaded": True, "on": 0.9}


def in_bf16(seeds: list[int], stochastic_rounding: bool) -> list[dict[str, Any]]:
    """A model in bf16 alone, masters too, owned unevenly; trained anew for each seed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = []
    for seed in seeds:
        model = build(dtype=torch.bfloat16)
        names = [routing.name for routing in dmuon.MatrixPolicy().route_model(model) if routing.matrices]
        owned = wrap(model, mesh_of(), plan={name: int(k == 0) for k, name in enumerate(names)})
        how = {**HOW, "precision": "fp32", "stochastic_rounding": stochastic_rounding}
        optimizer = dmuon.Muon(model, **how)
        torch.manual_seed(seed)
        for step in range(3):
            tokens, targets = batch(step, 2 * ranks)
            loss_of(
                model(tokens[2 * rank : 2 * rank + 2]).float(), targets[2 * rank : 2 * rank + 2]
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
        dmuon.check_consistency(model)
        dtypes = {m.dtype for m in owned.masters.values()} | {
            optimizer.state[p]["momentum_buffer"].dtype for p in owned.masters_of
        }
        results.append(
            {
                "masters": {name: master.detach().float().numpy() for name, master in owned.masters.items()},
                "dtypes": dtypes,
                "random": torch.get_rng_state().numpy().tobytes(),
            }
        )
    return results


def test_bf16_masters_are_rounded_by_their_owners() -> None:
    by_rank = run_ranks(2, in_bf16, [0, 0, 1], True)
    for first, again, other in by_rank:
        assert first["dtypes"] == {torch.bfloat16}
        for name, master in first["masters"].items():
            assert (master == again["masters"][name]).all()
            assert (master != other["masters"][name]).any()
    # What a rank owns does not change what it draws from torch's generator.
    assert [len(results[0]["masters"]) for results in by_rank] == [18, 1]
    assert by_rank[0][0]["random"] == by_rank[1][0]["random"] == by_rank[0][1]["random"]
