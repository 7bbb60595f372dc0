"""Sessions of one training: each loads what the one before has saved, trains on, and saves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from own_models import HOW, batch, build, loss_of, mesh_of, wrap
from own_processes import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import dmuon

ROWS = 24
# The experts of the second block never see a token.
EXPERTS = (True, False, True)


@dataclass
class Session:
    """From step ``start`` to ``stop`` on ``ranks`` processes; 0 for a single process without ownership."""

    start: int
    stop: int
    ranks: int
    nodes: int = 1
    own: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)  # options of the optimizer
    # By which functions: dmuon's "helpers", torch's "dcp", or its "async" saving; and with flat optimizer states.
    by: str = "helpers"
    flat: bool = False
    # The owners by a plan that is the greedy one's mirror image.
    mirrored: bool = False
    # Built on the meta device: the checkpoint alone gives it values.
    meta: bool = False


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, ranks: int = 1
) -> None:
    for step in steps:
        tokens, targets = batch(step, ROWS)
        part = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
        loss_of(model(tokens[part], EXPERTS), targets[part]).backward()
        optimizer.step()
        optimizer.zero_grad()


def run(path: Path, session: Session) -> dict[str, Tensor]:
    """The whole weights after the session, and the whole momenta under ``state.`` (NorMuon's under ``second.``).

    Its checkpoint is path/stop.
    """
    if session.ranks:
        return dict(run_ranks(session.ranks, _session, str(path), session)[0])
    return _session(str(path), session)


def reference(stop: int, how: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """The same from a single process that was never interrupted."""
    model = build()
    optimizer = dmuon.Muon(model, **{**HOW, **(how or {})})
    train(model, optimizer, range(stop))
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    named = zip(optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["params"], strict=True)
    for name, parameter in named:
        state = optimizer.state.get(parameter, {})
        found[f"state.{name}"] = state.get("momentum_buffer", torch.zeros_like(parameter.detach()))
        if how and "normuon_beta2" in how:
            found[f"second.{name}"] = state.get("second_momentum_buffer", torch.zeros(()))
    return found


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max((torch.as_tensor(found[name]) - expected[name]).abs().max().item() for name in expected)


def _session(path: str, session: Session) -> dict[str, Any]:
    # Other weights than the training began with, lest loading nothing go unseen.
    with torch.device("meta" if session.meta else "cpu"):
        model = build(seed=0 if session.start == 0 else 7)
    if session.ranks:
        if session.mirrored:
            names = [name for name, p in model.named_parameters() if _is_owned(name)]
            owners = {name: k % session.ranks for k, name in enumerate(reversed(names))}
            session.own["plan"] = owners
        wrap(model, mesh_of(session.nodes), **session.own)
    if session.meta:
        model.to_empty(device="cpu")
    how = {**HOW, **session.how, "lr": HOW["lr"] if session.start == 0 else 0.7}
    optimizer = dmuon.Muon(model, **how)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if session.ranks else (0, 1)
    if session.start:
        _load(f"{path}/{session.start}", model, optimizer, session)
    train(model, optimizer, range(session.start, session.stop), rank, ranks)
    pending = _save(f"{path}/{session.stop}", model, optimizer, session)
    if pending is not None:
        # What is saved is what was there, whatever comes after.
        train(model, optimizer, range(50, 52), rank, ranks)
        pending.result()
        _load(f"{path}/{session.stop}", model, optimizer, session)
    found = {name: value.numpy() for name, value in dmuon.full_state_dict(model).items()}
    return found | _momenta(optimizer, session)


def _load(path: str, model: nn.Module, optimizer: dmuon.Muon, session: Session) -> None:
    if session.by == "helpers":
        extra = dmuon.load_checkpoint(path, model, optimizer)
        assert extra in ({"step": session.start}, {})  # torch's functions save none
        return
    options = StateDictOptions(flatten_optimizer_state_dict=session.flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)


def _save(path: str, model: nn.Module, optimizer: dmuon.Muon, session: Session) -> Any:
    if session.by == "helpers":
        dmuon.save_checkpoint(path, model, optimizer, extra={"step": session.stop})
        return None
    options = StateDictOptions(flatten_optimizer_state_dict=session.flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    saved = {"model": weights, "optimizer": state}
    if session.by == "async":
        # Not the group of the training, which goes on meanwhile.
        group = dist.new_group(backend="gloo") if session.ranks else None
        return dcp.async_save(saved, checkpoint_id=path, process_group=group)
    dcp.save(saved, checkpoint_id=path)
    return None


def _momenta(optimizer: dmuon.Muon, session: Session) -> dict[str, Any]:
    """Of all ranks."""
    group = optimizer.param_groups[0]
    kinds = {"momentum_buffer": "state", "second_momentum_buffer": "second"}
    mine = {
        f"{kinds[key]}.{name}": value.numpy()
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    if not session.ranks:
        return mine
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {name: value for each in every for name, value in each.items()}


def _is_owned(name: str) -> bool:
    return name.endswith(
        (".experts", "q.weight", "k.weight", "v.weight", "up.weight", "down.weight", "mixer.weight")
    )
