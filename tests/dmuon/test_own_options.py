"""Ranks whose optimizers differ, or are wrong on one rank alone: all of them raise, and nothing has moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from own_models import HOW, batch, build, loss_of, mesh_of, wrap
from own_processes import outcome, run_ranks
from torch.optim.lr_scheduler import ReduceLROnPlateau

import dmuon


def shorten(optimizer: dmuon.Muon) -> None:
    group = optimizer.param_groups[0]
    group.update(params=group["params"][1:], param_names=group["param_names"][1:])


def plateau(optimizer: dmuon.Muon) -> None:
    schedule = ReduceLROnPlateau(optimizer, patience=0)
    schedule.step(1.0)
    schedule.step(2.0)


# What the second rank does before its step; what all ranks then say, and what the second.
WRONG: dict[str, tuple[Callable[[dmuon.Muon], Any], str, str]] = {
    "lr": (
        lambda o: o.param_groups[0].update(lr=0.5),
        "option lr of group 0: rank 0 has 0.05, rank 1 has 0.5. ",
        "",
    ),
    "lr of AdamW": (lambda o: o.param_groups[1].update(lr=0.5), "option lr of group 1: rank 0 has 0.01", ""),
    "plateau": (plateau, "option lr of group 0: rank 0 has 0.05, rank 1 has 0.005", ""),
    "variant": (
        lambda o: o.param_groups[0].update(cautious_decay=True),
        "option cautious_decay of group 0: rank 0 has False, rank 1 has True",
        "",
    ),
    "NorMuon": (
        lambda o: o.param_groups[0].update(normuon_beta2=0.5),
        "option normuon_beta2 of group 0: rank 0 has None, rank 1 has 0.5",
        "",
    ),
    "groups": (
        lambda o: o.param_groups.append({**o.param_groups[1], "params": [], "param_names": []}),
        "algorithms of the groups: rank 0 has nothing, rank 1 has adamw",
        "",
    ),
    "names": (
        lambda o: o.param_groups[0].update(
            params=o.param_groups[0]["params"][::-1], param_names=o.param_groups[0]["param_names"][::-1]
        ),
        "parameters of group 0: rank 0 has blocks.0.experts",
        "",
    ),
    "bad": (
        lambda o: o.param_groups[1].update(lr=-1.0),
        "Muon.step failed on rank 1: ValueError: lr must be at least 0 and finite, got -1.0",
        "ValueError: lr must be at least 0 and finite, got -1.0",
    ),
    "left out": (
        shorten,
        "Muon.step failed on rank 1: RuntimeError: owned parameter 'blocks.0.experts' is in no group of the optimizer",
        "RuntimeError: owned parameter 'blocks.0.experts' is in no group",
    ),
}


def differ() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    tokens, targets = batch(rank, 2)
    for clipped in (False, True):
        model = build(layers=1)
        owned = wrap(model, mesh_of())
        optimizer = dmuon.Muon(model, **HOW)
        for name, (change, _, _) in WRONG.items():
            optimizer.param_groups[:] = [dict(group) for group in dmuon.Muon(model, **HOW).param_groups]
            before = [p.detach().clone() for p in (*owned.masters.values(), model.head.weight.to_local())]
            loss_of(model(tokens), targets).backward()
            if clipped:
                dmuon.clip_grad_norm_(model, 1.0)
            if rank == 1:
                change(optimizer)
            error = outcome(optimizer.step)
            after = [*owned.masters.values(), model.head.weight.to_local()]
            found[name, clipped] = error, all(map(torch.equal, before, after))
            optimizer.param_groups[:] = [dict(group) for group in dmuon.Muon(model, **HOW).param_groups]
            optimizer.zero_grad()
    return found


def test_ranks_that_differ_all_raise_before_anything_moves() -> None:
    for rank, found in enumerate(run_ranks(2, differ)):
        assert len(found) == 2 * len(WRONG)
        for (name, clipped), (error, untouched) in found.items():
            everywhere, here = WRONG[name][1:]
            assert (here if rank == 1 and here else everywhere) in error, (name, clipped, rank, error)
            assert untouched, (name, clipped, rank)


def agree() -> list[str]:
    """Steps of ranks that differ in nothing that matters."""
    rank = dist.get_rank()
    model = build(layers=1)
    wrap(model, mesh_of())
    optimizer = dmuon.Muon(model, **{**HOW, "lr": torch.tensor(0.05)}, stochastic_rounding=True)
    random = torch.get_rng_state()
    found = []
    for change in (
        lambda: None,
        lambda: optimizer.param_groups[0].update(weight_decay=0 if rank else 0.0),
        lambda: optimizer.param_groups[0].update(lr=torch.tensor(0.05)),
        lambda: optimizer.param_groups[1].update(fused=bool(rank)),
        lambda: optimizer.param_groups[1].update(note=rank),
        lambda: leave_out(optimizer, model.mixer.weight.requires_grad_(False)),
    ):
        change()
        tokens, targets = batch(rank, 2)
        loss_of(model(tokens), targets).backward()
        found.append(outcome(optimizer.step))
        optimizer.zero_grad()
    # Nothing is in bf16: no seed is drawn.
    return [*found, "" if torch.equal(random, torch.get_rng_state()) else "drawn"]


def leave_out(optimizer: dmuon.Muon, frozen: torch.Tensor) -> None:
    group = optimizer.param_groups[0]
    kept = [k for k, p in enumerate(group["params"]) if p is not frozen]
    group.update(
        params=[group["params"][k] for k in kept], param_names=[group["param_names"][k] for k in kept]
    )


def test_what_makes_no_difference_may_differ() -> None:
    assert run_ranks(2, agree) == [[""] * 7] * 2
