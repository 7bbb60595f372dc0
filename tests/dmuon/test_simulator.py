"""The simulator against sums made by hand, and against every rank simulated by itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dmuon.autotune import Cost
from dmuon.models import load_shapes, shape_spec
from dmuon.planner import items_of, plan_of_owners
from dmuon.simulator import (
    STRATEGIES,
    Cluster,
    Link,
    Machine,
    MachineCosts,
    Network,
    Scenario,
    load_machine,
    machine_names,
    plan_for,
    simulate,
    workload_of,
)
from dmuon.simulator import simulation as simulation_module
from dmuon.simulator.events import Schedule
from dmuon.simulator.network import ACROSS, INSIDE
from dmuon.simulator.step import StepTasks, by_owners, everything_at_once, owned_of

MB = 10**6


def machine(**changes: Any) -> Machine:
    """Round figures: 1 Gop/s, 1 GB/s memory, 100 MB/s inside a node of 4, 10 MB/s across, no latency."""
    values: dict[str, Any] = {
        "name": "toy",
        "device": "cuda:toy",
        "ranks_per_node": 4,
        "memory": 1e9,
        "peak": dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), 1e9),
        "training": 1.0,
        "products": 1.0,
        "memory_rate": 1e9,
        "launch": 0.0,
        "call": 0.0,
        "inside": Link(100e6, 0.0),
        "across": Link(10e6, 0.0),
        "overlaps": True,
        "sources": {},
    }
    return Machine(**{**values, **changes})


def scenario(
    ranks: int, tokens: int = 100, model: str = "gpt2", hybrid: bool = False, **changes: Any
) -> Scenario:
    toy = machine(**changes)
    network = Network(Cluster(toy, ranks), hybrid)
    return Scenario(workload_of(load_shapes(model)), network, MachineCosts(toy, "fp16"), tokens)


def test_tasks_follow_each_other_and_share_lanes() -> None:
    schedule = Schedule()
    first = schedule.add("first", "", 2.0, ("a",))
    second = schedule.add("second", "", 1.0, ("a",))  # ready as soon, so it waits for the lane
    both = schedule.add("both", "", 1.0, ("a", "b"), [first])
    beside = schedule.add("beside", "", 5.0, ("b",), [second])  # ready after `both`, which has waited longer
    delay = schedule.add("delay", "", 10.0, (), [first, second])
    spans = schedule.run()
    found = {span.name: (span.start, span.end) for span in spans}
    assert found == {
        "first": (0, 2), "second": (2, 3), "both": (3, 4), "beside": (4, 9), "delay": (3, 13),
    }  # fmt: skip
    assert [spans[k].name for k in (first, both, delay, beside)] == ["first", "both", "delay", "beside"]


def test_collectives_by_hand() -> None:
    network = Network(Cluster(machine(inside=Link(100e6, 0.5), call=0.25), 4))
    [leg] = network.gather(50 * MB)  # 100 MB of bf16, three quarters of which come through each link
    assert leg.seconds == pytest.approx(0.75 + 0.25 + 3 * 0.5)
    [leg] = network.reduce(50 * MB)
    assert leg.seconds == pytest.approx(1.5 + 0.25 + 3 * 0.5)
    assert leg.lanes == (INSIDE,)
    flat = Network(Cluster(machine(), 8))
    [leg] = flat.gather(50 * MB)  # 7/8 of 100 MB over the four adapters of a node
    assert leg.seconds == pytest.approx(87.5 / 40) and leg.lanes == (INSIDE, ACROSS)
    [leg] = flat.redistribute(50 * MB)  # to each of four strangers an eighth, over one adapter
    assert leg.seconds == pytest.approx(4 * 12.5 / 10)
    hybrid = Network(Cluster(machine(), 8), hybrid=True)
    assert [leg.seconds for leg in hybrid.gather(50 * MB)] == pytest.approx([0.75])
    # 200 MB of fp32: scattered inside, then each rank's 50 MB summed by two nodes and spread to both.
    assert [leg.seconds for leg in hybrid.reduce(50 * MB)] == pytest.approx([1.5, 50 / 10])
    assert [leg.lanes for leg in hybrid.reduce(1)] == [(INSIDE,), (ACROSS,)]


def test_owners_collectives_by_hand() -> None:
    flat = Network(Cluster(machine(), 8))
    one, even = {0: 50 * MB}, dict.fromkeys(range(8), 5 * MB)
    [leg] = flat.publish(one)
    assert (leg.way, leg.seconds) == ("broadcast", pytest.approx(100 / 40))
    [leg] = flat.publish(even)
    assert (leg.way, leg.seconds) == ("all_gather", pytest.approx(70 / 40))
    # To one owner: 4 × 100 MB of bf16 over its own adapter, or 200 MB of sums over the node's four.
    [leg] = flat.to_owners(one)
    assert (leg.way, leg.seconds) == ("reduce", pytest.approx(200 / 40))
    # To all owners: 4 × 10 MB over an adapter each, or 7 × 20 MB of sums over four.
    [leg] = flat.to_owners(even)
    assert (leg.way, leg.seconds) == ("reduce_scatter", pytest.approx(140 / 40))


def test_over_two_levels_the_busiest_adapter_counts() -> None:
    hybrid = Network(Cluster(machine(), 16), hybrid=True)
    # Ranks 0 and 4 are at one place of two nodes, and send through one column of adapters; 0 and 5 through two.
    together, apart = {0: 50 * MB, 4: 50 * MB}, {0: 50 * MB, 5: 50 * MB}
    assert [leg.seconds for leg in hybrid.publish(together)] == pytest.approx([200 / 10, 200 / 100])
    assert [leg.seconds for leg in hybrid.publish(apart)] == pytest.approx([100 / 10, 200 / 100])
    inside, across = hybrid.to_owners(apart)
    assert inside.seconds == pytest.approx(300 / 100)  # bf16 as it is, from three neighbours each
    assert across.seconds == pytest.approx(200 / 10)  # fp32 sums, added up on their way through four nodes


def test_several_calls_turn_around_the_ring_twice() -> None:
    network = Network(Cluster(machine(inside=Link(100e6, 0.1), call=0.01, ranks_per_node=32), 32))
    [one], [three] = network.publish({0: 50 * MB}), network.publish(dict.fromkeys((0, 1, 2), 50 * MB))
    assert (one.way, one.seconds) == ("broadcast", pytest.approx(1.0 + 0.01 + 3.1))
    assert (three.way, three.seconds) == ("broadcast", pytest.approx(3.0 + 0.03 + 2 * 3.1))


def test_no_more_than_two_blocks_weights_are_there() -> None:
    spans = simulate(scenario(4, tokens=10**6), "adamw").spans
    layers = [f"transformer.h.{k}" for k in range(12)]
    begins = {(span.kind, span.name.partition(":")[0]): span.start for span in reversed(spans)}
    ends = {(span.kind, span.name): span.end for span in spans}
    for before, layer in zip(layers[:-2], layers[2:], strict=True):
        assert begins["weights", layer] >= ends["forward", before]
    backwards = [span.start for span in spans if span.kind == "weights" and span.name.startswith(layers[0])]
    assert backwards[-1] >= ends["backward", layers[2]]


def test_blocks_cover_the_model_and_count_its_products() -> None:
    shapes = load_shapes("gpt2")
    workload = workload_of(shapes)
    assert [block.name for block in workload.blocks] == [f"transformer.h.{k}" for k in range(12)]
    assert workload.numel == shapes.numel
    assert {routing.name for routing in workload.owned} == {r.name for r in shapes.parameters if r.matrices}
    width = 768
    assert {block.products for block in workload.blocks} == {12 * width**2}
    assert workload.root.products == 50257 * width  # the head, tied to the embedding; no positions
    untied = workload_of(load_shapes("qwen2.5-7b"))
    assert untied.root.products == 152064 * 3584  # the head alone, not the embedding


def test_experts_compute_for_some_tokens() -> None:
    block = workload_of(load_shapes("qwen3-30b-a3b")).blocks[0]
    active = 8 * 3 * 768 * 2048
    attention = 2048 * (2 * 4096 + 2 * 512)
    assert block.products == pytest.approx(active + attention + 128 * 2048)


def test_one_rank_takes_the_sum_of_its_work() -> None:
    alone = scenario(1)
    found = simulate(alone, "adamw")
    products = 12 * 12 * 768**2 + 50257 * 768
    assert found.compute["forward"] == pytest.approx(2 * products * 100 / 1e9)
    assert found.compute["backward"] == pytest.approx(2 * found.compute["forward"])
    assert found.compute["optimizer"] == pytest.approx(alone.workload.numel * 28 / 1e9)
    assert found.step == pytest.approx(sum(found.compute.values())) and found.waiting == pytest.approx(0)
    owned = simulate(alone, "planned")
    assert owned.compute["optimizer"] == pytest.approx(owned.loads[0] + alone.workload.rest * 28 / 1e9)


def test_transfers_hide_behind_much_computation_and_else_bound_the_step() -> None:
    ample = scenario(4, tokens=10**6)
    [weights] = ample.network.gather(ample.workload.blocks[0].numel)
    [root] = ample.network.gather(ample.workload.root.numel)
    [block], [last] = (
        ample.network.reduce(each.numel) for each in (ample.workload.blocks[0], ample.workload.root)
    )
    found = simulate(ample, "adamw")
    # Exposed: what the first block waits for, and what is left when the backward has come to it.
    exposed = root.seconds + weights.seconds + block.seconds + last.seconds
    assert found.waiting == pytest.approx(exposed)
    scarce = simulate(scenario(4, tokens=1), "adamw")
    moved = 2 * 12 * weights.seconds - weights.seconds + root.seconds + 12 * block.seconds + last.seconds
    # Nothing travels while the head computes.
    head = 3 * 2 * scenario(4).workload.root.products / 1e9
    assert scarce.step == pytest.approx(moved + head + scarce.compute["optimizer"], rel=0.005)
    kept = simulate(replace(scenario(4, tokens=1), zero3=False), "adamw")
    # Eleven gathers more, behind one of which a block's backward is hidden.
    hidden = 4 * 12 * 768**2 / 1e9
    assert scarce.step - kept.step == pytest.approx(11 * weights.seconds - hidden)


def test_without_overlap_everything_adds_up() -> None:
    found = simulate(scenario(4, overlaps=False), "adamw")
    assert found.waiting == pytest.approx(sum(found.ways.values()))


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("strategy", ["round-robin", "planned"])
def test_busiest_rank_stands_for_all(strategy: str, hybrid: bool) -> None:
    setting = scenario(20, tokens=400, hybrid=hybrid)
    plan = plan_for(setting, strategy)
    every = {f"rank {rank}": rank for rank in range(20)}
    tasks = StepTasks(setting, [*every], owned_of(plan))
    start = tasks.schedule.add("start", "", 0.0)
    moved, ends = everything_at_once(tasks, dict.fromkeys(every, start)), []
    for _ in range(3):
        moved = tasks.step(moved, by_owners(plan, every))
        ends.append(tasks.schedule.add("moved", "", 0.0, (), moved.lanes.values()))
    spans = tasks.schedule.run()
    assert len({round(load, 9) for load in plan.loads}) > 1
    expected = spans[ends[2]].end - spans[ends[1]].end
    assert simulate(setting, strategy, plan).step == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_third_step_is_as_any_later(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = scenario(8, tokens=400)
    third = simulate(setting, strategy)
    monkeypatch.setattr(simulation_module, "STEPS", 7)
    assert simulate(setting, strategy).step == pytest.approx(third.step, rel=1e-9)


def test_weights_go_as_soon_as_their_owners_are_done() -> None:
    setting = scenario(4, tokens=10**5)
    names = [routing.name for routing in setting.workload.owned]

    def forward_begins(strategy: str, owners: dict[str, int] | None = None) -> float:
        plan = (
            None
            if owners is None
            else plan_of_owners(owners, items_of(setting.workload.owned), 4, setting.costs)
        )
        spans = simulate(setting, strategy, plan).spans
        return min(span.start for span in spans if span.kind == "forward" and span.lanes == ("busiest rank",))

    # AdamW moves everything at once, and then all wait for weights. Rank 1 is done with the first block long before
    # rank 0 is done with all others; but if that one comes last on rank 0, its weights do, too.
    assert forward_begins("adamw") > 0
    assert forward_begins("planned", {name: int(".h.0." in name) for name in names}) == 0
    assert forward_begins("planned", dict.fromkeys(names, 0)) > 0


def test_memory_by_hand() -> None:
    setting = scenario(4)
    workload = setting.workload
    passing = 2 * (4 * workload.blocks[0].numel + workload.root.numel)
    assert simulate(setting, "adamw").memory == (pytest.approx(16 * workload.numel / 4 + passing),)
    planned = simulate(setting, "planned")
    owned = sum(routing.numel for routing in workload.owned)
    assert planned.plan is not None
    working = sum(planned.plan.memory) - 12 * owned
    assert working > 0
    assert sum(planned.memory) == pytest.approx(12 * owned + working + 16 * workload.rest + 4 * passing)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_thousands_of_ranks_take_seconds(strategy: str) -> None:
    h100 = load_machine("h100")
    setting = Scenario(
        workload_of(load_shapes("llama-3.1-8b")),
        Network(Cluster(h100, 4096), True),
        MachineCosts(h100, "fp16"),
        8192,
    )
    assert simulate(setting, strategy).step > 0


def test_measured_costs_come_first() -> None:
    @dataclass
    class Steps:
        """As StepCosts, which has measured whole steps of some shape if ``measured`` is not empty."""

        measured: dict[tuple[int, int], dict[int, float]]
        table: Any = field(default_factory=lambda: SimpleNamespace(calibrated=False))

        def cost(self, rows: int, cols: int, batch: int) -> Cost:
            return Cost(1234.0, "measured")

    toy = machine()
    known, unknown = Steps({(8, 8): {1: 1.0}}), Steps({})
    costs = MachineCosts(toy, "fp16", measured=known)  # type: ignore[arg-type]
    assert costs.cost(100, 100, 1) == Cost(1234.0, "measured") and costs.source.startswith(
        "measured on cuda:toy"
    )
    costs = MachineCosts(toy, "fp16", measured=unknown)  # type: ignore[arg-type]
    assert costs.cost(100, 100, 1).source == "default" and "no such device" in costs.source


def test_modelled_costs_by_hand() -> None:
    costs = MachineCosts(machine(memory_rate=1e18), "fp16")
    m, n = 100, 400
    # 6m²n + 14m³ with one restart; 20m²n + 10m³ for the standard form, half of it with half products.
    assert costs.cost(m, n, 3).ms == pytest.approx(3 * (6 * m * m * n + 14 * m**3) / 1e9 * 1e3)
    assert costs.plain(n, m) == pytest.approx((20 * m * m * n + 10 * m**3) / 1e9)
    assert costs.plain(n, m, half=True) == pytest.approx((15 * m * m * n + 5 * m**3) / 1e9)


def test_unknown_strategy_or_foreign_plan_is_refused() -> None:
    setting = scenario(4)
    with pytest.raises(ValueError, match=r"no strategy 'magic'.*planned"):
        simulate(setting, "magic")
    with pytest.raises(ValueError, match="no owners to plan"):
        simulate(setting, "adamw", plan_for(setting, "greedy"))
    with pytest.raises(ValueError, match="ranks"):
        simulate(setting, "planned", plan_for(scenario(8), "greedy"))
    with pytest.raises(ValueError, match="do not fill nodes of 4"):
        scenario(6)
    with pytest.raises(ValueError, match="at least 1"):
        scenario(0)


def test_machines_are_complete_and_name_their_sources() -> None:
    assert machine_names() == ("a800", "h100", "h200")
    for name in machine_names():
        found = load_machine(name)
        assert found.sources and found.inside.rate > found.across.rate
    assert load_machine("H100", ranks_per_node=4).ranks_per_node == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"memory_gb": -1}, "memory_gb must be a positive number, got -1"),
        ({"memory_gb": True}, "memory_gb must be a positive number, got True"),
        ({"overlaps": 1}, "overlaps must be true or false, got 1"),
        ({"ranks_per_node": 2.5}, "ranks_per_node must be a positive integer, got 2.5"),
        ({"inside": {"gb_per_s": 1}}, "inside has the fields gb_per_s, hop_us, got gb_per_s"),
        (
            {"achieved": {"training": 1.5, "products": 1, "memory": 1}},
            "training must be .* at most 1, got 1.5",
        ),
        ({"extra": 1}, "a machine has the fields"),
        ({"sources": "my own"}, "sources must be an object"),
    ],
)
def test_errors_in_machine_files_name_the_field(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    import dmuon.simulator

    shipped = Path(dmuon.simulator.__file__).parent / "machines" / "h100.json"
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(json.loads(shipped.read_text()) | changes))
    with pytest.raises(ValueError, match=rf"mine\.json: {says}"):
        load_machine(str(path))


def test_missing_machines_are_named() -> None:
    with pytest.raises(ValueError, match="no machine 'b300': take a800, h100, h200 or"):
        load_machine("b300")
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load_machine("none.json")


def test_a_model_of_one_shape_has_no_blocks() -> None:
    toy = machine()
    workload = workload_of(shape_spec("64x256", 3))
    found = simulate(Scenario(workload, Network(Cluster(toy, 4)), MachineCosts(toy, "fp16"), 10), "planned")
    assert workload.blocks == () and found.step > 0
