"""State dicts of owned models and of their optimizers: what is in them, and what loads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, batch, build, loss_of, mesh_of, wrap
from own_processes import outcome, run_ranks
from own_sessions import reference, train
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon


class Tied(nn.Module):
    """Tied embedding and head, buffers of both kinds, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(24, 16), nn.Linear(16, 24, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(2))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scale", torch.linspace(1, 2, 16))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def tied(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def facts(state: dict[str, Any]) -> dict[str, tuple[bool, torch.dtype, bool]]:
    """Name → whether it is sharded, its dtype, whether it has NaN."""
    return {
        name: (
            isinstance(value, DTensor),
            value.dtype,
            bool((value.to_local() if isinstance(value, DTensor) else value).isnan().any()),
        )
        for name, value in state.items()
    }


def contents() -> dict[str, Any]:
    model = tied()
    owned = dmuon.own(model, mesh_of(), compute_dtype=torch.bfloat16, reshard_after_forward=False)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh_of(), ignored_params=owned.params)
    absent = facts(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, 2, dtype=torch.long)).sum()
    shown = {parameter.dtype for parameter in owned.params if not parameter.isnan().any()}
    published = facts(model.state_dict())
    part = facts(model.blocks[0].state_dict(prefix="blocks.0."))
    kept = model.state_dict(keep_vars=True)
    masters = {name: owned.masters[name].tolist() for name in owned.masters}
    whole = dmuon.full_state_dict(model)
    return {
        "absent": absent,
        "shown": shown,
        "published": published,
        "part": part,
        "masters": masters,
        "whole": {name: value.numpy() for name, value in whole.items()},
        "placeholders": [n for n, value in kept.items() if value in owned.params],
    }


@pytest.mark.case(row="A8")
def test_a_rank_has_its_masters_and_never_a_published_copy(tmp_path: Any) -> None:
    plain, results = tied(), run_ranks(2, contents)
    names = plain.state_dict().keys()
    owned = {f"blocks.{k}.0.weight" for k in range(2)}
    assert results[0]["masters"].keys() | results[1]["masters"].keys() == owned
    for result in results:
        assert result["absent"].keys() == names - (owned - result["masters"].keys())
        for name, (sharded, dtype, nan) in result["absent"].items():
            assert sharded == (name not in owned and name not in ("count", "scale")), name
            assert dtype == plain.state_dict()[name].dtype and not nan, name
        # The same while the copies are there, and of a part of the model.
        assert result["shown"] == {torch.bfloat16} and result["published"] == result["absent"]
        assert result["part"] == {n: f for n, f in result["absent"].items() if n.startswith("blocks.0.")}
        assert result["placeholders"] == []
    assert results[1]["whole"] == {}
    whole = {name: torch.as_tensor(value) for name, value in results[0]["whole"].items()}
    assert list(whole) == list(names)
    assert all(torch.equal(whole[name], value) for name, value in plain.state_dict().items())
    save_file(whole, tmp_path / "model.safetensors")
    other = tied(seed=1)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in other.state_dict().items())


def loading() -> dict[str, Any]:
    rank = dist.get_rank()
    model, source = build(seed=7), build()
    whole = source.state_dict()
    owned = wrap(model, mesh_of(), reshard_after_forward=False)
    tokens, _ = batch(0, 2)
    with torch.no_grad():
        model(tokens)  # so that old copies are published

    def difference() -> float:
        with torch.no_grad():
            return (model(tokens) - source(tokens)).abs().max().item()

    def without(name: str, here: bool) -> dict[str, Tensor]:
        return {key: value for key, value in whole.items() if key != name or not here}

    def blank() -> None:
        with torch.no_grad():
            for master in owned.masters.values():
                master.zero_()
        owned.refresh()

    found: dict[str, Any] = {"before": difference()}
    model.load_state_dict(whole)
    found["whole"] = difference()
    mine = {name: value.clone() for name, value in model.state_dict().items()}
    blank()
    model.load_state_dict(mine)
    found["own"] = difference()
    blank()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(whole) if rank == 0 else {}, options=options)
    found["from rank 0"] = difference()
    blank()
    set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True))
    found["full"] = difference()
    blank()
    for block, other in zip(model.blocks, source.blocks, strict=True):
        block.load_state_dict(other.state_dict())
    model.mixer.load_state_dict(source.mixer.state_dict())
    found["parts"] = difference()

    by_owner = {owner: name for name, (owner,) in owned.plan.owners.items()}
    (lost, other) = by_owner[0], by_owner[1]
    found["missing on its owner"] = outcome(lambda: model.load_state_dict(without(lost, rank == 0)))
    found["missing on another"] = outcome(lambda: model.load_state_dict(without(lost, rank == 1)))
    found["missing everywhere"] = outcome(lambda: model.load_state_dict(without("norm.weight", True)))
    found["full without"] = outcome(
        lambda: set_model_state_dict(
            model, without(lost, True), options=StateDictOptions(full_state_dict=True)
        )
    )
    found["unexpected"] = outcome(
        lambda: model.load_state_dict({**whole, **({"new": tokens} if rank else {})})
    )
    wrong = {**whole, **({other: torch.zeros(2, 2)} if rank == 0 else {})}
    found["shape"] = outcome(lambda: model.load_state_dict(wrong))
    found["still"] = difference()
    blank()
    keys = model.load_state_dict(
        {**without(lost, rank == 0), **({"new": tokens} if rank else {})}, strict=False
    )
    found["not strict"] = (keys.missing_keys, keys.unexpected_keys)
    zero = {name for name, master in owned.masters.items() if not master.any()}
    return {**found, "zero": zero, "lost": lost, "other": other}


@pytest.mark.case(row="A5")
def test_what_loads_and_what_is_named_on_all_ranks() -> None:
    results = run_ranks(2, loading)
    for rank, found in enumerate(results):
        assert found["before"] > 0.1
        for way in ("whole", "own", "from rank 0", "full", "parts", "still"):
            assert found[way] < 1e-12, way
        lost, other = found["lost"], found["other"]
        assert f'Missing key(s) in state_dict: "{lost}"' in found["missing on its owner"]
        assert f'Missing key(s) in state_dict: "{lost}"' in found["full without"]
        assert found["missing on another"] == ""
        assert 'Missing key(s) in state_dict: "norm.weight"' in found["missing everywhere"]
        assert 'Unexpected key(s) in state_dict: "new"' in found["unexpected"]
        assert f"size mismatch for {other}: (2, 2)" in found["shape"]
        assert found["not strict"] == ([lost], ["new"])
        assert found["zero"] == ({lost} if rank == 0 else set())


def optimizers() -> dict[str, Any]:
    """In bf16, with fp32 masters; and what asking for the state changes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build(dtype=torch.float32)
    owned = dmuon.own(model, mesh_of(), compute_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh_of(), ignored_params=owned.params)
    optimizer = dmuon.Muon(model, **{**HOW, "precision": "fp32"})
    tokens, targets = batch(0, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model(tokens[2 * rank : 2 * rank + 2]), targets[2 * rank : 2 * rank + 2]).backward()
    optimizer.step()

    def momenta() -> dict[str, Tensor]:
        group = optimizer.param_groups[0]
        named = zip(group["param_names"], group["params"], strict=True)
        return {name: optimizer.state[p]["momentum_buffer"] for name, p in named if optimizer.state[p]}

    before, state = copy.deepcopy(momenta()), copy.deepcopy(optimizer.state_dict())
    for momentum in momenta().values():
        momentum.zero_()
    optimizer.load_state_dict(state)
    after = momenta()
    found: dict[str, Any] = {
        "same": before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before),
        "dtypes": {momentum.dtype for momentum in after.values()},
        "shown": {parameter.dtype for parameter in owned.params},
        "owned": set(before) == set(owned.masters),
    }
    # The state of another rank, and no state at all on one.
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, state)
    found["another's"] = outcome(lambda: optimizer.load_state_dict(every[1 - rank]))
    found["none"] = outcome(lambda: optimizer.load_state_dict(state if rank else None))
    found["pickled"] = outcome(lambda: copy.deepcopy(optimizer))
    found["kept"] = all(torch.equal(before[n], m) for n, m in momenta().items())
    # Trains on after loading, too.
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model(tokens[:2]), targets[:2]).backward()
    masters = {name: master.detach().clone() for name, master in owned.masters.items()}
    optimizer.step()
    found["moves"] = all(
        not torch.equal(masters[n], m) for n, m in owned.masters.items() if "experts" not in n
    )
    return found


@pytest.mark.case(row="A9")
def test_momenta_keep_the_masters_dtype() -> None:
    for rank, found in enumerate(run_ranks(2, optimizers)):
        assert found["same"] and found["owned"] and found["kept"] and found["moves"]
        assert found["dtypes"] == {torch.float32} and found["shown"] == {torch.bfloat16}
        assert "was on another rank when this state dict was made" in found["another's"]
        assert "cannot be copied or pickled: use its state_dict()" in found["pickled"]
        assert found["none"].startswith("TypeError" if rank == 0 else "RuntimeError"), found["none"]
        assert "state_dict must be a dict, got NoneType" in found["none"]


def torch_functions(flat: bool) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build()
    wrap(model, mesh_of())
    optimizer = dmuon.Muon(model, **HOW)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    # Before the first step torch would make one of its own, to have state.
    get_state_dict(model, optimizer, options=options)
    train(model, optimizer, range(2), rank, ranks)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    train(model, optimizer, range(2, 3), rank, ranks)
    straight = dmuon.full_state_dict(model)

    other = build(seed=7)
    wrap(other, mesh_of())
    resumed = dmuon.Muon(other, **HOW)
    set_model_state_dict(other, weights)
    set_optimizer_state_dict(other, resumed, state, options=options)
    train(other, resumed, range(2, 3), rank, ranks)
    found = {"resumed": worst(dmuon.full_state_dict(other), straight)}

    # Whole states, as a single process has them.
    alone = build()
    lone = dmuon.Muon(alone, **HOW)
    train(alone, lone, range(2))
    full = StateDictOptions(full_state_dict=True)
    set_model_state_dict(other, get_model_state_dict(alone), options=full)
    set_optimizer_state_dict(other, resumed, get_optimizer_state_dict(alone, lone), options=full)
    train(other, resumed, range(2, 3), rank, ranks)
    found["whole"] = worst(dmuon.full_state_dict(other), straight)
    names = {key for key in straight if key in reference(3)}
    found["reference"] = worst(straight, {key: reference(3)[key] for key in names}) if rank == 0 else 0.0
    return found


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(((found[name] - expected[name]).abs().max().item() for name in expected), default=0.0)


@pytest.mark.parametrize("flat", [False, True])
def test_torchs_functions_for_distributed_state_dicts(flat: bool) -> None:
    for found in run_ranks(2, torch_functions, flat):
        assert all(difference < 1e-12 for difference in found.values()), found
