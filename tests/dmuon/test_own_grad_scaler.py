"""Loss scaling of owned models, on several ranks against torch's scaler in one process."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, batch, build, difference, loss_of, mesh_of, wrap
from own_processes import outcome, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import dmuon


@dataclass
class Scaling:
    """``spoiled``: the kind of parameter that gets one Inf, or NaN, in the second step, on the last rank alone."""

    spoiled: str = "owned"
    value: float = float("inf")
    unscale: bool = False
    clip: bool = False
    nodes: int = 1
    micro_batches: int = 1

    @property
    def name(self) -> str:
        return {"owned": "blocks.1.up.weight", "sharded": "head.weight"}[self.spoiled]


def train(scaling: Scaling) -> dict[str, Any]:
    """Four steps beside one process on all rows, whose gradients are spoiled alike."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build()
    reference = copy.deepcopy(model)
    owned = wrap(model, mesh_of(scaling.nodes))
    optimizer, alone = dmuon.Muon(model, **HOW), dmuon.Muon(reference, **HOW)
    options = {"init_scale": 1024.0, "growth_interval": 2}
    scaler, theirs = dmuon.GradScaler("cpu", **options), torch.amp.GradScaler("cpu", **options)
    parameter, scales, apart = model.get_parameter(scaling.name), [], []
    for step in range(4):
        spoil = step == 1 and rank == ranks - 1
        for micro in range(scaling.micro_batches):
            tokens, targets = batch(10 * step + micro, 2 * ranks)
            mine = slice(2 * rank, 2 * rank + 2)
            hook = None
            if spoil and scaling.spoiled == "owned":
                hook = parameter.register_hook(lambda gradient: _spoil(gradient, scaling.value))
            scaler.scale(loss_of(model(tokens[mine]), targets[mine])).backward()
            if hook is not None:
                hook.remove()
            theirs.scale(loss_of(reference(tokens), targets)).backward()
        if spoil and scaling.spoiled == "sharded":
            _spoil(model.get_parameter(scaling.name).grad.to_local(), scaling.value)
        if step == 1:
            _spoil(reference.get_parameter(scaling.name).grad, scaling.value)
        if scaling.unscale:
            scaler.unscale_(optimizer)
            theirs.unscale_(alone)
        if scaling.clip:
            norm = dmuon.clip_grad_norm_(model, 0.1)
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            apart.append(0.0 if step == 1 else abs((norm - expected).item()))
        scaler.step(optimizer)
        theirs.step(alone)
        scaler.update()
        theirs.update()
        optimizer.zero_grad()
        alone.zero_grad()
        scales.append((scaler.get_scale(), theirs.get_scale()))
        apart.append(difference(model, owned, reference))
    moments = [value.abs().max().item() for state in optimizer.state.values() for value in state.values()]
    return {"scales": scales, "apart": max(apart), "finite": all(m < 1e6 for m in moments)}


def _spoil(gradient: Tensor, value: float) -> Tensor:
    with torch.no_grad():
        gradient.view(-1)[0] = value
    return gradient


def train_each(scalings: list[Scaling]) -> list[dict[str, Any]]:
    return [train(scaling) for scaling in scalings]


SCALINGS = [
    Scaling(),
    Scaling(spoiled="sharded"),
    Scaling(value=float("nan"), unscale=True),
    Scaling(unscale=True, clip=True, micro_batches=2),
    Scaling(spoiled="sharded", unscale=True, clip=True),
]


def check(scalings: list[Scaling], ranks: int) -> None:
    for found in run_ranks(ranks, train_each, scalings):
        for scaling, one in zip(scalings, found, strict=True):
            # Grown after the first two steps but for the Inf, then after two good ones.
            assert [ours for ours, _ in one["scales"]] == [1024.0, 512.0, 512.0, 1024.0], scaling
            assert [theirs for _, theirs in one["scales"]] == [ours for ours, _ in one["scales"]]
            assert one["apart"] < 1e-10 and one["finite"], (scaling, one)


@pytest.mark.case(row="N5")
def test_one_rank_that_overflows_makes_all_skip_and_lower_the_scale() -> None:
    check(SCALINGS, 2)


@pytest.mark.case(row="N5")
def test_replicas_skip_together() -> None:
    check([Scaling(nodes=2), Scaling(nodes=2, spoiled="sharded", unscale=True)], 4)


def unusual() -> dict[str, Any]:
    """A parameter that is neither owned nor sharded; misuse; another optimizer; switched off; pickled."""
    found: dict[str, Any] = {}
    rank = dist.get_rank()
    model = build(dtype=torch.float32)
    owned = dmuon.own(model, mesh_of())
    plain = model.scales.weight
    fully_shard(model, mesh=mesh_of(), ignored_params={*owned.params, plain})
    optimizer, scaler = dmuon.Muon(model), dmuon.GradScaler("cpu", init_scale=8.0)
    tokens, targets = batch(0, 2)

    def backward(scaler: torch.amp.GradScaler) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model(tokens), targets)).backward()

    backward(scaler)
    if rank == 0:
        _spoil(plain.grad, float("inf"))
    scaler.step(optimizer)
    scaler.update()
    found["plain"] = scaler.get_scale(), optimizer.state[plain]["step"].item()
    backward(scaler)
    scaler.unscale_(optimizer)
    found["twice"] = outcome(lambda: scaler.unscale_(optimizer))
    scaler.step(optimizer)
    scaler.update()
    backward(scaler)
    found["no scale"] = outcome(lambda: dmuon.GradScaler("cpu").step(optimizer))
    found["pickled"] = pickle.loads(pickle.dumps(scaler)).get_scale()
    off = dmuon.GradScaler("cpu", enabled=False)
    backward(off)
    off.unscale_(optimizer)
    before = {name: master.detach().clone() for name, master in owned.masters.items()}
    off.step(optimizer)
    off.update()
    found["off"] = all(not torch.equal(master, before[name]) for name, master in owned.masters.items())
    return found


def test_what_is_unusual() -> None:
    for found in run_ranks(2, unusual):
        assert found["plain"] == (4.0, 0)
        assert "already been called" in found["twice"]
        assert "scaler.scale" in found["no scale"]
        assert found["pickled"] == 4.0
        assert found["off"]


def disagreeing() -> dict[str, tuple[str, bool]]:
    """What each way to differ is told, and whether the weights stayed as they were."""
    rank = dist.get_rank()
    model = build(dtype=torch.float32)
    owned = wrap(model, mesh_of())
    optimizer = dmuon.Muon(model, lr=0.1)
    tokens, targets = batch(0, 2)

    def attempt(scaler: torch.amp.GradScaler, unscale: bool = False, clip: bool = False) -> tuple[str, bool]:
        before = {name: master.detach().clone() for name, master in owned.masters.items()}
        optimizer.zero_grad()
        scaler.scale(loss_of(model(tokens), targets)).backward()
        told = outcome(lambda: scaler.unscale_(optimizer)) if unscale else ""
        told = told or (outcome(lambda: dmuon.clip_grad_norm_(model, 1.0)) if clip else "")
        told = told or outcome(lambda: scaler.step(optimizer))
        return told, all(torch.equal(master, before[name]) for name, master in owned.masters.items())

    found = {"init": attempt(dmuon.GradScaler("cpu", init_scale=(64.0, 1024.0)[rank]))}
    found["unscale"] = attempt(dmuon.GradScaler("cpu", growth_factor=(2.0, 3.0)[rank]), unscale=True)
    found["enabled"] = attempt(dmuon.GradScaler("cpu", enabled=rank == 0))
    found["enabled, unscale"] = attempt(dmuon.GradScaler("cpu", enabled=rank == 1), unscale=True)
    found["clipped"] = attempt(dmuon.GradScaler("cpu", enabled=rank == 0), unscale=True, clip=rank == 1)
    found["one clips"] = attempt(dmuon.GradScaler("cpu", enabled=False), clip=rank == 0)
    scaler = dmuon.GradScaler("cpu", init_scale=8.0)
    found["equal"] = attempt(scaler)
    scaler.update(8.0 if rank else 16.0)
    found["update"] = attempt(scaler)
    scaler.update(8.0)
    if rank:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
    found["loaded"] = attempt(scaler, unscale=True)
    scaler.update(8.0)
    found["equal again"] = attempt(scaler)
    return found


@pytest.mark.case(row="N5")
def test_ranks_whose_scalers_differ_all_raise() -> None:
    for found in run_ranks(2, disagreeing):
        assert found.pop("equal") == found.pop("equal again") == ("", False)
        assert all(unmoved for _, unmoved in found.values()), found
        told = {
            way: text.partition("RuntimeError: ranks disagree on the ")[2] for way, (text, _) in found.items()
        }
        assert "scale: rank 0 has 64, rank 1 has 1024. " in told["init"]
        assert "scaler's growth_factor: rank 0 has 2.0, rank 1 has 3.0. " in told["unscale"]
        assert "call: rank 0 has GradScaler.unscale_, rank 1 has Muon.step. All " in told["enabled"]
        assert "call: rank 0 has Muon.step, rank 1 has GradScaler.unscale_. All " in told["enabled, unscale"]
        assert "call: rank 0 has GradScaler.unscale_, rank 1 has clip_grad_norm_. " in told["clipped"]
        assert "call: rank 0 has clip_grad_norm_, rank 1 has Muon.step. " in told["one clips"]
        assert "scale: rank 0 has 16, rank 1 has 8. " in told["update"]
        assert "scale: rank 0 has 8, rank 1 has 4. " in told["loaded"]


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), 1e39, "x", None])
def test_scales_that_cannot_be(scale: Any) -> None:
    with pytest.raises(ValueError, match="init_scale must be positive and finite"):
        dmuon.GradScaler("cpu", init_scale=scale)
    assert not dmuon.GradScaler("cpu", init_scale=scale, enabled=False).is_enabled()
    scaler = dmuon.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(ValueError, match=r"^scale must be positive and finite"):
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
    assert scaler.get_scale() == 8.0


def test_states_of_scalers() -> None:
    scaler = dmuon.GradScaler("cpu", init_scale=8.0)
    state = scaler.state_dict()
    with pytest.raises(ValueError, match="lacks _growth_tracker, growth_interval"):
        scaler.load_state_dict(
            {k: v for k, v in state.items() if k not in ("_growth_tracker", "growth_interval")}
        )
    with pytest.raises(TypeError, match="must be a dict, got list"):
        scaler.load_state_dict([])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="disabled instance"):
        scaler.load_state_dict({})
    dmuon.GradScaler("cpu", enabled=False).load_state_dict({})
    scaler.load_state_dict({**state, "scale": 2.0})
    assert scaler.get_scale() == 2.0


def half() -> tuple[str, bool]:
    """Masters in fp16 on one rank alone; and fp32 masters that compute in fp16."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8, bias=False)), nn.Sequential(nn.Linear(8, 8)))
    model[0].half()
    owned = dmuon.own(model, mesh_of(), compute_dtype=torch.float32)
    fully_shard(model, mesh=mesh_of(), ignored_params=owned.params)
    optimizer, scaler = dmuon.Muon(model), dmuon.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    refused = outcome(lambda: scaler.unscale_(optimizer))

    model = build(dtype=torch.float32)
    owned = wrap(model, mesh_of(), compute_dtype=torch.float16)
    optimizer, scaler = dmuon.Muon(model, precision="fp32"), dmuon.GradScaler("cpu", init_scale=16.0)
    before = {name: master.detach().clone() for name, master in owned.masters.items()}
    name = "mixer.weight"
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model(batch(0, 2)[0]), batch(0, 2)[1])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    moved = name not in before or not torch.equal(owned.masters[name], before[name])
    return refused, moved and all(master.isfinite().all() for master in owned.masters.values())


def test_computing_in_fp16_is_what_it_is_for_and_masters_in_fp16_are_refused() -> None:
    for refused, trained in run_ranks(2, half):
        assert "own an fp32 model" in refused
        assert trained


def undropped() -> list[list[str]]:
    """What is warned of at steps of which the first overflows, while only the model's gradients are dropped."""
    model = build()
    wrap(model, mesh_of())
    optimizer, scaler = dmuon.Muon(model, **HOW), dmuon.GradScaler("cpu", init_scale=1024.0)
    found = []
    for step in range(2):
        loss = loss_of(model(batch(step, 2)[0]), batch(step, 2)[1])
        scaler.scale(loss * float("inf") if step == 0 else loss).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        found.append([str(warning.message) for warning in caught])
    return found


def test_an_inf_that_nobody_drops_is_warned_of() -> None:
    for first, second in run_ranks(2, undropped):
        assert not first
        assert any("which nobody dropped: call optimizer.zero_grad()" in text for text in second)
