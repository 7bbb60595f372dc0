"""All strategies side by side: at one number of ranks, and as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dmuon.planner import Plan
from dmuon.simulator.machines import Cluster
from dmuon.simulator.network import Network
from dmuon.simulator.simulation import STRATEGIES, Simulation, simulate
from dmuon.simulator.step import Scenario


@dataclass(frozen=True)
class Comparison:
    """Every strategy on ``ranks`` ranks, in the order of :data:`STRATEGIES`."""

    ranks: int
    simulations: tuple[Simulation, ...]

    def of(self, strategy: str) -> Simulation:
        return next(each for each in self.simulations if each.strategy == strategy)

    def overhead(self, strategy: str) -> float:
        """How much longer a step is than AdamW's: 0.02 is 2%."""
        return self.of(strategy).step / self.of("adamw").step - 1


def compare(scenario: Scenario, plan: Plan | None = None) -> Comparison:
    """Simulate every strategy; ``plan`` is what ``"planned"`` takes, None for the planner's."""
    given = {"planned": plan} if plan else {}
    found = tuple(simulate(scenario, strategy, given.get(strategy)) for strategy in STRATEGIES)
    return Comparison(scenario.network.cluster.ranks, found)


def at_ranks(scenario: Scenario, ranks: int) -> Scenario:
    """The same on another number of ranks.

    Raises:
        ValueError: they do not fill nodes.
    """
    network = scenario.network
    cluster = Cluster(network.cluster.machine, ranks)
    return replace(scenario, network=Network(cluster, network.hybrid, network.itemsize))


def scale(scenario: Scenario, ranks: Sequence[int]) -> list[Comparison]:
    """Compare at each of ``ranks``."""
    return [compare(at_ranks(scenario, each)) for each in ranks]
