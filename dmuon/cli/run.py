"""``dmuon-tune run``: tune the matrices of a model on this machine, and keep what was found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dmuon.cli.errors import INTERRUPTED, BadInput, bad_input
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

if TYPE_CHECKING:
    from dmuon.kernels.choose import Problem
    from dmuon.models import ModelShapes
    from dmuon.tuning_cache import Store


@click.command()
@click.argument("model", required=False)
@click.option("--shape", metavar="MxN", help="Tune matrices of this one shape instead of a model's.")
@click.option("--count", type=click.IntRange(min=1), help="How many matrices of --shape.  [default: 1]")
@device_option
@precision_option
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
        workloads = workloads_of(shapes, device_here(device), precision, coefficients)
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
