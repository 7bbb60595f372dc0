"""``dmuon-tune run``: tune the matrices of a model on this machine, and keep what was found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dmuon.cli.errors import INTERRUPTED, BadInput, bad_input
from dmuon.cli.options import PRECISIONS, coefficients_option, json_option, open_store, store_option

if TYPE_CHECKING:
    from dmuon.kernels.choose import Problem
    from dmuon.models import ModelShapes
    from dmuon.tuning_cache import Store

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}


class BudgetType(click.ParamType[float]):
    """``90``, ``90s``, ``2m``, ``1h`` or ``1m30s`` → seconds."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip().lower()
        number = r"(\d+(?:\.\d+)?)"
        match = re.fullmatch(f"(?:{number}h)?(?:{number}m)?(?:{number}s?)?", text, re.ASCII)
        parts = zip(match.groups(), _UNITS.values(), strict=True) if match else ()
        seconds = sum(float(part) * unit for part, unit in parts if part)
        if not 0 < seconds < float("inf"):
            raise BadInput(f"--budget {value}: a time above zero is written as 90, 90s, 2m, 1h or 1m30s")
        return seconds


@click.command()
@click.argument("model", required=False)
@click.option("--shape", metavar="MxN", help="Tune matrices of this one shape instead of a model's.")
@click.option("--count", type=click.IntRange(min=1), help="How many matrices of --shape.  [default: 1]")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to run; auto is the GPU if there is one.",
)
@click.option(
    "--precision",
    type=click.Choice(["auto", *PRECISIONS]),
    default="auto",
    show_default=True,
    help="What to compute in; auto is fp32 on a CPU, fp16 on a GPU, as in training.",
)
@coefficients_option
@click.option("--budget", type=BudgetType(), default="2m", show_default=True, help="Time to spend, in all.")
@click.option(
    "--backend", "backends", multiple=True, metavar="NAME", help="Try this backend alone. Repeatable."
)
@click.option("--force", is_flag=True, help="Tune again what the store already answers.")
@json_option
@store_option
@click.pass_context
def run(
    ctx: click.Context,
    model: str | None,
    shape: str | None,
    count: int | None,
    device: str,
    precision: str,
    coefficients: str,
    budget: float,
    backends: tuple[str, ...],
    force: bool,
    as_json: bool,
    store_path: Path | None,
) -> None:
    """Tune the Newton-Schulz of MODEL's matrices on this machine.

    MODEL is a preset (see `dmuon-tune shapes --help`), a Hugging Face config.json or model folder, a
    .safetensors file or its index, or package.module:factory. Weights are never loaded.

    Every candidate is first checked against the exact result in fp64; then the correct ones race. What is
    found is stored at once and used by DMuon from then on. A second run answers from the store. Ctrl-C keeps
    what is finished. On a GPU, kernels that are not compiled yet are compiled first, on all cores; the budget
    starts after that.

    \b
      dmuon-tune run gpt2
      dmuon-tune run qwen2.5-7b --budget 10m
      dmuon-tune run --shape 4096x11008 --count 32 --precision bf16
    """
    shapes = _shapes(model, shape, count)
    store = open_store(store_path)

    from dmuon.autotune import CostTable, Tuner
    from dmuon.cli.run_output import Watcher, as_document, print_report
    from dmuon.cli.workloads import workloads_of
    from dmuon.tuning_cache import StoreUnavailable

    with bad_input():
        workloads = workloads_of(shapes, _device(device), precision, coefficients)
        store.trials(op="gram_ns", batch=1)  # a file that is no store must show before any work
    interrupted = False
    try:
        _compile([workload.problem for workload in workloads], backends, force, store)
    except KeyboardInterrupt:
        ctx.exit(INTERRUPTED)
    with Watcher(workloads) as watcher:
        tuner = Tuner(store, force=force, backends=backends or None, progress=watcher)
        try:
            with bad_input():
                tuner.check([workload.problem for workload in workloads], budget)
            tuner.tune([workload.problem for workload in workloads], budget)
        except StoreUnavailable as error:
            raise BadInput(f"{error}; name a file that can be written with --store or DMUON_CACHE") from error
        except KeyboardInterrupt:
            interrupted = True
    problem = workloads[0].problem
    costs = CostTable(store, problem.device, problem.dtype, coefficients)
    document = as_document(shapes, workloads, tuner.report, costs, store.path, budget, interrupted)
    print_report(document, as_json)
    if interrupted:
        ctx.exit(INTERRUPTED)
    if all(outcome.best is None for outcome in tuner.report.outcomes):
        ctx.exit(1)


def _compile(problems: list[Problem], backends: tuple[str, ...], force: bool, store: Store) -> None:
    """On a GPU, compile what will be timed, on all cores and before the budget starts to run."""
    import torch

    from dmuon.autotune.answers import Answers
    from dmuon.kernels.gpu.arch import arch_of

    arch = arch_of(torch.device(problems[0].device.split(":")[0]))
    if arch is None:
        return
    from dmuon.cli.ahead import specs_of
    from dmuon.cli.compile_output import Watcher
    from dmuon.kernels.gpu.load import compile_all

    known = Answers(store.trials(op="gram_ns", device=problems[0].device))
    unknown = [problem for problem in problems if force or known.exact(problem) is None]
    specs = specs_of(unknown, backends, arch)
    with Watcher(len(specs)) as watcher:
        compile_all(specs, progress=watcher)


def _shapes(model: str | None, shape: str | None, count: int | None) -> ModelShapes:
    if (model is None) == (shape is None):
        raise BadInput("name a MODEL or give --shape, one of the two; see dmuon-tune run --help")
    if count is not None and shape is None:
        raise BadInput("--count goes with --shape; a MODEL has its own counts")
    from dmuon.models import load_shapes, shape_spec

    with bad_input():
        return load_shapes(model) if model is not None else shape_spec(shape or "", count or 1)


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: PyTorch finds no CUDA GPU here; dmuon-tune doctor says more")
    return name
