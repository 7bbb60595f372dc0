"""``dmuon-tune shapes``: what of a model would be tuned, and why a parameter is or is not a Muon matrix."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from dmuon.cli.errors import bad_input
from dmuon.cli.options import json_option

if TYPE_CHECKING:
    from rich.table import Table

    from dmuon.models import ModelShapes, ShapeCount
    from dmuon.policy import Routing
    from dmuon.report import RoutingGroup

_ALGORITHMS = {"muon": "Muon", "adamw": "AdamW", "frozen": "frozen"}


@click.command()
@click.argument("model")
@click.option("--all", "every", is_flag=True, help="List every parameter instead of one line for each kind.")
@json_option
def shapes(model: str, every: bool, as_json: bool) -> None:
    """Show what of MODEL would be tuned, and why.

    MODEL is a preset (such as gpt2), a Hugging Face config.json or model folder, a .safetensors file or
    index, or package.module:factory. No weight is loaded and nothing is measured.

    \b
      dmuon-tune shapes qwen2.5-7b
      dmuon-tune shapes ./my-model/config.json --json
      dmuon-tune shapes my_package.model:build --all
    """
    from dmuon.models import load_shapes

    with bad_input():
        found = load_shapes(model)
    if as_json:
        click.echo(json.dumps(_as_json(found, every), indent=2))
    else:
        _print(found, every)


def _as_json(found: ModelShapes, every: bool) -> dict[str, Any]:
    from dmuon.report import group_routings

    if every:
        routing = [{"name": each.name, **_routing_json(each)} for each in found.parameters]
    else:
        groups = group_routings(found.parameters)
        routing = [
            {"names": group.patterns, "count": len(group.routings), **_routing_json(group.routings[0])}
            for group in groups
        ]
    counts = found.matrices()
    return {
        "model": found.name,
        "source": found.source,
        "parameters": len(found.parameters),
        "elements": found.numel,
        "matrices": [
            {"m": each.m, "n": each.n, "count": each.count, "share": share, "names": each.names}
            for each, share in zip(counts, _shares(counts), strict=True)
        ],
        "routing": routing,
    }


def _routing_json(routing: Routing) -> dict[str, Any]:
    matrices = [{"batch": each.batch, "rows": each.rows, "cols": each.cols} for each in routing.matrices]
    return {
        "algorithm": routing.algorithm,
        "reason": routing.reason,
        "shape": routing.shape,
        "matrices": matrices,
    }


def _print(found: ModelShapes, every: bool) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    console.print(f"[bold]{escape(found.name)}[/]: {_counted(found.parameters)}")
    console.print(f"[dim]{escape(found.source)}[/]\n")
    console.print(_tuned_table(found.matrices()))
    console.print("[dim]share: of the operations of Newton-Schulz, 6m²n + 14m³ for each m×n matrix[/]\n")
    if every:
        console.print(_every_table(found.parameters))
        return
    for group in _by_reason(found.parameters):
        console.print(_headline(group))
        for pattern in group.patterns:
            console.print(f"  {pattern}", markup=False, soft_wrap=True)


def _tuned_table(counts: Sequence[ShapeCount]) -> Table:
    from rich.markup import escape

    table = _table(("shape", "count", "share"), ("parameters",))
    for each, share in zip(counts, _shares(counts), strict=True):
        table.add_row(f"{each.m}×{each.n}", f"{each.count:,}", f"{share:.1%}", escape("\n".join(each.names)))
    return table


def _headline(group: RoutingGroup) -> str:
    from rich.markup import escape

    first = group.routings[0]
    algorithm = _ALGORITHMS[first.algorithm]
    return f"[bold]{algorithm}[/]: {escape(first.reason)} [dim]({_counted(group.routings)})[/]"


def _every_table(routings: Iterable[Routing]) -> Table:
    from rich.markup import escape

    from dmuon.report import matrices_text, shape_text

    table = _table((), ("parameter", "shape", "goes to"))
    for each in routings:
        matrices = f" as {matrices_text(each)}" if each.matrices else ""
        goes_to = f"{_ALGORITHMS[each.algorithm]}{matrices}: {each.reason}"
        table.add_row(escape(each.name), shape_text(each.shape), escape(goes_to))
    return table


def _table(numbers: Sequence[str], texts: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for name in texts:
        table.add_column(name, overflow="fold")
    return table


def _by_reason(routings: Sequence[Routing]) -> list[RoutingGroup]:
    from dmuon.report import RoutingGroup

    groups: dict[tuple[str, str], list[Routing]] = {}
    for algorithm in _ALGORITHMS:
        for routing in routings:
            if routing.algorithm == algorithm:
                groups.setdefault((algorithm, routing.reason), []).append(routing)
    return [RoutingGroup(tuple(group)) for group in groups.values()]


def _shares(counts: Sequence[ShapeCount]) -> list[float]:
    total = sum(each.operations for each in counts)
    return [each.operations / total for each in counts]


def _counted(routings: Sequence[Routing]) -> str:
    from dmuon.names import plural

    elements = sum(routing.numel for routing in routings)
    return f"{plural(len(routings), 'parameter', 'parameters')}, {_short(elements)} elements"


def _short(count: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)
