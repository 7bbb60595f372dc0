"""``dmuon-tune compile``: build a model's GPU kernels before they are needed, on any machine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from dmuon.cli.errors import INTERRUPTED, BadInput, bad_input, sigterm_interrupts
from dmuon.cli.options import coefficients_option, json_option

if TYPE_CHECKING:
    from dmuon.kernels.gpu.arch import Arch
    from dmuon.kernels.gpu.binary import KernelSpec
    from dmuon.kernels.gpu.cache import BinaryCache
    from dmuon.models import ModelShapes


class PrecisionsType(click.ParamType[tuple[str, ...]]):
    """``fp16``, ``bf16`` or ``fp16,bf16``."""

    name = "PRECISIONS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        from dmuon.cli.ahead import HALF

        names = tuple(dict.fromkeys(part.strip() for part in str(value).split(",")))
        wrong = [name for name in names if name not in HALF]
        if wrong:
            raise BadInput(f"--precision {wrong[0]}: GPU kernels compute in {' and '.join(HALF)}")
        return names


@click.command()
@click.argument("model", required=False)
@click.option("--shape", metavar="MxN", help="Compile for matrices of this one shape instead of a model's.")
@click.option(
    "--arch", "arch_name", metavar="NAME", help="What to compile for.  [default: this machine's GPU]"
)
@click.option(
    "--precision",
    "precisions",
    type=PrecisionsType(),
    default="fp16",
    show_default=True,
    help="What the iteration computes in: fp16, bf16, or both with a comma.",
)
@coefficients_option
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="This backend alone. Repeatable.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compilers at a time.  [default: one for each core]")
@click.option(
    "--timeout",
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="For one kernel; then it has failed.",
)
@json_option
@click.pass_context
def compile_(
    ctx: click.Context,
    model: str | None,
    shape: str | None,
    arch_name: str | None,
    precisions: tuple[str, ...],
    coefficients: str,
    backends: tuple[str, ...],
    jobs: int | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Compile every GPU kernel that tuning MODEL could time, so that no later job waits for a compiler.

    No GPU is needed: a login node will do, if it shares the cache folder (DMUON_CACHE) and the versions of
    DMuon and of the kernel compilers with the machine that trains. What is compiled already is kept. A kernel
    whose compiler fails, crashes or hangs is reported and left out. Ctrl-C and SIGTERM keep what is finished.

    \b
      dmuon-tune compile qwen2.5-7b --arch sm_90a
      dmuon-tune compile gpt2 --arch sm_80 --precision fp16,bf16 --jobs 8
      dmuon-tune compile --shape 4096x11008 --arch sm_100a --backend cute
    """
    shapes = model_or_shape(model, shape, "compile")

    from dmuon.cli.ahead import compiling_backends, specs_ahead
    from dmuon.cli.compile_output import Watcher, as_document, print_report
    from dmuon.kernels.gpu.cache import BinaryCache
    from dmuon.kernels.gpu.load import Outcome, compile_all

    arch = find_arch(arch_name)
    cache = BinaryCache()
    with bad_input():
        chosen = compiling_backends(backends)
    sides = [(each.m, each.n) for each in shapes.matrices()]
    specs = specs_ahead(chosen, sides, arch, precisions, coefficients)
    _check_writable(cache, specs)
    start, interrupted = time.monotonic(), False
    finished: list[Outcome] = []
    with Watcher(len(specs)) as watcher, sigterm_interrupts():
        try:
            for outcome in compile_all(specs, jobs=jobs, timeout_s=timeout, progress=watcher, cache=cache):
                finished.append(outcome)
        except KeyboardInterrupt:
            interrupted = True
            finished = watcher.finished
    document = as_document(
        shapes.name,
        arch.name,
        precisions,
        specs,
        finished,
        folder=cache.folder,
        elapsed_s=time.monotonic() - start,
        interrupted=interrupted,
    )
    print_report(document, as_json)
    if interrupted:
        ctx.exit(INTERRUPTED)
    if not specs or document["failed"]:
        ctx.exit(1)


def model_or_shape(model: str | None, shape: str | None, command: str) -> ModelShapes:
    """The shapes of the one of the two that is given."""
    if (model is None) == (shape is None):
        raise BadInput(f"name a MODEL or give --shape, one of the two; see dmuon-tune {command} --help")
    from dmuon.models import load_shapes, shape_spec

    with bad_input():
        return load_shapes(model) if model is not None else shape_spec(shape or "")


def find_arch(name: str | None) -> Arch:
    """The architecture called ``name``, or that of this machine's GPU."""
    from dmuon.kernels.gpu.arch import ARCHS, arch_named, arch_of

    if name is not None:
        with bad_input():
            return arch_named(name)
    import torch

    found = arch_of("cuda") if torch.cuda.is_available() else None
    if found is None:
        raise BadInput(f"there is no GPU here to compile for; give --arch, one of {', '.join(ARCHS)}")
    return found


def _check_writable(cache: BinaryCache, specs: Iterable[KernelSpec]) -> None:
    """Compiling for nothing would take minutes: refuse at once where nothing that is missing can be kept."""
    try:
        cache.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache.folder):
            pass
    except OSError as error:
        if all(cache.load(spec) is not None for spec in specs):
            return
        why = error.strerror or str(error)
        raise BadInput(
            f"{cache.folder} cannot be written ({why}); name another folder by DMUON_CACHE"
        ) from error
