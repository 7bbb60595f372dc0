"""A plan and its simulation as one page, or as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from dmuon.names import plural
from dmuon.simulator import svg
from dmuon.simulator.assumptions import assumptions
from dmuon.simulator.network import ACROSS, INSIDE
from dmuon.simulator.simulation import BUSIEST, IDLEST, STRATEGIES, Simulation
from dmuon.simulator.step import BACKWARD, EXCHANGE, FORWARD, GATHER, OPTIMIZER, REDUCE, Scenario
from dmuon.simulator.study import Comparison
from dmuon.tuning_cache.files import replace_file

WAITING = "waiting"
_WORK = (FORWARD, BACKWARD, OPTIMIZER, WAITING)
_KINDS = (FORWARD, BACKWARD, OPTIMIZER, GATHER, REDUCE, EXCHANGE)
_COLOURS = {
    FORWARD: "#4477aa",
    BACKWARD: "#228833",
    OPTIMIZER: "#ee6677",
    WAITING: "#bbbbbb",
    GATHER: "#66ccee",
    REDUCE: "#ccbb44",
    EXCHANGE: "#aa3377",
}
_SERIES = ("#000000", "#aa3377", "#ccbb44", "#66ccee", "#228833", "#4477aa")
"""Paul Tol's bright scheme, which colour-blind readers tell apart."""


def write_html(path: Path, scenario: Scenario, comparison: Comparison, scaling: Sequence[Comparison]) -> None:
    """Write :func:`html_report` whole, or not at all.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(path, html_report(scenario, comparison, scaling).encode())


def html_report(scenario: Scenario, comparison: Comparison, scaling: Sequence[Comparison]) -> str:
    """One page that stands by itself: loads, memory, a step's timeline, strategies, and how they scale.

    Args:
        scenario: what was simulated.
        comparison: of the strategies at the scenario's ranks.
        scaling: the same at several numbers of ranks, in ascending order.
    """
    planned = comparison.of("planned")
    plan, cluster = planned.plan, scenario.network.cluster
    assert plan is not None
    # Far above the bars, the line would leave nothing to see of them.
    capacity, crowded = cluster.machine.memory, max(planned.memory) > cluster.machine.memory / 2
    classes = [f"s{k}" for k in range(len(STRATEGIES))]
    rows = {STRATEGIES[each.strategy]: _parts(each) for each in comparison.simulations}
    series = {
        title: [(each.ranks, each.of(strategy).step) for each in scaling]
        for strategy, title in STRATEGIES.items()
    }
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    lanes = [BUSIEST, IDLEST, INSIDE, *([ACROSS] if cluster.nodes > 1 else [])]
    sections = [
        f"<h1>{escape(scenario.workload.name)} on {plural(cluster.ranks, 'rank', 'ranks')}</h1>",
        f'<p class="simulated">Simulated on {escape(cluster.machine.name)}. Nothing ran.</p>',
        "<h2>Load of each rank</h2>",
        f"<p>Newton–Schulz and what surrounds it, in one step. Plan {plan.hash} ({escape(plan.method)}): the busiest "
        f"rank takes {_time(plan.makespan / 1e3)}; with whole matrices {_time(plan.bound / 1e3)} is the least possible "
        f"({plan.gap:+.2%}); the line marks an even share, {_time(plan.share / 1e3)}.</p>",
        f"<ul>{notes}</ul>" if notes else "",
        svg.bars(planned.loads, "load of each rank", _time, plan.share / 1e3),
        "<h2>Memory of each rank</h2>",
        "<p>Weights, gradients, state and what is there in passing, without activations. A device has "
        f"{_gigabytes(capacity)}{', where the line is' if crowded else ''}.</p>",
        svg.bars(planned.memory, "memory of each rank", _gigabytes, capacity if crowded else None),
        "<h2>A step of the plan</h2>",
        f"<p>From the end of one optimizer step to the end of the next: {_time(planned.step)}. Hover to see what is "
        "what.</p>",
        svg.legend(_KINDS[:-1]),
        svg.timeline(_boxes(planned, lanes), lanes, "timeline of a step", _time),
        "<h2>Strategies</h2>",
        svg.legend(_WORK),
        svg.stacked(rows, "time of a step by strategy", _time),
        _table(comparison),
        "<h2>As ranks are added</h2>",
        f"<p>Time of a step, {scenario.tokens:,} tokens for each rank; both axes are logarithmic.</p>",
        svg.legend([*STRATEGIES.values()], classes),
        svg.curves(series, "time of a step by ranks", _time),
        "<h2>What this rests on</h2>",
        "<ul>" + "".join(f"<li>{escape(each)}</li>" for each in assumptions(scenario)) + "</ul>",
        "<h3>Sources</h3>",
        "<dl>"
        + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in cluster.machine.sources.items())
        + "</dl>",
    ]
    title = f"{scenario.workload.name} on {plural(cluster.ranks, 'rank', 'ranks')}: DMuon plan"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_style()}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, sections))
        + "\n</body>\n</html>\n"
    )


def write_png(path: Path, scenario: Scenario, comparison: Comparison, scaling: Sequence[Comparison]) -> None:
    """Draw the report's charts with matplotlib, and write them whole, or not at all.

    Raises:
        OSError: it cannot be written.
        ImportError: matplotlib is not installed.
    """
    from io import BytesIO

    from matplotlib.figure import Figure

    planned, cluster = comparison.of("planned"), scenario.network.cluster
    figure = Figure(figsize=(13, 9), layout="constrained")
    (loads, memory), (strategies, curves) = figure.subplots(2, 2)
    _bars(loads, [1e3 * load for load in planned.loads], "Newton–Schulz of each rank (ms)")
    _bars(memory, [each / 1e9 for each in planned.memory], "memory of each rank, no activations (GB)")
    names = [STRATEGIES[each.strategy] for each in comparison.simulations]
    left = [0.0] * len(names)
    for kind in _WORK:
        wide = [_parts(each)[kind] * 1e3 for each in comparison.simulations]
        strategies.barh(names, wide, left=left, label=kind, color=_COLOURS[kind])
        left = [a + b for a, b in zip(left, wide, strict=True)]
    strategies.invert_yaxis()
    strategies.set_title("a step (ms)")
    strategies.legend(fontsize="small")
    for (strategy, title), colour in zip(STRATEGIES.items(), _SERIES, strict=True):
        steps = [1e3 * each.of(strategy).step for each in scaling]
        curves.plot([each.ranks for each in scaling], steps, marker="o", label=title, color=colour)
    curves.set_xscale("log", base=2)
    curves.set_yscale("log")
    curves.set_xlabel("ranks")
    curves.set_title("a step as ranks are added (ms)")
    curves.legend(fontsize="small")
    figure.suptitle(
        f"{scenario.workload.name} on {cluster.ranks:,} ranks, simulated on {cluster.machine.name}"
    )
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    replace_file(path, drawn.getvalue())


def _bars(axis: Any, values: Sequence[float], title: str) -> None:
    axis.bar(range(len(values)), values, width=1.0 if len(values) > 64 else 0.8)
    axis.set_xlabel("rank")
    axis.set_title(title)


def _parts(simulation: Simulation) -> dict[str, float]:
    return {**simulation.compute, WAITING: simulation.waiting}


def _boxes(simulation: Simulation, lanes: Sequence[str]) -> list[svg.Box]:
    return [
        svg.Box(lane, span.kind, f"{span.kind} of {span.name}", span.start, span.end)
        for span in simulation.spans
        for lane in span.lanes
        if lane in lanes
    ]


def _table(comparison: Comparison) -> str:
    head = "<tr><th></th><th>step</th><th>to AdamW</th><th>optimizer</th><th>waiting</th><th>memory</th></tr>"
    rows = [
        f"<tr><th>{escape(STRATEGIES[each.strategy])}</th><td>{_time(each.step)}</td>"
        f"<td>{comparison.overhead(each.strategy):+.1%}</td><td>{_time(each.optimizer)}</td>"
        f"<td>{_time(each.waiting)}</td><td>{_gigabytes(max(each.memory))}</td></tr>"
        for each in comparison.simulations
    ]
    return f"<table>{head}{''.join(rows)}</table>"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.3g} µs"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def _style() -> str:
    kinds = "".join(f".{svg.class_of(kind)}{{fill:{colour}}}" for kind, colour in _COLOURS.items())
    lines = "".join(
        f".line.s{k}{{stroke:{colour};fill:none}}.dot.s{k},rect.s{k}{{fill:{colour}}}"
        for k, colour in enumerate(_SERIES)
    )
    return (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#222;"
        "background:#fff}h2{margin-top:2em}svg{max-width:100%;height:auto}.legend svg{vertical-align:-1px}"
        ".legend span{margin-right:1em;white-space:nowrap}.simulated{font-weight:bold;color:#aa3377}"
        "text{font-size:12px;fill:#444}.end{text-anchor:end}.middle{text-anchor:middle}.bar{fill:#4477aa}"
        ".grid{stroke:#ddd}.mark{stroke:#ee6677;stroke-dasharray:6 4}.idle{fill:#f2f2f2}.line{stroke-width:2}"
        "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
        f"td{{font-variant-numeric:tabular-nums}}dt{{font-weight:bold}}{kinds}{lines}"
    )
