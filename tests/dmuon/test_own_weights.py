"""Where weights are and when: masters on owners, published copies in the compute dtype, nothing left behind."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, batch, build, loss_of, mesh_of, wrap
from own_processes import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon
from dmuon.ownership.absent import AbsentParameter


def whereabouts() -> dict[str, Any]:
    """One ZeRO-3 step, with every broadcast counted."""
    rank = dist.get_rank()
    model = build()
    owned = wrap(model, mesh_of())
    optimizer = dmuon.Muon(model, **HOW)
    sent: list[tuple[int, torch.dtype]] = []
    broadcast = dist.broadcast
    dist.broadcast = lambda tensor, **kw: (
        sent.append((tensor.numel(), tensor.dtype)),
        broadcast(tensor, **kw),
    )[1]
    reduced: list[int] = []
    exchange = dist.all_to_all_single
    dist.all_to_all_single = lambda out, data, **kw: (
        reduced.append(data.numel()),
        exchange(out, data, **kw),
    )[1]
    buckets = owned._publisher._buckets

    def allocated() -> list[str]:
        return [bucket.name for bucket in buckets if bucket.flat.untyped_storage().size()]

    live: list[list[str]] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: live.append(allocated()))
        block.register_full_backward_hook(lambda *_: live.append(allocated()))
    tokens, targets = batch(0, 2)
    absent = {name for name, p in model.named_parameters() if isinstance(p, AbsentParameter)}
    loss_of(model(tokens), targets).backward()
    grads = [p for p in owned.params if p.grad is not None]
    during = sum(count for count, _ in sent)
    optimizer.step()
    live.append(allocated())
    kept = {
        "masters": set(owned.masters),
        "state": len(optimizer.state),
        "groups": len(optimizer.param_groups),
    }
    total = sum(p.numel() for p in owned.params)
    last = (
        sum(p.numel() for p in model.blocks[-1].parameters() if p in owned.params)
        + model.mixer.weight.numel()
    )
    published = {}
    with torch.no_grad():
        model.blocks[1].register_forward_pre_hook(
            lambda block, *_: published.update(
                {f"blocks.1.{n}": p.clone() for n, p in block.named_parameters()}
            )
        )
        model(tokens)
    return {
        **kept,
        "rank": rank,
        "owners": owned.plan.owners,
        "absent": absent,
        "live": live[:7],
        "grads": len(grads),
        "broadcast": during,
        "reduced": sum(reduced),
        "total": total,
        "expected": 2 * total - last,
        "published": {n: published[n].tolist() for n in owned.plan.owners if n in published},
        "mine": {n: m.tolist() for n, m in owned.masters.items()},
        "described": owned.describe(),
        "with state": {n for n, p in owned.parameters.items() if optimizer.state.get(p)},
    }


@pytest.mark.case(row="R6")
def test_masters_are_on_owners_and_copies_come_and_go() -> None:
    results = run_ranks(2, whereabouts)
    owners = results[0]["owners"]
    for result in results:
        assert result["masters"] == {n for n, (owner,) in owners.items() if owner == result["rank"]}
        assert result["absent"] == set(owners)
        assert result["grads"] == 0
        assert result["broadcast"] == result["expected"]
        assert result["reduced"] == result["total"]
        zero, one, two = "blocks.0", "blocks.1", "blocks.2"
        forward, backward = [[zero, one], [one, two], [two]], [[one, two], [zero, one], [zero]]
        # The model's own stays; after the step it and the first are on their way again.
        assert result["live"] == [["", *names] for names in (*forward, *backward, [zero])]
        assert result["with state"] == result["masters"]
        assert "2 ranks" in result["described"] and "rank 1:" in result["described"]
    masters = results[0]["mine"] | results[1]["mine"]
    assert masters.keys() == owners.keys()
    for result in results:
        assert result["published"] and all(w == masters[n] for n, w in result["published"].items())


def crossings() -> dict[str, Any]:
    """Elements that one step moves inside nodes and across them, on 2 nodes of 2."""
    model = build()
    mesh = mesh_of(2)
    owned = wrap(model, mesh, reshard_after_forward=False)
    optimizer = dmuon.Muon(model, **HOW)
    counts: dict[str, dict[int, int]] = {"weights": {}, "gradients": {}}
    groups: dict[int, set[int]] = {}

    def counted(kind: str, function: Any, tensors: int) -> Any:
        def call(*args: Any, **kw: Any) -> Any:
            ranks = dist.get_process_group_ranks(kw["group"])
            counts[kind][id(kw["group"])] = counts[kind].get(id(kw["group"]), 0) + args[tensors].numel()
            groups[id(kw["group"])] = set(ranks)
            return function(*args, **kw)

        return call

    dist.broadcast = counted("weights", dist.broadcast, 0)
    dist.all_to_all_single = counted("gradients", dist.all_to_all_single, 1)
    tokens, targets = batch(0, 2)
    loss_of(model(tokens), targets).backward()
    owned.finish("test")
    inside = set(dist.get_process_group_ranks(mesh.get_group("shard")))
    found: Counter[tuple[str, str]] = Counter()
    for kind, moved in counts.items():
        for group, count in moved.items():
            found[kind, "inside" if groups[group] == inside else "across"] += count
    optimizer.step()
    column = [n for n, (owner,) in owned.plan.owners.items() if owner % 2 == dist.get_rank() % 2]
    return {
        "found": dict(found),
        "total": sum(p.numel() for p in owned.params),
        "column": sum(model.get_parameter(n).numel() for n in column),
    }


@pytest.mark.case(row="R4")
def test_two_levels_move_what_they_must() -> None:
    for result in run_ranks(4, crossings):
        assert result["found"] == {
            ("weights", "inside"): result["total"],
            ("weights", "across"): result["column"],
            ("gradients", "inside"): result["total"],
            ("gradients", "across"): result["column"],
        }


def mixed_precision(reduce_dtype: torch.dtype) -> dict[str, Any]:
    """bf16 beside FSDP2's own, and the same by hand in one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build(dtype=torch.float32)
    reference = copy.deepcopy(model)
    mesh = mesh_of()
    owned = dmuon.own(model, mesh, compute_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in [*model.blocks, model]:
        fully_shard(block, mesh=mesh, mp_policy=precision, ignored_params=owned.params)
    how = {**HOW, "precision": "fp32"}
    optimizer, alone = dmuon.Muon(model, **how), dmuon.Muon(reference, **how)
    seen: set[torch.dtype] = set()
    broadcast = dist.broadcast
    dist.broadcast = lambda tensor, **kw: (seen.add(tensor.dtype), broadcast(tensor, **kw))[1]
    for step in range(2):
        tokens, targets = batch(step, 2 * ranks)
        loss_of(model(tokens[2 * rank : 2 * rank + 2]), targets[2 * rank : 2 * rank + 2]).backward()
        for r in range(ranks):
            half = copy.deepcopy(reference).bfloat16()
            half.zero_grad()
            loss_of(half(tokens[2 * r : 2 * r + 2]), targets[2 * r : 2 * r + 2]).backward()
            for p, q in zip(reference.parameters(), half.parameters(), strict=True):
                part = q.grad.float() / ranks
                p.grad = part if r == 0 else p.grad + part
        optimizer.step()
        alone.step()
        optimizer.zero_grad()
        alone.zero_grad()
    expected: dict[str, Tensor] = dict(reference.named_parameters())
    dtypes = {m.dtype for m in owned.masters.values()} | {
        s["momentum_buffer"].dtype for s in _muon(optimizer)
    }
    worst = max((m - expected[n]).abs().max().item() for n, m in owned.masters.items())
    return {"seen": seen, "dtypes": dtypes, "worst": worst}


def _muon(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    return [state for state in optimizer.state.values() if "momentum_buffer" in state]


@pytest.mark.case(row="R12")
def test_bf16_is_published_and_fp32_kept_and_summed() -> None:
    # A bf16 wire loses nothing: the gradients are bf16, and their sum is fp32 either way.
    for reduce_dtype in (torch.bfloat16, torch.float32):
        for result in run_ranks(2, mixed_precision, reduce_dtype):
            assert result["seen"] == {torch.bfloat16}
            assert result["dtypes"] == {torch.float32}
            assert result["worst"] < 2e-5


class Lone(nn.Module):
    """One owned matrix: the second rank owns none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 5), nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


def lone() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Lone()
    owned = dmuon.own(model, mesh_of())
    fully_shard(model, mesh=mesh_of(), ignored_params=owned.params)
    optimizer = dmuon.Muon(model, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = {name: master.detach().clone() for name, master in owned.masters.items()}
    model(torch.randn(4, 6)).sum().backward()
    optimizer.zero_grad()  # drops what is under way
    optimizer.step()
    dropped = all(torch.equal(before[name], master) for name, master in owned.masters.items())
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    schedule.step()
    moved = [not torch.equal(before[name], master) for name, master in owned.masters.items()]
    groups = [(group["algorithm"], group["lr"], group["param_names"]) for group in optimizer.param_groups]
    return {"moved": moved, "dropped": dropped, "groups": groups}


def test_a_rank_that_owns_nothing_has_the_same_groups() -> None:
    first, second = run_ranks(2, lone)
    assert (first["moved"], second["moved"]) == ([True], [])
    assert first["dropped"]
    rest = ("adamw", 1.5e-4, ["layer.bias", "norm.weight", "norm.bias"])
    assert first["groups"] == [("muon", 0.05, ["layer.weight"]), rest]
    assert second["groups"] == first["groups"]
