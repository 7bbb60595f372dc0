"""``dmuon-tune profile``: measure the steps of a model's owners on this machine, for planning."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dmuon.cli.errors import BadInput, bad_input
from dmuon.cli.options import (
    BudgetType,
    coefficients_option,
    device_here,
    device_option,
    json_option,
    open_store,
    precision_option,
    store_option,
)


@click.command()
@click.argument("model")
@device_option
@precision_option
@coefficients_option
@click.option("--budget", type=BudgetType(), default="1m", show_default=True, help="Time to spend, in all.")
@json_option
@store_option
def profile(
    model: str,
    device: str,
    precision: str,
    coefficients: str,
    budget: float,
    as_json: bool,
    store_path: Path | None,
) -> None:
    """Measure what the optimizer's steps of MODEL's matrices take on this machine.

    MODEL is as for `dmuon-tune run`. Each shape is measured in batches of 1, 2, 4, ... and of the most that a rank
    could hold: momentum, Newton-Schulz and update. dmuon.own and `dmuon-tune plan` go by these times. Do this on one
    process of an idle machine, after `dmuon-tune run`. What the store knows already is not measured again.

    \b
      dmuon-tune profile gpt2
      dmuon-tune profile qwen2.5-7b --precision bf16 --budget 10m
    """
    store = open_store(store_path)

    from dmuon.cli.workloads import workloads_of
    from dmuon.models import load_shapes
    from dmuon.planner import items_of
    from dmuon.planner import profile as measure
    from dmuon.tuning_cache import StoreUnavailable

    where = device_here(device)
    with bad_input():
        shapes = load_shapes(model)
        dtype = workloads_of(shapes, where, precision, coefficients)[0].problem.dtype
        store.trials(op="gram_ns", batch=1)  # a file that is no store must show before any work
    try:
        done = measure(items_of(shapes.parameters), store, where, dtype, coefficients, budget_s=budget)
    except StoreUnavailable as error:
        raise BadInput(f"{error}; name a file that can be written with --store or DMUON_CACHE") from error
    if as_json:
        left = [{"rows": rows, "cols": cols, "batch": batch} for rows, cols, batch in done.left]
        document = {"model": shapes.name, "device": where, "precision": dtype, "measured": done.measured}
        click.echo(json.dumps({**document, "left": left, "store": str(store.path)}, indent=2))
        return
    click.echo(f"{done.measured} steps measured on {where} in {dtype}; kept in {store.path}")
    if done.left:
        rows, cols, batch = done.left[0]
        click.echo(
            f"No time for {len(done.left)}, from {batch} × {rows}×{cols} on: run it again, or give it a --budget"
        )
