"""Compare DMuon's Newton–Schulz with torch.optim.Muon's and with other libraries', in one run.

    python bench/ns.py                      # the shapes that have a target
    python bench/ns.py --presets            # and every shape of the shipped models up to 2048
    python bench/ns.py --shape 768x3072 --batch 12 --precision bf16 --tune 60s

Needs matplotlib. README.md, next to this file, says what is measured and how to add the other libraries.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import torch
from cases import Shape, distinct, must_show, parse_shape, preset_shapes
from comparison import Result, WrongResult, compare
from contenders import PeerProcess
from peers import DTYPES, PEERS, NotAvailable, check_torch_newton_schulz
from report import as_document, plot, print_table, write_json
from rich.console import Console

from dmuon.autotune import install, tune
from dmuon.kernels.choose import device_key
from dmuon.tuning_cache import Store

QUICK_SHAPES, QUICK_ROUNDS = (Shape(1, 48, 96), Shape(4, 16, 32)), 3


def parse_seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|)", value.strip())
    if match is None or not float(match[1]) > 0:
        raise click.BadParameter(f"{value!r} is not a time such as 60s or 2m", ctx, param)
    return float(match[1]) * (60 if match[2] == "m" else 1)


def parse_peers(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for name, _, python in pairs:
        if name not in PEERS or not python:
            raise click.BadParameter(f"write NAME=PYTHON with NAME one of {', '.join(PEERS)}", ctx, param)
    return {name: python for name, _, python in pairs}


@click.command()
@click.option("--shape", "shapes", multiple=True, metavar="MxN", help="Compare this shape; repeatable.")
@click.option(
    "--batch", default=1, type=click.IntRange(min=1), help="How many matrices of each --shape at once."
)
@click.option("--presets", is_flag=True, help="Add every shape of the shipped models up to 2048.")
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(list(DTYPES)),
    default=("fp32", "bf16"),
    show_default=True,
    help="What all compute in; repeatable.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--rounds", type=click.IntRange(min=2), help="Samples of each.  [default: 15]")
@click.option("--quick", is_flag=True, help="Few rounds, and tiny shapes unless some are given: does it run?")
@click.option(
    "--tune", "tune_s", callback=parse_seconds, metavar="TIME", help="Tune these shapes first, for this long."
)
@click.option(
    "--peer",
    "pythons",
    multiple=True,
    callback=parse_peers,
    metavar="NAME=PYTHON",
    help="Run a peer under the Python of another environment; repeatable.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(__file__).parent / "results",
    help="Folder for the JSON and the plot.  [default: bench/results]",
)
def main(
    shapes: tuple[str, ...],
    batch: int,
    presets: bool,
    precisions: tuple[str, ...],
    device: str,
    rounds: int | None,
    quick: bool,
    tune_s: float | None,
    pythons: dict[str, str],
    out: Path,
) -> None:
    """Compare DMuon's Newton-Schulz with torch.optim.Muon's and with other libraries'."""
    chosen = _shapes(shapes, batch, presets, quick)
    rounds = rounds or (QUICK_ROUNDS if quick else 15)
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("torch sees no CUDA device here", param_hint="--device")
    check_torch_newton_schulz(device)
    console = Console(highlight=False, width=None if Console().is_terminal else 240)
    results: list[Result] = []
    with ExitStack() as stack:
        if tune_s is not None:
            _tune(chosen, precisions, device, tune_s, stack, console)
        processes = _start(pythons, stack)
        try:
            for shape in chosen:
                for precision in dict.fromkeys(precisions):
                    console.print(f"{shape} in {precision} …", style="dim")
                    results.append(compare(shape, precision, device, rounds, processes))
        except WrongResult as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            console.print("stopped; what was finished follows")
        versions = {name: process.versions for name, process in processes.items()}
    if results:
        _report(results, device, tune_s, versions, out, console)


def _shapes(texts: Sequence[str], batch: int, presets: bool, quick: bool) -> list[Shape]:
    try:
        given = [parse_shape(text, batch) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--shape") from error
    if batch > 1 and not given:
        raise click.BadParameter("it counts matrices of --shape, which is missing", param_hint="--batch")
    default = list(QUICK_SHAPES) if quick else must_show()
    return distinct([*(given or default), *(preset_shapes() if presets else [])])


def _tune(
    shapes: Sequence[Shape],
    precisions: Sequence[str],
    device: str,
    seconds: float,
    stack: ExitStack,
    console: Console,
) -> None:
    """Tune into a store of this run's own, and let ``gram_ns`` answer from it."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    store = stack.enter_context(Store(Path(folder) / "tuning.db"))
    problems = [shape.problem(precision, device) for shape in shapes for precision in precisions]
    console.print(f"tuning {len(problems)} problems for {seconds:g} s …", style="dim")
    report = tune(problems, store=store, budget_s=seconds)
    reached = sum(outcome.status == "tuned" for outcome in report.outcomes)
    console.print(f"tuned {reached} of {len(problems)} in {report.elapsed_s:.0f} s")
    install(store, "cache")


def _start(pythons: dict[str, str], stack: ExitStack) -> dict[str, PeerProcess]:
    try:
        return {name: stack.enter_context(PeerProcess(name, python)) for name, python in pythons.items()}
    except NotAvailable as error:
        raise click.BadParameter(str(error), param_hint="--peer") from error


def _report(
    results: Sequence[Result],
    device: str,
    tune_s: float | None,
    versions: dict[str, dict[str, str]],
    out: Path,
    console: Console,
) -> None:
    now = datetime.now().astimezone()
    print_table(results, console)
    about: dict[str, Any] = {
        "created": now.isoformat(timespec="seconds"),
        "device": device_key(device),
        "torch": torch.__version__,
        "peers": versions,
        "tuned_s": tune_s,
    }
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"ns-{device}-{now:%Y-%m-%d-%H%M%S}"
    write_json(as_document(results, about), stem.with_suffix(".json"))
    plot(results, f"{about['device']} · torch {torch.__version__} · {now:%Y-%m-%d}", stem.with_suffix(".png"))
    console.print(f"{stem}.json\n{stem}.png", soft_wrap=True)


if __name__ == "__main__":
    main()
