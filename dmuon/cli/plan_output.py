"""What ``dmuon-tune plan`` shows: the plan, its load as bars, and the step that comes of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dmuon.cli.simulate_output import as_document as study_document
from dmuon.cli.simulate_output import ms_text, print_legend, strategies_table
from dmuon.names import plural

if TYPE_CHECKING:
    from rich.console import Console

    from dmuon.planner import Plan
    from dmuon.simulator import Cluster, Comparison, Scenario

_MOST_BARS = 32


def study_ranks(cluster: Cluster) -> list[int]:
    """At which numbers of ranks a report shows how strategies scale: from one node, doubling, past ``cluster``'s."""
    ranks = [cluster.machine.ranks_per_node]
    while ranks[-1] < max(256, cluster.ranks):
        ranks.append(2 * ranks[-1])
    return ranks


def as_document(scenario: Scenario, plan: Plan, comparison: Comparison) -> dict[str, Any]:
    """The plan and its simulation, as JSON values. Times are in milliseconds, memory in bytes."""
    study = study_document(scenario, [comparison])
    [compared] = study.pop("comparisons")
    return {
        **study,
        "ranks": plan.ranks,
        "plan": {
            "hash": plan.hash,
            "method": plan.method,
            "makespan_ms": plan.makespan,
            "bound_ms": plan.bound,
            "gap": plan.gap,
            "share_ms": plan.share,
            "excess": plan.excess,
            "loads_ms": list(plan.loads),
            "memory_bytes": list(plan.memory),
            "matrices": [sum(batch.count for batch in batches) for batches in plan.batches],
            "owners": {name: list(ranks) for name, ranks in plan.owners.items()},
            "costs": scenario.costs.source,
            "notes": list(plan.notes),
        },
        "strategies": compared["strategies"],
    }


def print_plan(document: dict[str, Any], as_json: bool) -> None:
    """The document on stdout, for a program or for a person."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape

    plan, console = document["plan"], Console(highlight=False)
    console.print(
        f"[bold]{escape(document['model'])}[/] on {plural(document['ranks'], 'rank', 'ranks')}: "
        f"{escape(document['machine'])}"
    )
    console.print(
        f"{len(plan['owners']):,} parameters, {sum(plan['matrices']):,} matrices; plan {plan['hash']} "
        f"({plan['method']})"
    )
    console.print(
        f"the busiest rank's step takes {ms_text(plan['makespan_ms'])}; the bound with whole matrices is "
        f"{ms_text(plan['bound_ms'])} ({plan['gap']:+.2%}), an even share {ms_text(plan['share_ms'])} "
        f"({plan['excess']:+.1%})"
    )
    console.print(f"costs: {plan['costs']}", markup=False, style="dim")
    for note in plan["notes"]:
        console.print(f"note: {note}", markup=False)
    console.print()
    _print_loads(console, plan["loads_ms"], document["gpus_per_node"])
    console.print()
    console.print(strategies_table(document["strategies"], "simulated step"), "")
    print_legend(console, document["assumptions"])


def _print_loads(console: Console, loads: Sequence[float], per_node: int) -> None:
    """A bar for each rank or, of many, for as many neighbours as it takes, whole nodes if possible: least to most."""
    together = 1
    if len(loads) > _MOST_BARS:
        together = per_node * -(-len(loads) // (per_node * _MOST_BARS))
    scale, last = 40 / (max(loads) or 1.0), len(loads) - 1
    width = len(f"ranks {last - together + 1}–{last}") if together > 1 else len(f"rank {last}")
    for first in range(0, len(loads), together):
        part = loads[first : first + together]
        name = f"ranks {first}–{first + len(part) - 1}" if together > 1 else f"rank {first}"
        full, all_ = round(min(part) * scale), round(max(part) * scale)
        bar, rest = "█" * full + "░" * (all_ - full), " " * (40 - all_)
        times = dict.fromkeys((ms_text(min(part)), ms_text(max(part))))
        console.print(f"{name:>{width}}  [cyan]{bar}[/]{rest}  {' – '.join(times)}", soft_wrap=True)
    what = "each rank" if together == 1 else "the least and the most busy rank of each line"
    console.print(f"[dim]Newton–Schulz of {what}, in one step[/]")
