"""How good plans are: every shipped model at 8, 64 and 256 ranks, and random instances beside the published MILP.

    python bench/planner.py                       # all of it: some minutes
    python bench/planner.py --instances 20        # fewer random ones
    python bench/planner.py --quick               # does it run?

Needs scipy. README.md, next to this file, says what is compared.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import click
from planner_instances import random_instance
from planner_milp import plan_by_milp
from rich.console import Console
from rich.table import Table as RichTable

from dmuon.models import load_shapes, preset_names
from dmuon.planner import Plan, StepCosts, items_of, make_plan, plan_of_owners
from dmuon.tuning_cache import Store

RANKS = (8, 64, 256)
ROUNDING = 1e-9
"""Makespans that differ by less, relative, are equal."""


@dataclass(frozen=True)
class Row:
    """One instance. Times in seconds; ``milp`` is a makespan, None where it found nothing."""

    name: str
    ranks: int
    matrices: int
    greedy: float
    makespan: float
    bound: float
    excess: float
    seconds: float
    method: str
    reason: str
    milp: float | None = None
    milp_seconds: float = 0.0

    @property
    def gap(self) -> float:
        return max(self.makespan / self.bound - 1, 0.0)


def preset_rows(names: tuple[str, ...], device: str, precision: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        costs = StepCosts(Store(Path(folder) / "none.db"), device, precision)
        return [
            planned(name, items_of(load_shapes(name).parameters), ranks, costs)[0]
            for name in names
            for ranks in RANKS
        ]


def random_row(seed: int) -> Row:
    items, ranks, costs = random_instance(seed)
    row, seconds = planned(f"random {seed}", items, ranks, costs)
    limit = max(seconds, 1.0)
    start = time.perf_counter()
    owners = plan_by_milp(items, ranks, costs, limit, batched=seed % 2 == 1)
    taken = time.perf_counter() - start
    found = None if owners is None else plan_of_owners(owners, items, ranks, costs).makespan
    return Row(**{**asdict(row), "milp": found, "milp_seconds": taken})


def planned(name: str, items: list[Any], ranks: int, costs: Any) -> tuple[Row, float]:
    greedy = make_plan(items, ranks, costs, method="greedy")
    start = time.perf_counter()
    plan: Plan = make_plan(items, ranks, costs)
    seconds = time.perf_counter() - start
    reason = plan.notes[0] if plan.notes else ""
    figures = (greedy.makespan, plan.makespan, plan.bound, plan.excess, seconds)
    return Row(name, ranks, len(items), *figures, plan.method, reason), seconds


def print_presets(console: Console, rows: list[Row]) -> None:
    table = RichTable(title="Shipped models")
    for column in ("model", "ranks", "greedy gap", "gap", "above the even share", "seconds", "method"):
        table.add_column(column, justify="left" if column in ("model", "method") else "right")
    for row in rows:
        greedy = abs(row.greedy / row.bound - 1)
        figures = (f"{greedy:.2%}", f"{row.gap:.3%}", f"{row.excess:.1%}", f"{row.seconds:.2f}")
        table.add_row(row.name, str(row.ranks), *figures, row.method)
    console.print(table)
    console.print("Where a plan is above the even share:")
    for row in rows:
        if row.reason:
            console.print(f"  {row.name} on {row.ranks}: {row.reason}", markup=False, soft_wrap=True)


def targets(presets: list[Row], random: list[Row]) -> dict[str, bool]:
    found: dict[str, Any] = {}
    if presets:
        found["every model within 0.1% of its bound"] = max(row.gap for row in presets) <= 1e-3
        found["every model in at most 1 s"] = max(row.seconds for row in presets) <= 1
    if random:
        found["random: never worse than greedy"] = all(
            row.makespan <= row.greedy * (1 + ROUNDING) for row in random
        )
        found["random: at most 0.5% above the bound at the median"] = (
            median(row.gap for row in random) <= 5e-3
        )
        found["random: within 5 s"] = max(row.seconds for row in random) <= 5
        found["random: never worse than the MILP"] = all(
            row.milp is None or row.makespan <= row.milp * (1 + ROUNDING) for row in random
        )
    return {target: bool(reached) for target, reached in found.items()}


def print_random(console: Console, rows: list[Row]) -> None:
    gaps, seconds = sorted(row.gap for row in rows), sorted(row.seconds for row in rows)
    none = sum(row.milp is None for row in rows)
    better = sum(row.milp is not None and row.makespan < row.milp * (1 - ROUNDING) for row in rows)
    equal = len(rows) - none - better
    ratios = [row.milp / row.makespan for row in rows if row.milp is not None]
    console.print(f"\n[bold]{len(rows)} random instances[/]")
    console.print(f"gap to the bound: median {median(gaps):.3%}, worst {gaps[-1]:.2%}")
    console.print(f"seconds: median {median(seconds):.2f}, longest {seconds[-1]:.2f}")
    console.print(
        f"the MILP, in the same time (1 s at least): no plan for {none}, a longer one for {better}, "
        f"equal or better for {equal}"
        + (f"; its makespan is {median(ratios):.2f} times ours at the median" if ratios else "")
    )


@click.command()
@click.option("--instances", default=200, type=click.IntRange(0), help="How many random instances.")
@click.option(
    "--device", default="cuda:NVIDIA H200", metavar="KEY", help="Whose modelled costs the models have."
)
@click.option("--precision", default="fp16", help="Of Newton–Schulz.")
@click.option("--quick", is_flag=True, help="One model and three random instances.")
@click.option("--out", default=Path(__file__).parent / "results", type=click.Path(path_type=Path))
def main(instances: int, device: str, precision: str, quick: bool, out: Path) -> None:
    """Plan models and random instances, and print how far from the best possible the plans are."""
    console = Console(highlight=False)
    names = ("gpt2",) if quick else preset_names()
    presets = preset_rows(names, device, precision)
    print_presets(console, presets)
    random = []
    for seed in (14, 16, 3) if quick else range(instances):
        random.append(random_row(seed))
    if random:
        print_random(console, random)
    reached = targets(presets, random)
    for target, yes in reached.items():
        console.print(f"{'[green]reached[/]' if yes else '[red]missed[/]'}  {target}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"planner-{datetime.now():%Y-%m-%d-%H%M%S}.json"
    document = {"targets": reached, "presets": [*map(asdict, presets)], "random": [*map(asdict, random)]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(f"Wrote {path}.", soft_wrap=True)


if __name__ == "__main__":
    main()
