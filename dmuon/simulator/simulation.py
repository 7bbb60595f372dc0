"""Strategies to train with, and what a step of each takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dmuon.planner import Plan, given_owners, items_of, make_plan, plan_of_owners
from dmuon.simulator.events import Span
from dmuon.simulator.step import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    GATHER,
    OPTIMIZER,
    REDUCE,
    Moved,
    Optimizer,
    Scenario,
    StepTasks,
    adamw,
    by_owners,
    everything_at_once,
    exchanged,
    gathered,
    owned_of,
)

STRATEGIES = {
    "adamw": "FSDP2 with AdamW",
    "gather": "Muon, gathered",
    "all-to-all": "Muon, all-to-all",
    "round-robin": "DMuon, in turn",
    "greedy": "DMuon, greedy plan",
    "planned": "DMuon, planned",
}
"""Name → title. :func:`~dmuon.simulator.assumptions` says how each works."""

_SHARDED: dict[str, Optimizer] = {"adamw": adamw, "gather": gathered, "all-to-all": exchanged}

BUSIEST, IDLEST = "busiest rank", "idlest rank"

STEPS = 3
"""Simulated in a row; the last one is reported, since the first begins on an idle network."""


@dataclass(frozen=True)
class Simulation:
    """A step of one strategy, in simulated seconds of the busiest rank.

    Args:
        strategy: a name of :data:`STRATEGIES`.
        ranks: of the cluster.
        step: from the end of one optimizer step to the end of the next.
        compute: by kind of work, what the rank computed in that time.
        optimizer: from the last gradient to the end of the optimizer step, its transfers included.
        loads: of each rank, seconds of Newton–Schulz and what surrounds it; of sharded strategies one for all.
        memory: of each rank, bytes; of sharded strategies one for all.
        ways: the seconds of transfers by what they carry and by which collective, such as
            ``("weights", "broadcast")``; those that ran at once both count.
        spans: what ran in that time, from 0 on.
        plan: of the owners.
    """

    strategy: str
    ranks: int
    step: float
    compute: dict[str, float]
    optimizer: float
    loads: tuple[float, ...]
    memory: tuple[float, ...]
    ways: dict[tuple[str, str], float]
    spans: tuple[Span, ...]
    plan: Plan | None

    @property
    def waiting(self) -> float:
        """Seconds in which the rank computed nothing."""
        return self.step - sum(self.compute.values())


def simulate(scenario: Scenario, strategy: str, plan: Plan | None = None) -> Simulation:
    """Simulate a training step.

    Args:
        scenario: what is trained, where and how.
        strategy: a name of :data:`STRATEGIES`.
        plan: the owners; None to make them as ``strategy`` says. Only for strategies with owners.

    Raises:
        ValueError: an unknown strategy, or a plan for another number of ranks or other parameters.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"no strategy {strategy!r}: take {', '.join(STRATEGIES)}")
    if strategy in _SHARDED:
        if plan is not None:
            raise ValueError(f"the strategy {strategy!r} has no owners to plan")
    elif plan is None:
        plan = plan_for(scenario, strategy)
    else:
        names = [routing.name for routing in scenario.workload.owned]
        given_owners(plan, names, scenario.network.cluster.ranks)
    if plan is None:
        tasks, optimizer = StepTasks(scenario, [BUSIEST]), _SHARDED[strategy]
    else:
        ordered = sorted(range(plan.ranks), key=plan.loads.__getitem__)
        shown = {BUSIEST: ordered[-1], IDLEST: ordered[0]}
        tasks, optimizer = StepTasks(scenario, [*shown], owned_of(plan)), by_owners(plan, shown)
    start = tasks.schedule.add("start", OPTIMIZER, 0.0)
    moved = everything_at_once(tasks, dict.fromkeys(tasks.lanes, start))
    begins, ends = [], []

    def watched(tasks: StepTasks, after: list[int]) -> Moved:
        begins.append(tasks.schedule.add("gradients are there", OPTIMIZER, 0.0, (), after))
        return optimizer(tasks, after)

    for _ in range(STEPS):
        moved = tasks.step(moved, watched)
        ends.append(tasks.schedule.add("moved", OPTIMIZER, 0.0, (), moved.lanes.values()))
    spans = tasks.schedule.run()
    first, last = spans[ends[-2]].end, spans[ends[-1]].end
    window = _between(spans, first, last)
    compute = _computed(window)
    return Simulation(
        strategy=strategy,
        ranks=scenario.network.cluster.ranks,
        step=last - first,
        compute=compute,
        optimizer=last - spans[begins[-1]].end,
        loads=tuple(ms * 1e-3 for ms in plan.loads) if plan else (compute[OPTIMIZER],),
        memory=memory_of(scenario, strategy, plan),
        ways=_ways(window),
        spans=window,
        plan=plan,
    )


def plan_for(scenario: Scenario, strategy: str) -> Plan:
    """The plan of ``"round-robin"``, ``"greedy"`` or ``"planned"``, by the scenario's costs."""
    items, cluster = items_of(scenario.workload.owned), scenario.network.cluster
    if strategy == "round-robin":
        owners = {item.name: k % cluster.ranks for k, item in enumerate(items)}
        return plan_of_owners(owners, items, cluster.ranks, scenario.costs)
    return make_plan(
        items,
        cluster.ranks,
        scenario.costs,
        ranks_per_node=cluster.node_ranks,
        method="greedy" if strategy == "greedy" else "best",
    )


KEPT, TRANSIENT = 4, 2
"""Bytes of a weight, gradient or average as kept, in fp32, and of a weight or gradient as it travels, in bf16."""


def memory_of(scenario: Scenario, strategy: str, plan: Plan | None) -> tuple[float, ...]:
    """Bytes of each rank, or of all alike: weights, gradients, state and what is there in passing, no activations."""
    workload, shards = scenario.workload, scenario.network.shards
    owned = sum(routing.numel for routing in workload.owned)
    largest = max((block.numel for block in workload.blocks), default=0)
    published = 2 * largest if scenario.zero3 else workload.numel - workload.root.numel
    passing = TRANSIENT * (published + workload.root.numel + 2 * largest)
    # AdamW keeps two averages beside weight and gradient, Muon one.
    rest = 4 * KEPT * workload.rest / shards + passing
    if plan is not None:
        return tuple(kept + rest for kept in plan.memory)
    if strategy == "adamw":
        return (4 * KEPT * workload.numel / shards + passing,)
    whole = max(matrix.rows * matrix.cols for routing in workload.owned for matrix in routing.matrices)
    return (3 * KEPT * owned / shards + rest + 3 * TRANSIENT * whole,)


def _between(spans: Iterable[Span], first: float, last: float) -> tuple[Span, ...]:
    """What kept a lane busy between two moments, as seconds since the first."""
    return tuple(
        replace(span, start=max(span.start, first) - first, end=min(span.end, last) - first)
        for span in spans
        if span.lanes and span.start < last and span.end > max(first, span.start)
    )


def _computed(spans: Iterable[Span]) -> dict[str, float]:
    found = dict.fromkeys((FORWARD, BACKWARD, OPTIMIZER), 0.0)
    for span in spans:
        if span.lanes == (BUSIEST,):
            found[span.kind] += span.end - span.start
    return found


def _ways(spans: Iterable[Span]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for span in spans:
        if span.kind in (GATHER, REDUCE, EXCHANGE):
            key = (span.kind, span.name.rpartition(": ")[2])
            found[key] = found.get(key, 0.0) + span.end - span.start
    return found
