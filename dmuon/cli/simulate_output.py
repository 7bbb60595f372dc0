"""What ``dmuon-tune simulate`` shows: a table for each number of ranks, and what it rests on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dmuon.names import plural

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dmuon.simulator import Comparison, Scenario, Simulation


def as_document(scenario: Scenario, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """All there is to say about a study, as JSON values. Times are in milliseconds, memory in bytes."""
    from dmuon.simulator import assumptions

    network = scenario.network
    return {
        "simulated": True,
        "model": scenario.workload.name,
        "machine": network.cluster.machine.name,
        "gpus_per_node": network.cluster.machine.ranks_per_node,
        "hybrid": network.hybrid,
        "zero": 3 if scenario.zero3 else 2,
        "tokens": scenario.tokens,
        "precision": scenario.costs.precision,
        "coefficients": scenario.costs.coefficients.key,
        "comparisons": [
            {
                "ranks": comparison.ranks,
                "strategies": [
                    simulation_document(
                        each, comparison.overhead(each.strategy), network.cluster.machine.memory
                    )
                    for each in comparison.simulations
                ],
            }
            for comparison in comparisons
        ],
        "assumptions": list(assumptions(scenario)),
        "sources": dict(network.cluster.machine.sources),
    }


def simulation_document(simulation: Simulation, overhead: float, memory: float) -> dict[str, Any]:
    """One strategy's figures; ``overhead`` is over AdamW's step, ``memory`` what a device has."""
    from dmuon.simulator import STRATEGIES

    return {
        "strategy": simulation.strategy,
        "title": STRATEGIES[simulation.strategy],
        "step_ms": simulation.step * 1e3,
        "over_adamw": overhead,
        **{f"{kind}_ms": seconds * 1e3 for kind, seconds in simulation.compute.items()},
        "waiting_ms": simulation.waiting * 1e3,
        "optimizer_step_ms": simulation.optimizer * 1e3,
        "memory_bytes": max(simulation.memory),
        "memory_of_device": memory,
        "transfers_ms": [
            {"what": what, "way": way, "ms": seconds * 1e3}
            for (what, way), seconds in simulation.ways.items()
        ],
    }


def print_study(document: dict[str, Any], as_json: bool) -> None:
    """The document on stdout, for a program or for a person."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    console.print(f"[bold]{escape(document['model'])}[/], simulated on {escape(document['machine'])}\n")
    for comparison in document["comparisons"]:
        console.print(
            strategies_table(comparison["strategies"], plural(comparison["ranks"], "rank", "ranks")), ""
        )
    print_legend(console, document["assumptions"])


def strategies_table(rows: Sequence[dict[str, Any]], heading: str) -> Table:
    """A row for each strategy."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column(heading, no_wrap=True)
    for name in ("step", "to AdamW", "optimizer", "waiting", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["title"],
            ms_text(row["step_ms"]),
            "" if row["strategy"] == "adamw" else f"{row['over_adamw']:+.1%}",
            ms_text(row["optimizer_step_ms"]),
            ms_text(row["waiting_ms"]),
            f"{row['memory_bytes'] / 1e9:.1f} GB"
            + ("!" if row["memory_bytes"] > row["memory_of_device"] else " "),
        )
    return table


def print_legend(console: Console, assumptions: Sequence[str]) -> None:
    """What the columns mean, and what the figures rest on."""
    console.print(
        "[dim]optimizer: from the last gradient to the last weight; waiting: the busiest rank computes nothing; "
        "memory: of the fullest rank, without activations; !: more than a device has[/]\n"
    )
    console.print("[bold]Assumed[/]")
    for each in assumptions:
        console.print(f"• {each}", markup=False, style="dim")


def ms_text(value: float) -> str:
    """Three significant figures, in milliseconds or seconds."""
    if value >= 1000:
        return f"{value / 1e3:.3g} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
