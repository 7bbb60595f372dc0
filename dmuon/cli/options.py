"""Options and argument types that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dmuon.cli.errors import BadInput, bad_input

if TYPE_CHECKING:
    from dmuon.tuning_cache import Store

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
OPERATIONS = ("gram_ns", "gram", "symmetric_product", "apply")
"""As in :mod:`dmuon.kernels`, which would bring torch along."""

Command = TypeVar("Command", bound=Callable[..., Any])

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


def store_option(command: Command) -> Command:
    """``--store PATH``, passed as ``store_path`` (``None``: the default) for :func:`open_store`."""
    option = click.option(
        "--store",
        "store_path",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="The store's file.  [default: $DMUON_CACHE, else tuning.db in your cache folder]",
    )
    return option(command)


def device_option(command: Command) -> Command:
    """``--device NAME``, for :func:`device_here`."""
    option = click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="Where to run; auto is the GPU if there is one.",
    )
    return option(command)


def device_here(name: str) -> str:
    """The device that ``--device`` means: ``"cpu"`` or ``"cuda"``."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: PyTorch finds no CUDA GPU here; dmuon-tune doctor says more")
    return name


def precision_option(command: Command) -> Command:
    """``--precision NAME``."""
    option = click.option(
        "--precision",
        type=click.Choice(["auto", *PRECISIONS]),
        default="auto",
        show_default=True,
        help="What to compute in; auto is fp32 on a CPU, fp16 on a GPU, as in training.",
    )
    return option(command)


def coefficients_option(command: Command) -> Command:
    """``--coefficients NAME``."""
    option = click.option(
        "--coefficients",
        type=click.Choice(["polar_express", "keller_jordan", "you"]),
        default="polar_express",
        show_default=True,
        help="The polynomials of the iteration.",
    )
    return option(command)


def json_option(command: Command) -> Command:
    """``--json``, passed as ``as_json``."""
    option = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on stdout.")
    return option(command)


def open_store(path: Path | None) -> Store:
    """The store at ``path``, or the default one; it raises where a training run's would go on in memory."""
    from dmuon.tuning_cache import Store

    with bad_input():
        return Store(path, strict=True)


def parse_shape(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """An option's callback: ``768x3072``, either side first → ``(768, 3072)``, as problems have it."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+)[xX×](\d+)", value.strip())
    if match is None or min(sides := sorted(map(int, match.groups()))) < 1:
        raise click.BadParameter(f"{value!r} is not a shape such as 768x3072", ctx, param)
    return sides[0], sides[1]


def parse_age(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """An option's callback: ``30d``, ``12h``, ``90m`` or ``45s`` → seconds."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is not an age such as 30d, 12h or 90m", ctx, param)
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2]]


def check_backend(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """An option's callback: the name of a backend, or of those that share a trial, as ``blocked+torch``."""
    if value is None:
        return None
    from dmuon.kernels.backends import BACKENDS

    if not set(value.split("+")) <= BACKENDS.keys():
        raise click.BadParameter(f"{value!r} is not one of {', '.join(map(repr, BACKENDS))}", ctx, param)
    return value
