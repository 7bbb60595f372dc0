"""What would leave owned parameters untrained without a word; and scripts that work with and without ownership."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, batch, build, difference, loss_of, mesh_of, wrap
from own_processes import outcome, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import dmuon


def backward(model: nn.Module) -> Tensor:
    tokens, targets = batch(0, 2)
    loss = loss_of(model(tokens), targets)
    loss.backward()
    return loss


def other_optimizers() -> dict[str, Any]:
    model = build()
    owned = wrap(model, mesh_of())
    backward(model)
    rest = [p for p in model.parameters() if p not in owned.params]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    model.head.weight.grad.to_local().fill_(1)
    kept = model.head.weight.full_tensor()
    found: dict[str, Any] = {
        "all": outcome(torch.optim.AdamW(model.parameters()).step),
        "named": outcome(torch.optim.SGD(model.named_parameters(), lr=1.0).step),
        "scaled": outcome(lambda: scaler.step(torch.optim.AdamW(model.parameters()))),
        "untouched": bool(torch.equal(model.head.weight.full_tensor(), kept)),
        "rest": outcome(torch.optim.AdamW(rest).step),
        "others": outcome(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0).step),
        "masters": outcome(lambda: dmuon.Muon(list(owned.masters.values()))),
        "named masters": outcome(lambda: dmuon.Muon(list(owned.masters.items()))),
    }
    backward(model)
    optimizer = dmuon.Muon(model, **HOW)
    optimizer.param_groups[0]["params"].pop()
    found["shortened"] = outcome(optimizer.step)
    return found


@pytest.mark.case(row="P7")
def test_optimizers_that_would_pass_owned_parameters_over_say_so() -> None:
    for found in run_ranks(2, other_optimizers):
        for key, needle in {
            "all": "RuntimeError: AdamW cannot update owned parameters, such as (3, 8, 16): their gradients",
            "named": "SGD cannot update owned parameters, such as 'blocks.0.experts'",
            "scaled": "AdamW cannot update owned parameters",
            "masters": "owned, or masters of such: give the optimizer the whole model",
            "named masters": "owned, or masters of such: give the optimizer the whole model",
            "shortened": "of the optimizer has 18 params but 19 param_names: change both alike",
        }.items():
            assert needle in found[key], (key, found[key])
        assert found["untouched"] and found["rest"] == found["others"] == ""


def replaced() -> dict[str, str]:
    """A whole module: by a new one; on the second rank alone; out of the model; inside a block."""
    found = {}
    for how in ("block", "one rank", "removed", "inside"):
        model = build()
        wrap(model, mesh_of())
        optimizer = dmuon.Muon(model, **HOW)
        if how == "block":
            model.blocks[1] = build().blocks[1]
        elif how == "one rank" and dist.get_rank() == 1:
            model.mixer = build().mixer
        elif how == "removed":
            del model.blocks[2]
            model.order = [0, 1]
        elif how == "inside":
            model.blocks[1].q = build().blocks[1].q
        backward(model)
        found[how] = outcome(optimizer.step)
    return found


def test_a_module_that_was_replaced_is_found_at_the_step() -> None:
    first, second = run_ranks(2, replaced)
    for found in (first, second):
        # FSDP's parameters of a block are missed first.
        assert "parameter 'blocks.1.norm.weight' is not in the model any more" in found["block"]
        assert "parameter 'blocks.2.norm.weight' is not in the model any more" in found["removed"]
        assert "owned parameter 'blocks.1.q.weight' is not in the model any more" in found["inside"]
    assert "owned parameter 'mixer.weight' is not in the model any more" in second["one rank"]
    assert first["one rank"] == f"RuntimeError: Muon.step failed on rank 1: {second['one rank']}"


def wrapped_later() -> float:
    """Modules that are wrapped after ownership are still there."""
    model = build()
    reference = copy.deepcopy(model)
    owned = wrap(model, mesh_of())
    optimizer, alone = dmuon.Muon(model, **HOW), dmuon.Muon(reference, **HOW)
    for step in range(3):
        if step == 1:
            model.blocks[1] = checkpoint_wrapper(model.blocks[1])
            model.mixer = torch.compile(model.mixer, backend="eager")
        for each, how in ((model, optimizer), (reference, alone)):
            backward(each)
            how.step()
            how.zero_grad()
    reference.mixer = nn.ModuleDict({"_orig_mod": reference.mixer})
    reference.blocks[1] = nn.ModuleDict({"_checkpoint_wrapped_module": reference.blocks[1]})
    expected = {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): parameter
        for name, parameter in reference.named_parameters()
    }
    return max((master - expected[name]).abs().max().item() for name, master in owned.masters.items())


def test_modules_may_be_wrapped_after_ownership() -> None:
    assert max(run_ranks(2, wrapped_later)) < 1e-12


def thawed() -> str:
    """A layer that was frozen when the model was owned."""
    model = build()
    model.mixer.requires_grad_(False)
    wrap(model, mesh_of())
    optimizer = dmuon.Muon(model, **HOW)
    model.mixer.requires_grad_(True)
    return outcome(lambda: optimizer.add_param_group({"params": model.mixer.named_parameters()}))


def test_a_layer_thawed_after_ownership_is_told_what_to_do() -> None:
    for found in run_ranks(2, thawed):
        assert "call dmuon.own before it is sharded, with all trainable that ever will be" in found
        assert "algorithm='adamw'" in found


def either(owning: bool, sharding: bool) -> float:
    """One script: accumulation and clipping, owned or not, sharded or not. How far it is from one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build()
    reference = copy.deepcopy(model)
    owned = wrap(model, mesh_of()) if owning else None
    if sharding and not owning:
        fully_shard(model, mesh=mesh_of())
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(each.parameters(), 0.1) if sharding and not owning else dmuon.Muon(each, **HOW)
        for each in (model, reference)
    ]
    worst = 0.0
    for step in range(2):
        for micro in range(2):
            dmuon.set_requires_gradient_sync(model, micro == 1)
            tokens, targets = batch(10 * step + micro, 2 * ranks)
            mine = slice(2 * rank, 2 * rank + 2) if sharding else slice(None)
            loss_of(model(tokens[mine]), targets[mine]).backward()
            loss_of(reference(tokens), targets).backward()
        norm = dmuon.clip_grad_norm_(model, 0.1)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert norm.ndim == 0 and type(norm) is Tensor
        worst = max(worst, abs((norm - expected).item()))
        for each in optimizers:
            each.step()
            each.zero_grad()
    if owned is not None:
        return max(worst, difference(model, owned, reference))
    wanted = dict(reference.named_parameters())
    whole = {n: p.full_tensor() if sharding else p for n, p in model.named_parameters()}
    return max(worst, *((whole[name] - wanted[name]).abs().max().item() for name in wanted))


def either_way() -> list[float]:
    return [either(True, True), either(False, True), either(False, False)]


def test_one_script_serves_models_that_are_owned_and_that_are_not() -> None:
    for found in run_ranks(2, either_way):
        assert max(found) < 1e-10, found


def test_names_and_parameters_of_a_group_go_together() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = dmuon.Muon(model)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match="group 0 of the optimizer has 1 params but 2 param_names"):
        optimizer.step()
    with pytest.raises(ValueError, match="has 1 params but 2 param_names"):
        dmuon.Muon([{"params": [model[0].weight], "param_names": ["a", "b"]}])
