"""A training step as tasks: forward, backward, optimizer, and what travels beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dmuon.planner import Plan
from dmuon.simulator.costs import MachineCosts
from dmuon.simulator.events import Schedule
from dmuon.simulator.network import Leg, Network
from dmuon.simulator.workload import Block, Workload

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
GATHER, REDUCE, EXCHANGE = "weights", "gradients", "optimizer's transfers"


@dataclass(frozen=True)
class Scenario:
    """What is trained, where and how.

    Args:
        workload: the model.
        network: the cluster's.
        costs: of the optimizer's work.
        tokens: of one rank in a step.
        zero3: weights are freed after the forward and gathered again, or else kept (ZeRO-2).
        compute: the precision of forwards and backwards.
    """

    workload: Workload
    network: Network
    costs: MachineCosts
    tokens: int
    zero3: bool = True
    compute: str = "bf16"


@dataclass(frozen=True)
class Moved:
    """The tasks after which an optimizer step is over: on each compute lane, and for each block (-1: the root)."""

    lanes: dict[str, int]
    blocks: dict[int, list[int]]


Optimizer = Callable[["StepTasks", list[int]], Moved]
"""Adds an optimizer step that starts after the given tasks."""


class StepTasks:
    """Adds the tasks of training steps to a schedule.

    Every rank computes the same in forward and backward, and collectives wait for all ranks. So a rank whose
    optimizer step takes longer is never ahead of another, and the busiest alone decides when collectives start:
    ranks of less work need no lane, but for one to be looked at.

    Args:
        scenario: what is trained, where and how.
        lanes: the ranks to follow; the busiest must be among them.
        owned_of: a block's owned elements by owner; None where FSDP has everything.
    """

    def __init__(
        self,
        scenario: Scenario,
        lanes: Sequence[str],
        owned_of: Callable[[Block], Mapping[int, int]] | None = None,
    ) -> None:
        self.scenario, self.lanes, self.schedule = scenario, tuple(lanes), Schedule()
        self._owned_of = owned_of

    def step(self, before: Moved, optimizer: Optimizer) -> Moved:
        """Add one step: a forward with the weights of ``before``, a backward, and ``optimizer``'s step."""
        blocks, root = self.scenario.workload.blocks, self.scenario.workload.root
        rate = self.scenario.network.cluster.machine.peak[self.scenario.compute]
        rate *= self.scenario.network.cluster.machine.training / (2 * self.scenario.tokens)
        lanes, last = dict(before.lanes), len(blocks) - 1
        root_here = self._gather(root, before.blocks[-1])
        # Until a block starts, its predecessor's weights are in use, and there is room for no third.
        started = [[*lanes.values()]]
        here = root_here
        for k, block in enumerate(blocks):
            here = self._gather(block, [*before.blocks[k], *here, *(started[k - 1] if k else ())])
            lanes = self._compute(block.name, FORWARD, block.products / rate, lanes, here)
            started.append([*lanes.values()])
        lanes = self._compute("head", FORWARD, root.products / rate, lanes, root_here)
        lanes = self._compute("head", BACKWARD, 2 * root.products / rate, lanes, [])
        started, reduced = [[*lanes.values()]], []
        for k, block in reversed([*enumerate(blocks)]):
            if self.scenario.zero3 and k < last:
                here = self._gather(block, [*here, *started[max(0, last - k - 1)]])
            lanes = self._compute(block.name, BACKWARD, 2 * block.products / rate, lanes, here)
            started.append([*lanes.values()])
            reduced += self._reduce(block, lanes.values())
        reduced += self._reduce(root, lanes.values())
        return optimizer(self, [*reduced, *lanes.values()])

    def compute(self, name: str, seconds: float, lane: str, after: Iterable[int]) -> int:
        """Add work of the optimizer on a lane."""
        return self.schedule.add(name, OPTIMIZER, seconds, (lane,), after)

    def transfer(self, name: str, kind: str, legs: Sequence[Leg], after: Iterable[int]) -> int:
        """Add a collective of all ranks; returns its last leg."""
        number, overlaps = -1, self.scenario.network.cluster.machine.overlaps
        for leg in legs:
            lanes = leg.lanes if overlaps else (*leg.lanes, *self.lanes)
            number = self.schedule.add(f"{name}: {leg.way}", kind, leg.seconds, lanes, after)
            after = [number]
        return number

    def _compute(
        self, name: str, kind: str, seconds: float, lanes: dict[str, int], here: Sequence[int]
    ) -> dict[str, int]:
        return {
            lane: self.schedule.add(name, kind, seconds, (lane,), [before, *here])
            for lane, before in lanes.items()
        }

    def _gather(self, block: Block, after: Sequence[int]) -> list[int]:
        network, name = self.scenario.network, block.name or "root"
        if self._owned_of is None:
            return [self.transfer(name, GATHER, network.gather(block.numel), after)]
        parts = [network.publish(self._owned_of(block))] if block.owned else []
        parts += [network.gather(block.rest)] if block.rest else []
        return [self.transfer(name, GATHER, legs, after) for legs in parts]

    def _reduce(self, block: Block, after: Iterable[int]) -> list[int]:
        network, name = self.scenario.network, block.name or "root"
        if self._owned_of is None:
            return [self.transfer(name, REDUCE, network.reduce(block.numel), after)]
        after = [*after]
        parts = [network.to_owners(self._owned_of(block))] if block.owned else []
        parts += [network.reduce(block.rest)] if block.rest else []
        return [self.transfer(name, REDUCE, legs, after) for legs in parts]


def everything_at_once(tasks: StepTasks, lanes: dict[str, int]) -> Moved:
    """All blocks have moved when all lanes are done."""
    blocks = range(-1, len(tasks.scenario.workload.blocks))
    return Moved(lanes, {k: [*lanes.values()] for k in blocks})


def adamw(tasks: StepTasks, after: list[int]) -> Moved:
    """AdamW of every shard."""
    scenario = tasks.scenario
    seconds = scenario.costs.adamw(scenario.workload.numel / scenario.network.shards)
    lanes = {lane: tasks.compute("AdamW", seconds, lane, after) for lane in tasks.lanes}
    return everything_at_once(tasks, lanes)


def gathered(tasks: StepTasks, after: list[int]) -> Moved:
    """Muon that gathers every matrix on every rank, where all orthogonalise it; one after the other."""
    scenario, lanes = tasks.scenario, _adamw_of_rest(tasks, after)
    for routing in scenario.workload.owned:
        legs = scenario.network.gather(routing.numel)
        whole = tasks.transfer(routing.name, EXCHANGE, legs, lanes.values())
        seconds = sum(each.batch * scenario.costs.plain(each.rows, each.cols) for each in routing.matrices)
        lanes = {lane: tasks.compute(routing.name, seconds, lane, [whole]) for lane in tasks.lanes}
    return everything_at_once(tasks, lanes)


def exchanged(tasks: StepTasks, after: list[int]) -> Moved:
    """Muon by all-to-all: of as many equal matrices as there are shards each rank gets one, whole, and returns it."""
    scenario, lanes = tasks.scenario, _adamw_of_rest(tasks, after)
    shards, network = scenario.network.shards, scenario.network
    counts: dict[tuple[int, int], int] = {}
    for routing in scenario.workload.owned:
        for matrix in routing.matrices:
            counts[matrix.rows, matrix.cols] = counts.get((matrix.rows, matrix.cols), 0) + matrix.batch
    returned = []
    for (rows, cols), count in counts.items():
        seconds = scenario.costs.plain(rows, cols, half=True)
        for _ in range(-(-count // shards)):
            # A round that is not full moves padding as well.
            legs = network.redistribute(rows * cols * shards)
            name = f"{min(count, shards)} × {rows}×{cols}"
            whole = tasks.transfer(name, EXCHANGE, legs, after)
            lanes = {lane: tasks.compute(name, seconds, lane, [lanes[lane], whole]) for lane in tasks.lanes}
            returned.append(tasks.transfer(name, EXCHANGE, legs, lanes.values()))
    ends = {
        lane: tasks.schedule.add("returned", OPTIMIZER, 0.0, (), [end, *returned])
        for lane, end in lanes.items()
    }
    return everything_at_once(tasks, ends)


def by_owners(plan: Plan, lanes: Mapping[str, int]) -> Optimizer:
    """Owners that move what they own; a block's weights may go as soon as all of its owners are done with it.

    ``lanes`` has the rank that each lane follows.
    """
    moved = _moved(plan)

    def optimizer(tasks: StepTasks, after: list[int]) -> Moved:
        workload = tasks.scenario.workload
        begin = tasks.schedule.add("begin", OPTIMIZER, 0.0, (), after)
        rest = tasks.scenario.costs.adamw(workload.rest / tasks.scenario.network.shards)
        ends = _adamw_of_rest(tasks, [begin])
        for lane, rank in lanes.items():
            for batch in plan.batches[rank]:
                name = f"{batch.count} × {batch.rows}×{batch.cols}"
                ends[lane] = tasks.compute(name, batch.ms * 1e-3, lane, [ends[lane]])
        blocks = {}
        for k, block in ((-1, workload.root), *enumerate(workload.blocks)):
            seconds = rest + max((moved[routing.name] for routing in block.owned), default=0.0)
            blocks[k] = [tasks.schedule.add(f"{block.name} moved", OPTIMIZER, seconds, (), [begin])]
        return Moved(ends, blocks)

    return optimizer


def owned_of(plan: Plan) -> Callable[[Block], Mapping[int, int]]:
    """Block → elements by owner."""

    def elements(block: Block) -> Mapping[int, int]:
        found: dict[int, int] = {}
        for routing in block.owned:
            (rank,) = plan.owners[routing.name]
            found[rank] = found.get(rank, 0) + routing.numel
        return found

    return elements


def _moved(plan: Plan) -> dict[str, float]:
    """Name → seconds of its owner's step after which all of the parameter has moved."""
    found: dict[str, float] = {}
    for batches in plan.batches:
        for batch, ms in zip(batches, accumulate(batch.ms for batch in batches), strict=True):
            found.update(dict.fromkeys((name for name, _ in batch.pieces), ms * 1e-3))
    return found


def _adamw_of_rest(tasks: StepTasks, after: Sequence[int]) -> dict[str, int]:
    scenario = tasks.scenario
    seconds = scenario.costs.adamw(scenario.workload.rest / scenario.network.shards)
    return {lane: tasks.compute("AdamW", seconds, lane, after) for lane in tasks.lanes}
