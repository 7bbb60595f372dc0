"""What ``dmuon-tune plan`` and ``simulate`` share: their options, and the scenario that these describe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dmuon.cli.errors import bad_input
from dmuon.cli.options import PRECISIONS, coefficients_option, open_store, store_option

if TYPE_CHECKING:
    from dmuon.simulator import Scenario

Command = TypeVar("Command", bound=Callable[..., Any])


def scenario_options(command: Command) -> Command:
    """Where and how to train; pass them all to :func:`scenario_of`."""
    options = (
        click.option(
            "--machine",
            default="h100",
            show_default=True,
            metavar="NAME|FILE",
            help="Devices and links: a800, h100, h200, or a .json file of your own.",
        ),
        click.option(
            "--gpus-per-node", type=click.IntRange(min=1), metavar="N", help="Instead of the machine's."
        ),
        click.option(
            "--hybrid", is_flag=True, help="Shard inside nodes and replicate across them, as on a 2-D mesh."
        ),
        click.option(
            "--zero",
            type=click.Choice(["2", "3"]),
            default="3",
            show_default=True,
            help="Keep weights from forward to backward (2), or free them (3).",
        ),
        click.option(
            "--tokens",
            type=click.IntRange(min=1),
            default=8192,
            show_default=True,
            help="Of one rank in a step.",
        ),
        click.option(
            "--precision",
            type=click.Choice(PRECISIONS),
            default="fp16",
            show_default=True,
            help="Of Newton-Schulz.",
        ),
        coefficients_option,
        store_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def scenario_of(
    model: str,
    ranks: int,
    machine: str,
    gpus_per_node: int | None,
    hybrid: bool,
    zero: str,
    tokens: int,
    precision: str,
    coefficients: str,
    store_path: Path | None,
) -> Scenario:
    """The scenario on ``ranks`` ranks; costs are those in the store where it knows the machine's device."""
    from dmuon.models import load_shapes
    from dmuon.planner import StepCosts
    from dmuon.simulator import Cluster, MachineCosts, Network, Scenario, load_machine, workload_of

    store = open_store(store_path)
    with bad_input():
        described = load_machine(machine, gpus_per_node)
        network = Network(Cluster(described, ranks), hybrid)
        workload = workload_of(load_shapes(model))
        measured = StepCosts(store, described.device, precision, coefficients)
    return Scenario(
        workload,
        network,
        MachineCosts(described, precision, coefficients, measured),
        tokens,
        zero3=zero == "3",
    )
