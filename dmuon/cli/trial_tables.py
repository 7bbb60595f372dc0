"""Tables of trials for a terminal, 80 columns and up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dmuon.tuning_cache import Trial

_STYLES = {"ok": "green", "rejected": "red", "failed": "yellow"}


def problem_of(trial: Trial) -> tuple[Any, ...]:
    """What was to be solved, in the order that tables have it."""
    return (*_setting(trial), trial.m, trial.n, trial.batch)


def print_best(best: Sequence[Trial], problems: int) -> None:
    """One line for each problem, with its best trial; of ``problems`` that the store knows."""
    console = _console()
    for group in _by_setting(console, best):
        table = _table(">shape", ">batch", "choice", ">ms", ">error", ">age")
        for trial in group:
            table.add_row(*_problem(trial), describe(trial), *_figures(trial))
        console.print(table, "")
    if missing := problems - len(best):
        what = "1 problem has" if missing == 1 else f"{missing:,} problems have"
        console.print(f"[dim]{what} no trial that is right and up to date; see --all.[/]")


def print_trials(trials: Iterable[Trial]) -> None:
    """One line for each trial, and below it why it was rejected or failed."""
    console = _console()
    for group in _by_setting(console, trials):
        table = _table(">shape", ">batch", "status", "choice", ">ms", ">error", ">age")
        for trial in group:
            status = f"[{_STYLES[trial.status]}]{trial.status}[/]"
            choice = describe(trial) + (f"\n[dim]{_escape(trial.message)}[/]" if trial.message else "")
            table.add_row(*_problem(trial), status, choice, *_figures(trial))
        console.print(table, "")


def describe(trial: Trial) -> str:
    """The configuration in words, as console markup."""
    from dmuon.autotune.describe import choice_text
    from dmuon.kernels.choose import NSChoice

    try:
        text = choice_text(NSChoice.from_config(trial.config))
    except ValueError:
        # A single product, or a configuration of another version.
        text = f"{trial.backend} {json.dumps(trial.config)}" if trial.config else trial.backend
    return _escape(text)


def _by_setting(console: Console, trials: Iterable[Trial]) -> Iterator[list[Trial]]:
    """Print a heading for each device and kind of problem, then give its trials, by shape."""
    device = None
    for setting, group in groupby(sorted(trials, key=_order), key=_setting):
        if setting[0] != device:
            device = setting[0]
            console.print(f"[bold]{_escape(device)}[/]\n", soft_wrap=True)
        _, op, dtype, coefficients = setting
        heading = f"{op} in {dtype}, {coefficients}" if coefficients else f"{op} in {dtype}"
        console.print(f"[bold]{_escape(heading)}[/]", soft_wrap=True)
        yield list(group)


def _setting(trial: Trial) -> tuple[str, str, str, str]:
    return trial.device, trial.op, trial.dtype, trial.coefficients


def _order(trial: Trial) -> tuple[Any, ...]:
    return (*problem_of(trial), trial.status != "ok", trial.median_ms or 0.0, trial.created_at)


def _problem(trial: Trial) -> tuple[str, str]:
    return f"{trial.m}×{trial.n}", str(trial.batch)


def _figures(trial: Trial) -> tuple[str, str, str]:
    time_ms = _ms(trial.median_ms) + ("" if trial.spread is None else f" ±{trial.spread:.0%}")
    error = "" if trial.error is None else f"{trial.error:.1e}"
    return time_ms, error, _age(trial)


def _ms(value: float | None) -> str:
    """About four significant figures, at any size."""
    if value is None:
        return ""
    decimals = next((d for limit, d in ((10, 3), (100, 2), (1000, 1)) if value < limit), 0)
    return f"{value:,.{decimals}f}"


def _age(trial: Trial) -> str:
    seconds = max(0.0, time.time() - trial.created_at)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "new"


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _table(*columns: str) -> Table:
    """A table of these columns; ``>`` marks one of numbers, and the others share the width that is left."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    for name in columns:
        if name.startswith(">"):
            table.add_column(name[1:], justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    return table


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
