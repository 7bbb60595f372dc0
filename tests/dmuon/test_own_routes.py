"""By which way parts of buffers travel, and that every way brings the same."""

from __future__ import annotations

import json
import os
import warnings
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from own_models import Training, build, mesh_of, train_both
from own_processes import run_ranks
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
from dmuon.ownership.two_level import TwoLevelRoutes

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
    for way in WAYS["reduce"]:
        half = reduction_error(
            lambda *args, way=way: reducing.reduce(*args, way), SIZES[0], rank, routes.order, torch.bfloat16
        )
        if half > 1e-6:
            wrong.append(f"bf16 was rounded on the way by {way}: {half}")
    # A lone owner would get this from three ranks: as a sum in fp32 it crosses once.
    routes.statistics.reset()
    reducing.reduce(torch.zeros(8 * MB, dtype=torch.bfloat16), [8 * MB, 0, 0, 0]).wait()
    (counted,) = routes.statistics.as_dict()["exchanges"]
    if counted["way"] != "reduce":
        wrong.append(f"a lone large part in bf16 goes by {counted}")
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


def one_knows(cache: str, rank: int) -> dict[str, GroupCosts]:
    """What is known where ranks have caches of their own, and only ``rank``'s has something."""
    os.environ["DMUON_CACHE"] = cache if dist.get_rank() == rank else f"{cache}/nothing"
    return known_network(mesh_of(2), Control(list(range(4))))


@pytest.mark.case(row="R8")
def test_what_was_measured_is_kept_by_topology_and_what_rank_0_knows_counts(tmp_path: Path) -> None:
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
    for rank, known in ((0, results[0]["known"]), (1, {})):
        assert run_ranks(4, one_knows, str(tmp_path), rank) == [known] * 4


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


def spoilt(cache: str) -> list[tuple[str, str]]:
    """What is warned of a file that was measured and is then written over, by what is written, and its path."""
    os.environ["DMUON_CACHE"] = cache
    measure_network(mesh_of())
    (kept,) = (Path(cache) / "network").iterdir()
    warned = []
    for text in ("{", "[]", '{"levels": {"flat": {"publish": {"broadcast": {"alpha": 1}}}}}'):
        kept.write_text(text)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert known_network(mesh_of(), Control([0])) == {}
        warned += [(str(kept), str(warning.message)) for warning in caught]
    return warned


def test_a_spoilt_file_is_left_aside(tmp_path: Path) -> None:
    (warned,) = run_ranks(1, spoilt, str(tmp_path))
    assert len(warned) == 3
    assert all(message.startswith(f"{path} is left aside") for path, message in warned)


def test_costs_are_fitted() -> None:
    def seconds(calls: int, nbytes: int) -> float:
        return 3e-4 * calls + 2e-9 * nbytes

    loads = [(4, 1000), (4, 10**6)]
    found = fit(loads, [seconds(*load) for load in loads])
    assert found.alpha_s == pytest.approx(3e-4) and found.beta_s_per_byte == pytest.approx(2e-9)
    assert fit(loads, [1e-3, 0.5e-3]) == LinkCosts(1e-3 / 4, 0.0)
