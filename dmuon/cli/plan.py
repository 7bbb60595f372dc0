"""``dmuon-tune plan``: who would own which matrix on a cluster, and what a step would take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dmuon.cli.errors import BadInput, bad_input
from dmuon.cli.options import json_option
from dmuon.cli.scenarios import scenario_of, scenario_options

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("model")
@click.option("--ranks", type=click.IntRange(1, 65536), required=True, help="How many ranks own matrices.")
@scenario_options
@click.option("--out", type=_FILE, metavar="FILE", help="Write the plan as JSON, for dmuon.own(plan=FILE).")
@click.option("--html", type=_FILE, metavar="FILE", help="Write a report: one page that needs no network.")
@click.option(
    "--png", type=_FILE, metavar="FILE", help="Write the report's charts as a picture (matplotlib)."
)
@json_option
def plan(
    model: str,
    ranks: int,
    out: Path | None,
    html: Path | None,
    png: Path | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Plan who owns which matrix of MODEL, and simulate a step with it.

    MODEL is as for `dmuon-tune run`. The plan gives every matrix to one rank, so that the busiest rank's optimizer
    step is as short as can be, within each rank's memory. It goes by measured costs if the store knows the
    machine's device. The simulation beside it compares the plan with other ways to train; it runs nothing, and says
    what it assumes. dmuon.own makes its own plan: take --out to look at one, or to fix it.

    \b
      dmuon-tune plan qwen2.5-7b --ranks 64 --gpus-per-node 8
      dmuon-tune plan pi0 --ranks 256 --machine a800 --hybrid --html report.html
      dmuon-tune plan ./config.json --ranks 8 --out plan.json --json
    """
    _check_targets([path for path in (out, html, png) if path is not None])
    if png is not None:
        _check_matplotlib()
    scenario = scenario_of(model, ranks, **how)

    from dmuon.cli.plan_output import as_document, print_plan, study_ranks
    from dmuon.planner import items_of, make_plan
    from dmuon.simulator import compare, scale
    from dmuon.simulator.report import write_html, write_png

    cluster = scenario.network.cluster
    with bad_input():
        made = make_plan(
            items_of(scenario.workload.owned),
            ranks,
            scenario.costs,
            ranks_per_node=cluster.node_ranks,
            memory_bytes=int(cluster.machine.memory),
        )
        comparison = compare(scenario, made)
    scaling = []
    if html is not None or png is not None:
        scaling = [*scale(scenario, [each for each in study_ranks(cluster) if each != ranks]), comparison]
        scaling.sort(key=lambda each: each.ranks)
    with bad_input():
        if out is not None:
            made.save(out)
        if html is not None:
            write_html(html, scenario, comparison, scaling)
        if png is not None:
            write_png(png, scenario, comparison, scaling)
    print_plan(as_document(scenario, made, comparison), as_json)
    for path in (out, html, png):
        if path is not None:
            click.echo(f"Wrote {path}.", err=True)


def _check_targets(paths: list[Path]) -> None:
    """Before the work, not after it."""
    for path in paths:
        if paths.count(path) > 1:
            raise BadInput(f"{path} is to be written twice: give each output a file of its own")
        if not path.absolute().parent.is_dir():
            raise BadInput(f"{path} cannot be written: make its folder first")


def _check_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise BadInput(
            "--png needs matplotlib: pip install 'dmuon[bench]', or take --html, which needs nothing"
        )
