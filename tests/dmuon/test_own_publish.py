"""Publication while the optimizer updates: in which order, behind whom, and that it changes no bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, batch, build, loss_of, mesh_of, wrap
from own_processes import run_ranks
from torch import Tensor, nn

import dmuon
import dmuon.batching
from dmuon.batching import Update
from dmuon.ownership.buckets import Bucket
from dmuon.ownership.exchange import Transfer
from dmuon.ownership.publisher import Publisher
from dmuon.ownership.statistics import Statistics


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, after: Callable[[], object] | None = None
) -> list[float]:
    """Each rank on rows of its own; ``after`` each step."""
    rank, losses = dist.get_rank(), []
    for step in range(steps):
        tokens, targets = batch(step, 2 * dist.get_world_size())
        rows = slice(2 * rank, 2 * rank + 2)
        loss = loss_of(model(tokens[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if after is not None:
            after()
    return losses


@dataclass
class Noted:
    """Routes that note which buckets are published, and deliver at once."""

    lanes: int
    published: list[int] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)

    def publish(self, flat: Tensor, sizes: list[int], lane: int = 0) -> Any:
        assert lane == len(sizes) % self.lanes
        self.published.append(len(sizes))
        return self

    def wait(self) -> None: ...


def publisher_of(lanes: int, reshard: bool, count: int = 5) -> tuple[Publisher, list[Tensor], list[int]]:
    """Bucket k has one matrix of this rank; it is recognised by its k ranks."""
    model = nn.ModuleDict({str(k): nn.Linear(2, 2, bias=False) for k in range(count)})
    buckets = []
    for k in range(count):
        bucket = Bucket(
            str(k),
            model[str(k)],
            {f"{k}.weight": model[str(k)].weight},
            {f"{k}.weight": 0},
            [0],
            0,
            torch.float32,
        )
        bucket.sizes = [0] * k
        buckets.append(bucket)
    routes: Any = Noted(lanes)
    publisher = Publisher(buckets, routes, reshard)
    masters = [bucket.mine[0].master for bucket in buckets]
    return publisher, [master for master in masters if master is not None], routes.published


def test_buckets_go_when_their_masters_have_moved_in_order_on_each_lane() -> None:
    publisher, masters, published = publisher_of(lanes=2, reshard=False)
    publisher.refresh(masters[1:4])
    assert published == [0]  # 4 is ready, but behind 2 on its lane
    publisher.moved(masters[3])
    assert published == [0]
    publisher.moved(masters[2])
    assert published == [0, 2, 4]
    publisher.moved(masters[1])
    assert published == [0, 2, 4, 1, 3]


def test_with_one_lane_nothing_overtakes() -> None:
    publisher, masters, published = publisher_of(lanes=1, reshard=False)
    publisher.refresh(masters)
    for k in (1, 0, 3, 4):
        publisher.moved(masters[k])
    assert published == [0, 1]
    publisher.moved(masters[2])
    assert published == [0, 1, 2, 3, 4]


def test_zero3_publishes_the_first_alone() -> None:
    publisher, masters, published = publisher_of(lanes=2, reshard=True)
    publisher.refresh(masters)
    for master in reversed(masters):
        publisher.moved(master)
    assert published == [0]


def order_of_updates() -> list[list[str]]:
    """The blocks of this rank's masters as they move, after a forward in another order than that of registration."""
    model = build()
    model.order = [2, 0, 1]
    owned = wrap(model, mesh_of(), reshard_after_forward=False)
    optimizer = dmuon.Muon(model, **HOW)
    names = {master: name for name, master in owned.masters.items()}
    dmuon.batching.BATCH_ELEMENTS = 1
    seen: list[list[str]] = []
    run = optimizer._matrix_step.run

    def noting(updates: list[Update], **how: Any) -> Iterator[Tensor]:
        seen.append([])
        for master in run(updates, **how):
            seen[-1].append(".".join(names[master].split(".")[:2]))
            yield master

    optimizer._matrix_step.run = noting
    train(model, optimizer, 1)
    return seen


def test_updates_follow_the_forward() -> None:
    place = ["mixer.weight", "blocks.2", "blocks.0", "blocks.1"]
    results = run_ranks(2, order_of_updates)
    assert {name for (moved,) in results for name in moved} == set(place)
    for (moved,) in results:
        assert moved == sorted(moved, key=place.index)


def slow_owner(path: str) -> dict[str, Any]:
    """Three owners, each of another block; the second does not end its updates before the others have seen enough."""
    rank = dist.get_rank()
    model = build(layers=4)
    names = [r.name for r in dmuon.MatrixPolicy().route_model(model) if r.algorithm == "muon"]
    plan = {name: int(name.split(".")[1]) % 3 if name.startswith("blocks") else 0 for name in names}
    owned = wrap(model, mesh_of(), plan=plan, reshard_after_forward=False)
    optimizer = dmuon.Muon(model, **HOW)
    train(model, optimizer, 1)
    store = dist.FileStore(path, 3)
    run = optimizer._matrix_step.run

    def late(updates: list[Update], **how: Any) -> Iterator[Tensor]:
        for k, master in enumerate(run(updates, **how)):
            if rank == 1 and k == 0:
                while int(store.add("seen", 0)) < 2 and time.monotonic() < deadline + 10:
                    time.sleep(0.01)
            yield master

    optimizer._matrix_step.run = late
    deadline = time.monotonic() + 10
    train(model, optimizer, 1)
    under_way = {owned._publisher._buckets[k].name: p for k, p in owned._publisher._under_way.items()}
    ready = ("", "blocks.0", "blocks.2")
    while rank != 1 and not all(under_way[name].done for name in ready) and time.monotonic() < deadline:
        time.sleep(0.01)
    arrived = [name for name, pending in under_way.items() if pending.done]
    store.add("seen", int(rank != 1))
    again = train(model, optimizer, 1)
    return {"arrived": arrived, "loss": again}


@pytest.mark.case(row="R13")
def test_a_slow_owner_does_not_hold_up_ready_layers(tmp_path: Path) -> None:
    first, _, third = run_ranks(3, slow_owner, str(tmp_path / "store"))
    for result in (first, third):
        assert {"", "blocks.0", "blocks.2"} <= set(result["arrived"])
        assert "blocks.1" not in result["arrived"]


class InSeries:
    """Routes that wait for every transfer at once."""

    def __init__(self, routes: Any) -> None:
        self.routes = routes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.routes, name)

    def publish(self, *args: Any) -> Transfer:
        return Transfer((), (self.routes.publish(*args).wait(),))

    def reduce(self, *args: Any) -> Transfer:
        return Transfer((), (self.routes.reduce(*args).wait(),))


def without_overlap(owned: Any, optimizer: dmuon.Muon) -> None:
    """Publish nothing before all has moved, and wait for every transfer."""
    run = optimizer._matrix_step.run
    optimizer._matrix_step.run = lambda updates, **how: iter(list(run(updates, **how)))
    owned._publisher._routes = InSeries(owned._publisher._routes)
    owned._reducer._routes = InSeries(owned._reducer._routes)


def overlap(nodes: int, reshard: bool) -> bool:
    """Whether three steps with everything under way at once equal three with one thing at a time."""
    found = []
    for overlapping in (True, False):
        model = build(dtype=torch.float32)
        owned = wrap(model, mesh_of(nodes), reshard_after_forward=reshard)
        optimizer = dmuon.Muon(model, **{**HOW, "precision": "fp32"})
        if not overlapping:
            without_overlap(owned, optimizer)
        losses = train(model, optimizer, 3)
        with torch.no_grad():
            logits = model(batch(9, 2)[0])
        found.append([torch.tensor(losses), logits, *owned.masters.values()])
    return all(torch.equal(on, off) for on, off in zip(*found, strict=True))


@pytest.mark.case(row="R9")
@pytest.mark.parametrize(("nodes", "reshard"), [(1, True), (1, False), (2, False)])
def test_overlap_changes_no_bit(nodes: int, reshard: bool) -> None:
    assert run_ranks(2 * nodes, overlap, nodes, reshard) == [True] * 2 * nodes
