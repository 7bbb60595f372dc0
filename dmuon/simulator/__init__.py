"""What a training step takes on a cluster that is not at hand: simulated, for several ways to train."""

from __future__ import annotations

from dmuon.simulator.costs import MachineCosts
from dmuon.simulator.machines import Cluster, Link, Machine, load_machine, machine_names
from dmuon.simulator.network import Network
from dmuon.simulator.simulation import STRATEGIES, Simulation, plan_for, simulate
from dmuon.simulator.step import Scenario
from dmuon.simulator.workload import Block, Workload, workload_of

__all__ = [
    "STRATEGIES",
    "Block",
    "Cluster",
    "Link",
    "Machine",
    "MachineCosts",
    "Network",
    "Scenario",
    "Simulation",
    "Workload",
    "load_machine",
    "machine_names",
    "plan_for",
    "simulate",
    "workload_of",
]
