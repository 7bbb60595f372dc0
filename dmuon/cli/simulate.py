"""``dmuon-tune simulate``: what a training step would take on a cluster, by several ways to train."""

from __future__ import annotations

from typing import Any

import click

from dmuon.cli.errors import bad_input
from dmuon.cli.options import json_option
from dmuon.cli.scenarios import scenario_of, scenario_options


class RanksType(click.ParamType[tuple[int, ...]]):
    """``8,64,256`` → numbers of ranks, in ascending order."""

    name = "LIST"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= 65536 for part in parts):
            self.fail(f"{value!r} is not a list such as 8,64,256, of 1 to 65536 ranks each", param, ctx)
        return tuple(sorted(set(map(int, parts))))


@click.command()
@click.argument("model")
@click.option(
    "--ranks", type=RanksType(), default="8,64,256", show_default=True, help="Numbers of ranks to compare at."
)
@scenario_options
@json_option
def simulate(model: str, ranks: tuple[int, ...], as_json: bool, **how: Any) -> None:
    """Simulate training steps of MODEL on clusters that are not at hand.

    MODEL is as for `dmuon-tune run`. Compared are FSDP2 with AdamW; Muon that gathers every matrix everywhere; Muon
    by all-to-all; and DMuon with owners in turn, by a greedy plan and by the planner. Nothing is measured: times
    come from the machine's description, and from the store if it knows the machine's device. What is assumed is
    listed below the figures.

    \b
      dmuon-tune simulate qwen2.5-7b --ranks 8,64,256
      dmuon-tune simulate pi0 --machine a800 --hybrid
      dmuon-tune simulate ./config.json --machine my-cluster.json --tokens 16384
    """
    scenario = scenario_of(model, ranks[-1], **how)

    from dmuon.cli.simulate_output import as_document, print_study
    from dmuon.simulator import scale

    with bad_input():
        comparisons = scale(scenario, ranks)
    print_study(as_document(scenario, comparisons), as_json)
