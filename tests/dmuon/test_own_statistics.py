"""What crosses between ranks, what they wait for and what they hold, and what ``owned.statistics`` says of it."""

from __future__ import annotations

import gc
import json
import time
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from own_models import mesh_of
from own_processes import run_ranks
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import dmuon
from dmuon.ownership.absent import AbsentParameter
from dmuon.ownership.statistics import Statistics

WIDTH, BLOCKS = 24, 5
FAMILIES = ("all_", "broadcast", "reduce", "gather", "scatter", "send", "recv", "isend", "irecv")
COLLECTIVES = [name for name in vars(dist) if name.startswith(FAMILIES) and name != "reduce_op"]


def chain() -> nn.Sequential:
    """Matrices alone, so that nothing is FSDP's; an odd number of them, so that owners have unequal shares."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        )
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH, bias=False)).double()


def train(model: nn.Module, optimizer: dmuon.Muon) -> None:
    model(torch.randn(3, WIDTH, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Wire:
    """Stands in for every collective of ``torch.distributed``, and notes what each takes over from this rank or
    brings it of others', by name and ranks of the group."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.calls: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._patches = [
            mock.patch.object(dist, name, self._noting(name, getattr(dist, name))) for name in COLLECTIVES
        ]

    def __enter__(self) -> Wire:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for patch in self._patches:
            patch.stop()

    def _noting(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs["group"]
            key = name, tuple(dist.get_process_group_ranks(group))
            self.calls[key] += 1
            if name == "broadcast":
                self.bytes[key] += (kwargs["group_src"] != dist.get_rank(group)) * args[0].nbytes
            elif name == "all_to_all_single":
                others = sum(kwargs["input_split_sizes"]) - kwargs["input_split_sizes"][dist.get_rank(group)]
                self.bytes[key] += others * args[1].element_size()
            else:
                self.bytes[key] += args[0].nbytes
            return function(*args, **kwargs)

        return call


def crossings(nodes: int, reshard: bool) -> dict[str, Any]:
    """What the second of two steps moves, as the wire and as the statistics have it."""
    model = chain()
    owned = dmuon.own(model, mesh_of(nodes), reshard_after_forward=reshard)
    optimizer = dmuon.Muon(model, precision="fp64")
    train(model, optimizer)
    for _ in range(10):
        if all(pending.done for pending in owned._publisher._under_way.values()):
            break
        time.sleep(0.1)
    owned.statistics.reset()
    with Wire() as wire:
        train(model, optimizer)
        for pending in owned._publisher._under_way.values():
            pending.wait()
    sizes = {name: parameter.numel() for name, parameter in owned.parameters.items()}
    last = f"{len(model) - 1}.weight"
    return {
        "wire": dict(wire.bytes),
        "calls": dict(wire.calls),
        "exchanges": owned.statistics.as_dict()["exchanges"],
        "sizes": sizes,
        "owners": {name: owner for name, (owner,) in owned.plan.owners.items()},
        "last": last,
    }


@pytest.mark.case(row="R4")
@pytest.mark.parametrize(("ranks", "nodes"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("reshard", [True, False])
def test_the_least_possible_crosses(ranks: int, nodes: int, reshard: bool) -> None:
    results = run_ranks(ranks, crossings, nodes, reshard)
    local = ranks // nodes
    sizes, owners = results[0]["sizes"], results[0]["owners"]
    total, size_of_last = sum(sizes.values()), sizes[results[0]["last"]]

    def owned_by(owning: set[int], once: bool = False) -> int:
        """Bytes of the weights published to others in a step, or of gradients (``once``), that ``owning`` own."""
        mine = [name for name, owner in owners.items() if owner in owning]
        published = 1 if once or not reshard else 2
        again = 0 if published == 1 else sum(sizes[n] for n in mine if n == results[0]["last"])
        return 8 * (published * sum(sizes[n] for n in mine) - again)

    for rank, result in enumerate(results):
        column = {r for r in range(ranks) if r % local == rank % local} if nodes > 1 else {rank}
        inside = tuple(r for r in range(ranks) if r // local == rank // local)
        across = tuple(sorted(column))
        everyone = set(range(ranks))
        wire = dict(result["wire"])
        # The agreement on what arrived: a few integers, on a group of its own.
        assert result["calls"]["all_reduce", tuple(range(ranks))] <= 3
        assert wire.pop(("all_reduce", tuple(range(ranks)))) <= 3 * 8 * (len(sizes) + 2)
        expected = {
            ("broadcast", inside): owned_by(everyone - column),
            ("all_to_all_single", inside): owned_by(everyone - column, once=True),
        }
        if nodes > 1:
            expected["broadcast", across] = owned_by(column - {rank})
            expected["all_to_all_single", across] = owned_by(column - {rank}, once=True)
        assert wire == expected
        levels = {"flat": inside, "intra": inside, "inter": across}
        ways = {"broadcast": "broadcast", "all_to_all": "all_to_all_single"}
        assert {
            (ways[each["way"]], levels[each["level"]]): each["bytes"] for each in result["exchanges"]
        } == expected
    # In all: each element goes to all ranks but one for each publication, and comes from all but one.
    moved = Counter()
    for result in results:
        for each in result["exchanges"]:
            moved[each["kind"], each["level"]] += each["bytes"] // 8
    published = 2 * total - size_of_last if reshard else total
    if nodes == 1:
        assert moved == {
            ("publish", "flat"): (ranks - 1) * published,
            ("reduce", "flat"): (ranks - 1) * total,
        }
    else:
        assert moved == {
            ("publish", "inter"): (nodes - 1) * published,
            ("publish", "intra"): nodes * (local - 1) * published,
            ("reduce", "inter"): (nodes - 1) * total,
            ("reduce", "intra"): nodes * (local - 1) * total,
        }


def waits() -> dict[str, Any]:
    """Two steps; before the second, one rank is late."""
    model = chain()
    owned = dmuon.own(model, mesh_of())
    optimizer = dmuon.Muon(model, precision="fp64")
    train(model, optimizer)
    owned.statistics.reset()
    empty = owned.statistics.as_dict()
    if dist.get_rank() == 1:
        time.sleep(0.5)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train(model, optimizer)
    found = owned.statistics.as_dict()
    return {
        "empty": empty,
        "found": json.loads(json.dumps(found)),
        "ranges": {event.name for event in profiled.events() if event.name.startswith("dmuon::")},
    }


def test_statistics_tell_waits_and_phases() -> None:
    first, second = run_ranks(2, waits)
    for result in (first, second):
        assert result["empty"] == {"exchanges": [], "waits": [], "phases": {}}
        waited = {(each["kind"], each["bucket"]): each["count"] for each in result["found"]["waits"]}
        last = str(BLOCKS)
        # Forward and backward, but for the last, which stays; the first may be waited for in the next step.
        assert {bucket for kind, bucket in waited if kind == "publish"} >= {
            str(k) for k in range(1, BLOCKS + 1)
        }
        assert waited["publish", "1"] == 2 and waited["publish", last] == 1
        assert {k: n for k, n in waited.items() if k[0] == "reduce"} == {
            ("reduce", str(k)): 1 for k in range(BLOCKS + 1)
        }
        phases = result["found"]["phases"]
        assert phases["update"]["count"] == phases["refresh"]["count"] == 1
        assert phases["finish"]["count"] == 2  # in step and in zero_grad
        assert all(phase["seconds"] > 0 for phase in phases.values())
        assert result["ranges"] == {
            "dmuon::publish", "dmuon::publish.wait", "dmuon::reduce", "dmuon::reduce.wait",
            "dmuon::finish", "dmuon::update", "dmuon::refresh",
        }  # fmt: skip
    seconds = [sum(each["seconds"] for each in result["found"]["waits"]) for result in (first, second)]
    assert seconds[0] > 0.3 > seconds[1]


class Event:
    """Stands in for torch.cuda.Event: each is recorded two seconds after the last."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.clock += 2.0
        self.at = Event.clock

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


def test_device_time_is_taken_by_events_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    statistics = Statistics()
    with statistics.waiting("publish", "a"):
        pass
    statistics.timing_device = True
    for bucket in ("b", "b", "c"):
        with statistics.waiting("publish", bucket):
            pass
    waits = {each["bucket"]: each.get("device_seconds") for each in statistics.as_dict()["waits"]}
    assert waits == {"a": None, "b": 4.0, "c": 2.0}


def held() -> int:
    """Bytes of the storages of all tensors that have come since ``gc.freeze``."""
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def memory(nodes: int) -> dict[str, Any]:
    """What this rank holds, beyond masters, state and owners' gradients, as a ZeRO-3 step goes on."""
    gc.freeze()
    model = chain()
    largest = 8 * max(sum(p.numel() for p in block.parameters()) for block in model)
    owned = dmuon.own(model, mesh_of(nodes))
    optimizer = dmuon.Muon(model, precision="fp64")
    train(model, optimizer)
    peaks: Counter[str] = Counter()

    matrices = [matrix for bucket in owned._publisher._buckets for matrix in bucket.matrices]

    def look(moment: str) -> None:
        kept = [*owned.masters.values(), *(s["momentum_buffer"] for s in optimizer.state.values() if s)]
        kept += [m.total for m in matrices if m.total is not None]
        kept += [m.grad for m in owned.masters.values() if m.grad is not None]
        # What is sent and, on its way, what comes from all ranks for this one's half of a bucket at most.
        sending = 3 * largest * len(owned._reducer._pending)
        peaks[moment] = max(peaks[moment], held() - sum(t.nbytes for t in kept) - sending)

    batch = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    for block in model:
        block.register_forward_pre_hook(lambda *_: look("forward"))
        block.register_full_backward_pre_hook(lambda *_: look("backward"))
    model(batch).square().mean().backward()
    owned.finish("test")
    look("finished")
    optimizer.step()
    optimizer.zero_grad()
    for pending in owned._publisher._under_way.values():
        pending.wait()
    look("stepped")
    shown = [p for p in owned.params if not isinstance(p, AbsentParameter)]
    return {"largest": largest, "shown": len(shown), "state": len(optimizer.state), **peaks}


@pytest.mark.parametrize("nodes", [1, 2])
def test_nothing_owned_stays_but_what_is_under_way(nodes: int) -> None:
    for result in run_ranks(4, memory, nodes):
        activations = 8 * 3 * WIDTH * 6 * BLOCKS
        bucket = result["largest"]
        assert result["shown"] == 0
        assert bucket < result["forward"] < 2 * bucket + activations, result
        # And one bucket's gradients, which are not sent yet.
        assert result["backward"] < 3 * bucket + activations, result
        assert result["finished"] < 2 * bucket + activations, result
        assert 0 < result["stepped"] < bucket + activations, result
