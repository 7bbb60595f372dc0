"""A comparison on the terminal, as JSON, and as a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from comparison import OURS, TORCH, Result, Timing
from peers import PEERS
from rich.console import Console
from rich.table import Table
from timing import Ratio


def print_table(results: Sequence[Result], console: Console) -> None:
    """A row for each result: times, ratios with their quartiles over the rounds, errors, verdicts."""
    present = [name for name in PEERS if any(name in result.timings for result in results)]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("shape", "precision", "choice"):
        table.add_column(heading, no_wrap=True)
    headings = ("dmuon ms", "torch ms", "dmuon error", "torch error", "torch / dmuon", "must")
    for heading in (*headings, *(f"{name} / dmuon" for name in present)):
        table.add_column(heading, justify="right")
    for result in results:
        ours, torch = result.timings[OURS], result.timings[TORCH]
        peers = (result.timings.get(name) for name in present)
        table.add_row(
            str(result.shape),
            result.precision,
            result.choice,
            f"{ours.median_ms:.3g}",
            f"{torch.median_ms:.3g}",
            f"{ours.error:.1e}",
            f"{torch.error:.1e}",
            f"[bold]{_ratio_text(torch.over_dmuon)}[/bold]",
            _verdict(result),
            *("" if peer is None else _ratio_text(peer.over_dmuon) for peer in peers),
        )
    console.print(table)
    for name in PEERS:
        for reason in dict.fromkeys(result.absent[name] for result in results if name in result.absent):
            where = [result for result in results if result.absent.get(name) == reason]
            precisions = ", ".join(dict.fromkeys(result.precision for result in where))
            console.print(f"not available: {name} in {precisions}: {reason}", markup=False)
    judged = [result for result in results if result.passed is not None]
    if judged:
        console.print(f"{sum(result.passed is True for result in judged)} of {len(judged)} targets met")


def as_document(results: Sequence[Result], about: dict[str, Any]) -> dict[str, Any]:
    """All that was measured, as JSON; ``about`` says where and when."""
    return {
        **about,
        "results": [
            {
                "batch": result.shape.batch,
                "rows": result.shape.rows,
                "cols": result.shape.cols,
                "precision": result.precision,
                "choice": result.choice,
                "target": result.target,
                "passed": result.passed,
                "timings": {name: _timing(timing) for name, timing in result.timings.items()},
                "not_available": result.absent,
            }
            for result in results
        ],
    }


def write_json(document: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def plot(results: Sequence[Result], title: str, path: Path) -> None:
    """Speed relative to torch's, one panel for each precision, a bar for each contender, a tick for a target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    contenders = [OURS, *PEERS]
    panels = {
        precision: [result for result in results if result.precision == precision]
        for precision in dict.fromkeys(result.precision for result in results)
    }
    height = 2 + 0.6 * max(map(len, panels.values()))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1 + 5 * len(panels), height), squeeze=False, layout="constrained"
    )
    legend: dict[str, Any] = {}
    for axis, (precision, shown) in zip(axes[0], panels.items(), strict=True):
        names = [name for name in contenders if any(name in result.timings for result in shown)]
        thickness = 0.8 / len(names)
        for k, name in enumerate(names):
            offset = (k - (len(names) - 1) / 2) * thickness
            rows = [row for row, result in enumerate(shown) if name in result.timings]
            speeds = [_speed(shown[row], name) for row in rows]
            places = [row + offset for row in rows]
            legend[name] = axis.barh(places, speeds, thickness, color=f"C{contenders.index(name)}")
            if name == OURS:
                spreads = [(result.speedup.quartile_1, result.speedup.quartile_3) for result in shown]
                axis.hlines(places, *zip(*spreads, strict=True), color="black", linewidth=1)
        for row, result in enumerate(shown):
            if result.target is not None:
                axis.vlines(result.target, row - 0.45, row + 0.45, color="black", linestyle=":")
        axis.axvline(1, color="grey", linewidth=0.8)
        axis.set_yticks(range(len(shown)), [str(result.shape) for result in shown])
        axis.invert_yaxis()
        axis.set_title(precision)
        axis.set_xlabel("speed relative to torch.optim.Muon's Newton–Schulz")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=len(legend))
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _speed(result: Result, name: str) -> float:
    return result.speedup.of_medians / result.timings[name].over_dmuon.of_medians


def _ratio_text(ratio: Ratio) -> str:
    return f"{ratio.of_medians:.2f} ({ratio.quartile_1:.2f}–{ratio.quartile_3:.2f})"


def _verdict(result: Result) -> str:
    if result.target is None:
        return ""
    return (
        f"[green]≥ {result.target:g} pass[/green]"
        if result.passed
        else f"[red]≥ {result.target:g} miss[/red]"
    )


def _timing(timing: Timing) -> dict[str, Any]:
    low, _, high = quantiles(timing.samples_ms, n=4, method="inclusive")
    return {
        "median_ms": timing.median_ms,
        "quartiles_ms": [low, high],
        "samples_ms": timing.samples_ms,
        "error": timing.error,
        "over_dmuon": timing.over_dmuon.of_medians,
        "over_dmuon_quartiles": [timing.over_dmuon.quartile_1, timing.over_dmuon.quartile_3],
    }
