"""By which way parts of buffers travel, and that every way brings the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from own_models import Training, build, mesh_of, train_both
from own_processes import outcome, run_ranks
from torch import Tensor

import dmuon
from dmuon.ownership.control import Control
from dmuon.ownership.link_costs import (
    GroupCosts,
    LinkCosts,
    assumed_costs,
    publication_loads,
    quickest,
    reduction_loads,
)
from dmuon.ownership.probe import fit, known_network, measure_network
from dmuon.ownership.routes import FlatRoutes
from dmuon.ownership.two_level import StreamChain, ThreadChain, TwoLevelRoutes

MB = 2**20
SIZES = ([5, 5, 5, 5], [7, 0, 3, 1], [0, 0, 9, 0], [1, 2, 3, 4])
WAYS = {
    "publish": ("broadcast", "all_gather", "all_to_all"),
    "reduce": ("all_to_all", "reduce", "reduce_scatter"),
}


def part(rank: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(size, dtype=torch.float64, generator=generator).to(dtype)


def published(publish: Any, sizes: list[int], rank: int, order: list[int]) -> bool:
    """Whether every rank's part arrives here."""
    whole = torch.cat([part(r, size) for r, size in zip(order, sizes, strict=True)])
    flat, mine = torch.full_like(whole, torch.nan), order.index(rank)
    stops = list(accumulate(sizes))
    mine_only = slice(stops[mine] - sizes[mine], stops[mine])
    flat[mine_only] = whole[mine_only]
    return torch.equal(publish(flat, sizes).wait(), whole) and torch.equal(flat, whole)


def reduction_error(
    reduce: Any, sizes: list[int], rank: int, order: list[int], dtype: torch.dtype = torch.float64
) -> float:
    """How far this rank's sum is from that of all ranks' own part."""
    each = [part(r, sum(sizes), 7, dtype) for r in range(len(sizes))]
    rows = reduce(each[rank].clone(), sizes).wait()
    mine = order.index(rank)
    stop = list(accumulate(sizes))[mine]
    expected = torch.stack(each).double().sum(0)[stop - sizes[mine] : stop]
    if rows.shape[1] != sizes[mine]:
        return float("inf")
    return (rows.double().sum(0) - expected).abs().max().item() if sizes[mine] else 0.0


def every_way() -> list[str]:
    """What goes wrong on any way, with sizes that are equal, uneven, and zero."""
    rank, wrong = dist.get_rank(), []
    routes = FlatRoutes(mesh_of())
    publishing, reducing = routes.levels["flat"]
    for sizes in SIZES:
        for way in WAYS["publish"]:
            routes.statistics.reset()
            if not published(
                lambda *args, way=way: publishing.publish(*args, way), sizes, rank, routes.order
            ):
                wrong.append(f"publish {way} {sizes}")
            (counted,) = routes.statistics.as_dict()["exchanges"]
            least = 8 * (sum(sizes) - sizes[rank])
            if counted["bytes"] != (24 * max(sizes) if way == "all_gather" else least):
                wrong.append(f"publish {way} {sizes} counts {counted}")
        for way in WAYS["reduce"]:
            error = reduction_error(
                lambda *args, way=way: reducing.reduce(*args, way), sizes, rank, routes.order
            )
            if not error < 1e-14:
                wrong.append(f"reduce {way} {sizes}: {error}")
    half = reduction_error(
        lambda *args: reducing.reduce(*args, "reduce_scatter"), SIZES[0], rank, routes.order, torch.bfloat16
    )
    if half:
        wrong.append(f"bf16 was rounded on the way: {half}")
    return wrong


def test_every_way_brings_the_same() -> None:
    assert run_ranks(4, every_way) == [[]] * 4


def two_levels(nodes: int) -> list[str]:
    """The same on nodes, with many exchanges under way at once."""
    routes = TwoLevelRoutes(mesh_of(nodes)) if nodes > 1 else FlatRoutes(mesh_of())
    rank, wrong = dist.get_rank(), []
    flats = []
    for seed, sizes in enumerate(SIZES):
        whole = torch.cat([part(r, size, seed) for r, size in zip(routes.order, sizes, strict=True)])
        flat, mine = torch.full_like(whole, torch.nan), routes.order.index(rank)
        stop = list(accumulate(sizes))[mine]
        flat[stop - sizes[mine] : stop] = whole[stop - sizes[mine] : stop]
        flats.append((routes.publish(flat, sizes), flat, whole))
        error = reduction_error(routes.reduce, sizes, rank, routes.order)
        if not error < 1e-14:
            wrong.append(f"reduce {sizes}: {error}")
    for pending, flat, whole in flats:
        pending.wait()
        if not (pending.done and torch.equal(flat, whole)):
            wrong.append("publish")
    return wrong


@pytest.mark.parametrize("nodes", [2, 4])
def test_two_levels_bring_the_same(nodes: int) -> None:
    assert run_ranks(4, two_levels, nodes) == [[]] * 4


def test_the_way_follows_sizes() -> None:
    """On CUDA: one call for what is small, broadcasts above 100 MB on eight ranks, nothing padded."""

    def ways(costs: GroupCosts, sizes: list[int]) -> tuple[str, str]:
        return (
            quickest(publication_loads(sizes), costs.publish),
            quickest(reduction_loads(sizes), costs.reduce),
        )

    cuda, cpu = assumed_costs("cuda"), assumed_costs("cpu")
    assert ways(cuda, [MB // 8] * 8) == ("all_gather", "reduce_scatter")
    assert ways(cuda, [90 * MB // 8] * 8) == ("all_gather", "reduce_scatter")
    assert ways(cuda, [120 * MB // 8] * 8) == ("broadcast", "reduce")
    assert ways(cuda, [MB // 8, MB // 9] * 4) == ("all_to_all", "all_to_all")
    assert ways(cuda, [0, 0, 0, MB, 0, 0, 0, 0]) == ("broadcast", "reduce")
    assert ways(cpu, [4096] * 4) == ("broadcast", "all_to_all")
    assert ways(cpu, [16 * MB] * 4) == ("broadcast", "reduce")


def test_loads_count_calls_and_the_busiest_rank() -> None:
    assert publication_loads([6, 0, 3]) == {
        "broadcast": (2, 9),
        "all_gather": (1, 12 + 9),
        "all_to_all": (1, 12),
    }
    assert reduction_loads([4, 4, 4]) == {"all_to_all": (1, 8), "reduce": (3, 12), "reduce_scatter": (1, 8)}


def measured_decide() -> tuple[list[str], list[str]]:
    """Ways taken with assumed costs, and with some that favour another."""
    mesh, quick, slow = mesh_of(2), LinkCosts(0.0, 0.0), LinkCosts(1.0, 1.0)
    costs = GroupCosts(
        {"broadcast": slow, "all_to_all": quick}, {"all_to_all": slow, "reduce_scatter": quick}
    )
    taken = []
    for routes in (TwoLevelRoutes(mesh), TwoLevelRoutes(mesh, {"inter": costs})):
        routes.publish(torch.zeros(8), [2] * 4).wait()
        routes.reduce(torch.zeros(8), [2] * 4).wait()
        taken.append(
            [f"{e['kind']} {e['level']} {e['way']}" for e in routes.statistics.as_dict()["exchanges"]]
        )
    return taken[0], taken[1]


def test_measured_costs_decide() -> None:
    inside = ["publish intra broadcast", "reduce intra all_to_all"]
    for assumed, measured in run_ranks(4, measured_decide):
        assert sorted(assumed) == sorted([*inside, "publish inter broadcast", "reduce inter all_to_all"])
        assert sorted(measured) == sorted(
            [*inside, "publish inter all_to_all", "reduce inter reduce_scatter"]
        )


def test_legs_that_fail_surface_and_end_those_after_them() -> None:
    chain, ran = ThreadChain(2), []

    def fail(x: Tensor) -> Tensor:
        raise ValueError("a leg broke")

    def note(x: Tensor) -> Tensor:
        ran.append(x.item())
        return x + 1

    good = chain.run([note, note], torch.tensor(1))
    bad = chain.run([note, fail], torch.tensor(10))
    late = chain.run([note, note], torch.tensor(20))
    assert good.wait() == 3
    assert outcome(bad.wait) == "ValueError: a leg broke"
    assert outcome(late.wait) == "RuntimeError: an earlier exchange has failed: a leg broke"
    assert bad.done and late.done and 21 not in ran
    assert outcome(ThreadChain(2).run([fail, note], torch.tensor(30)).wait) == "ValueError: a leg broke"


def test_a_first_leg_does_not_wait_for_earlier_second_legs() -> None:
    chain, begun = ThreadChain(2), Event()

    def begin(x: Tensor) -> Tensor:
        begun.set()
        return x

    def wait(x: Tensor) -> Tensor:
        assert begun.wait(20)
        return x

    first = chain.run([lambda x: x, wait], torch.tensor(1))
    second = chain.run([begin, lambda x: x], torch.tensor(2))
    assert (first.wait(), second.wait()) == (1, 2)


def measured_once(cache: str) -> dict[str, Any]:
    os.environ["DMUON_CACHE"] = cache
    mesh = mesh_of(2)
    control = Control(list(range(4)))
    before = known_network(mesh, control)
    measured = measure_network(mesh)
    return {
        "before": before,
        "measured": measured,
        "known": known_network(mesh, control),
        "flat": known_network(mesh_of(), control),
    }


def test_what_was_measured_is_kept_by_topology(tmp_path: Path) -> None:
    results = run_ranks(4, measured_once, str(tmp_path))
    for result in results:
        assert result["before"] == result["flat"] == {}
        assert result["known"] == result["measured"] == results[0]["measured"]
    assert list(results[0]["measured"]) == ["intra", "inter"]
    for costs in results[0]["measured"].values():
        for kind, ways in WAYS.items():
            found = getattr(costs, kind)
            assert tuple(found) == ways
            assert all(0 < way.seconds(1, 2**22) < 10 for way in found.values())
    (kept,) = (tmp_path / "network").iterdir()
    assert json.loads(kept.read_text())["topology"]["mesh"] == [2, 2]


def one_knows(cache: str, rank: int) -> dict[str, GroupCosts]:
    """What is known where ranks have caches of their own, and only ``rank``'s has something."""
    os.environ["DMUON_CACHE"] = cache if dist.get_rank() == rank else f"{cache}/nothing"
    return known_network(mesh_of(2), Control(list(range(4))))


@pytest.mark.case(row="R8")
def test_all_ranks_know_what_rank_0_knows(tmp_path: Path) -> None:
    (costs, *_) = run_ranks(4, measured_once, str(tmp_path))
    assert run_ranks(4, one_knows, str(tmp_path), 0) == [costs["known"]] * 4
    assert run_ranks(4, one_knows, str(tmp_path), 1) == [{}] * 4


def trained_by(publish: str, reduce: str) -> dict[str, float]:
    """How far training on two nodes by these ways is from one process."""
    free = LinkCosts(0.0, 0.0)
    costs = dict.fromkeys(("intra", "inter"), GroupCosts({publish: free}, {reduce: free}))
    with mock.patch("dmuon.ownership.owned.known_network", lambda *_: costs):
        levels = dmuon.own(build(), mesh_of(2)).routes.levels
        assert all(exchange.costs is costs[level] for level in levels for exchange in levels[level])
        return train_both(Training(nodes=2, unused={1: {1}}))


@pytest.mark.parametrize(("publish", "reduce"), [("all_gather", "reduce"), ("all_to_all", "reduce_scatter")])
def test_training_by_other_ways_equals_one_process(publish: str, reduce: str) -> None:
    for found in run_ranks(4, trained_by, publish, reduce):
        assert max(found.values()) < 1e-12


def spoilt(cache: str) -> list[str]:
    os.environ["DMUON_CACHE"] = cache
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert known_network(mesh_of(), Control([0])) == {}
    return [str(warning.message) for warning in caught]


def test_a_spoilt_file_is_left_aside(tmp_path: Path) -> None:
    run_ranks(1, measured_once_alone, str(tmp_path))
    (kept,) = (tmp_path / "network").iterdir()
    for text in ("{", "[]", '{"levels": {"flat": {"publish": {"broadcast": {"alpha": 1}}}}}'):
        kept.write_text(text)
        ((message,),) = run_ranks(1, spoilt, str(tmp_path))
        assert message.startswith(f"{kept} is left aside")


def measured_once_alone(cache: str) -> None:
    os.environ["DMUON_CACHE"] = cache
    measure_network(mesh_of())


def test_costs_are_fitted() -> None:
    def seconds(calls: int, nbytes: int) -> float:
        return 3e-4 * calls + 2e-9 * nbytes

    loads = [(4, 1000), (4, 10**6)]
    found = fit(loads, [seconds(*load) for load in loads])
    assert found.alpha_s == pytest.approx(3e-4) and found.beta_s_per_byte == pytest.approx(2e-9)
    assert fit(loads, [1e-3, 0.5e-3]) == LinkCosts(1e-3 / 4, 0.0)


def a_rank_dies(kind: str) -> None:
    routes = TwoLevelRoutes(mesh_of(2))
    if dist.get_rank() == 3:
        os._exit(1)
    for _ in range(3):
        getattr(routes, kind)(torch.zeros(8), [2] * 4).wait()


@pytest.mark.parametrize("kind", ["publish", "reduce"])
def test_a_rank_that_dies_ends_the_legs_of_all(kind: str) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(4, a_rank_dies, kind)
    text = str(caught.value)
    assert "rank 3: died" in text and text.count("RuntimeError") >= 3, text


EXIT = """
import sys, time, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from dmuon.ownership.two_level import TwoLevelRoutes
rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
routes = TwoLevelRoutes(init_device_mesh("cpu", (2, 1)))
if how == "leave":
    for _ in range(3):
        pending = routes.publish(torch.zeros(100000), [50000] * 2), routes.reduce(torch.zeros(8), [4] * 2)
elif rank == 0:
    routes.publish(torch.zeros(8), [4] * 2)
    raise ValueError("the script's own")
else:
    time.sleep(3600)
"""


def run_script(tmp_path: Path, how: str) -> tuple[list[subprocess.Popen[str]], str]:
    """Two processes of EXIT; both, and what the first wrote to stderr before it ended."""
    (tmp_path / "script.py").write_text(EXIT)
    command = [sys.executable, str(tmp_path / "script.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), how],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        _, errors = ranks[0].communicate(timeout=120)
        if how == "leave":
            errors += ranks[1].communicate(timeout=120)[1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return ranks, errors


@pytest.mark.slow
def test_legs_under_way_end_with_the_script(tmp_path: Path) -> None:
    ranks, errors = run_script(tmp_path, "leave")
    assert [rank.returncode for rank in ranks] == [0, 0] and "Error" not in errors, errors


@pytest.mark.slow
def test_a_script_that_fails_ends_while_legs_wait_for_others(tmp_path: Path) -> None:
    ranks, errors = run_script(tmp_path, "fail")
    assert ranks[0].returncode != 0 and "ValueError: the script's own" in errors


class Stream:
    """Stands in for torch.cuda.Stream: notes what it waits for."""

    names = iter("abcdefgh")

    def __init__(self, log: list[str]) -> None:
        self.name, self.log = next(self.names), log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        return f"what {self.name} has"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_on_streams_legs_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    current = [Stream(log)]

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)

    def leg(x: Tensor) -> Tensor:
        log.append(f"{current[-1].name} runs on {x.item()}")
        return x + 1

    pending = StreamChain(2).run([leg, leg], torch.tensor(1))
    assert pending.wait() == 3 and [x.item() for x in pending.buffers] == [1, 2, 3]
    assert log == [
        "b waits for a", "b waits for what a has", "b runs on 1",
        "c waits for a", "c waits for what b has", "c runs on 2",
        "a waits for what c has",
    ]  # fmt: skip
