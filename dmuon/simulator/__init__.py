"""What a training step takes on a cluster that is not at hand: simulated, for several ways to train."""

from __future__ import annotations

from dmuon.simulator.assumptions import assumptions
from dmuon.simulator.costs import MachineCosts
from dmuon.simulator.machines import Cluster, Link, Machine, load_machine, machine_names
from dmuon.simulator.network import Network
from dmuon.simulator.simulation import STRATEGIES, Simulation, plan_for, simulate
from dmuon.simulator.step import Scenario
from dmuon.simulator.study import Comparison, at_ranks, compare, scale
from dmuon.simulator.workload import Block, Workload, workload_of

__all__ = [
    "STRATEGIES",
    "Block",
    "Cluster",
    "Comparison",
    "Link",
    "Machine",
    "MachineCosts",
    "Network",
    "Scenario",
    "Simulation",
    "Workload",
    "assumptions",
    "at_ranks",
    "compare",
    "load_machine",
    "machine_names",
    "plan_for",
    "scale",
    "simulate",
    "workload_of",
]
