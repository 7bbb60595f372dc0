"""What ``dmuon-tune run`` shows: progress while it works, and a closing table or a JSON document."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from dmuon.autotune.describe import choice_text
from dmuon.autotune.tuner import seconds_text

if TYPE_CHECKING:
    from dmuon.autotune import CostTable, Outcome, Progress, Report
    from dmuon.cli.workloads import Workload
    from dmuon.kernels.choose import Problem
    from dmuon.models import ModelShapes


class Watcher:
    """A progress bar on stderr if that is a terminal, else a line for each problem that is done."""

    def __init__(self, workloads: Sequence[Workload]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._titles = {workload.problem: workload.title for workload in workloads}
        self._waited: set[Problem] = set()
        console = Console(stderr=True)
        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(bar_width=20), TaskProgressColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = self._bar.add_task("starting", total=1.0) if self._bar else None

    def __enter__(self) -> Watcher:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: Progress) -> None:
        title = self._titles[event.problem]
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=event.fraction, description=_moment(title, event))
        elif event.outcome is not None and event.outcome.status != "stored":
            click.echo(f"{title}: {_result(event.outcome)}", err=True)
        elif event.stage == "waiting" and event.problem not in self._waited:
            self._waited.add(event.problem)
            click.echo(f"{title}: waiting for another process that tunes it", err=True)


def as_document(
    shapes: ModelShapes,
    workloads: Sequence[Workload],
    report: Report,
    costs: CostTable,
    store: Path,
    budget_s: float,
    interrupted: bool,
) -> dict[str, Any]:
    """All there is to say about a run, as JSON values. Times are in milliseconds unless named otherwise."""
    step_costs = [workload.step_cost(costs) for workload in workloads]
    step_ms = sum(cost.ms for cost in step_costs)
    rows = [
        {
            "m": workload.problem.m,
            "n": workload.problem.n,
            "count": workload.count,
            "batches": list(workload.sizes),
            "step_ms": cost.ms,
            "source": cost.source,
            "share": cost.ms / step_ms,
            **_outcome(report.of(workload.problem)),
        }
        for workload, cost in zip(workloads, step_costs, strict=True)
    ]
    problem = workloads[0].problem
    return {
        "model": shapes.name,
        "device": problem.device,
        "precision": problem.dtype,
        "coefficients": problem.coefficients,
        "shapes": rows,
        "step_ms": step_ms,
        "budget_s": budget_s,
        "elapsed_s": report.elapsed_s,
        "interrupted": interrupted,
        "all_from_store": all(row["status"] == "stored" for row in rows),
        "store": str(store),
    }


def print_report(document: dict[str, Any], as_json: bool) -> None:
    """The document on stdout, for a program or for a person."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_heading(document), soft_wrap=True)
    console.print(_table(document["shapes"]))
    modelled = any(row["source"] != "measured" for row in document["shapes"])
    legend = (
        "[dim]time: all matrices of the shape, once a step; speed-up: over the plain torch form, same run"
    )
    console.print(legend + ("; ~ is an estimate[/]" if modelled else "[/]"))
    for row in document["shapes"]:
        if row["status"] in ("not reached", "failed"):
            console.print(f"{_shape(row)} {row['status']}: {row['reason']}", markup=False, soft_wrap=True)
    console.print(_closing(document), markup=False, soft_wrap=True)


def _moment(title: str, event: Progress) -> str:
    lines = [f"{title}: {event.stage}"]
    if event.choice is not None:
        lines.append(f"  {choice_text(event.choice)}")
    if event.best is not None and event.best_ms is not None:
        lines.append(f"  best {_ms(event.best_ms)}: {choice_text(event.best)}")
    return "\n".join(lines)


def _result(outcome: Outcome) -> str:
    best, choice = outcome.best, outcome.choice
    if best is None or choice is None or best.median_ms is None:
        return f"{outcome.status}: {outcome.reason}"
    batch = f" for a batch of {best.batch}" if best.batch > 1 else ""
    gain = f", {outcome.speedup:.2f}x plain" if outcome.speedup else ""
    return f"{choice_text(choice)}, {_ms(best.median_ms)}{batch}{gain}"


def _outcome(outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {
            "status": "not reached",
            "reason": "interrupted",
            "choice": None,
            "choice_text": None,
            "ms": None,
        }
    best, choice = outcome.best, outcome.choice
    statuses = Counter(trial.status for trial in outcome.trials)
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "choice": None if best is None else best.config,
        "choice_text": None if choice is None else choice_text(choice),
        "ms": None if best is None else best.median_ms,
        "speedup": outcome.speedup,
        "error": None if best is None else best.error,
        "candidates": outcome.candidates or None,
        "timed": statuses["ok"],
        "rejected": statuses["rejected"],
        "failed": statuses["failed"],
    }


def _heading(document: dict[str, Any]) -> str:
    from rich.markup import escape

    what = f"{document['precision']}, {document['coefficients']}, {document['device']}"
    return f"[bold]{escape(document['model'])}[/] [dim]{escape(what)}[/]\n"


def _table(rows: Sequence[dict[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column("shape", justify="right", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("choice", overflow="fold")
    for name in ("time", "speed-up", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        estimate = "" if row["source"] == "measured" else "~"
        speedup = "" if row.get("speedup") is None else f"{row['speedup']:.2f}×"
        choice = row["choice_text"] or f"[dim]{row['status']}[/]"
        time = estimate + _ms(row["step_ms"])
        table.add_row(_shape(row), f"{row['count']:,}", choice, time, speedup, f"{row['share']:.1%}")
    return table


def _closing(document: dict[str, Any]) -> str:
    statuses = Counter(row["status"] for row in document["shapes"])
    seconds = seconds_text(document["elapsed_s"])
    if document["all_from_store"]:
        return f"All from the store {document['store']}, in {seconds}."
    parts = [f"{count} {status}" for status, count in statuses.items()]
    short = statuses["not reached"] and not document["interrupted"]
    hint = " A larger --budget reaches the rest." if short else ""
    return f"{', '.join(parts)}, in {seconds}; stored in {document['store']}.{hint}"


def _shape(row: dict[str, Any]) -> str:
    return f"{row['m']}×{row['n']}"


def _ms(value: float) -> str:
    if value >= 1000:
        return f"{value / 1e3:.3g} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
