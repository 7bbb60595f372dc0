"""``dmuon-tune show``, ``export``, ``import`` and ``prune``: what a person does with the store."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dmuon.cli.errors import bad_input
from dmuon.cli.options import (
    OPERATIONS,
    PRECISIONS,
    check_backend,
    json_option,
    open_store,
    parse_age,
    parse_shape,
    store_option,
)

if TYPE_CHECKING:
    from dmuon.tuning_cache import Store, Trial

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class _Filters:
    """What the user asked to see; ``None`` is everything."""

    device: str | None
    op: str | None
    dtype: str | None
    shape: tuple[int, int] | None
    backend: str | None
    status: str | None

    def select(self, store: Store) -> list[Trial]:
        m, n = self.shape or (None, None)
        with bad_input():
            trials = store.trials(op=self.op, dtype=self.dtype, m=m, n=n, status=self.status)
        return [trial for trial in trials if self._fits_device(trial) and self._fits_backend(trial)]

    def _fits_device(self, trial: Trial) -> bool:
        return self.device is None or f"{trial.device}:".startswith(f"{self.device}:")

    def _fits_backend(self, trial: Trial) -> bool:
        return self.backend is None or self.backend in (trial.backend, *trial.backend.split("+"))


def _filter_options(command: Command) -> Command:
    options = (
        click.option("--device", metavar="KEY", help="A device's key, or its kind: cpu, cuda."),
        click.option("--op", type=click.Choice(OPERATIONS), help="An operation."),
        click.option("--dtype", type=click.Choice(PRECISIONS), help="A precision."),
        click.option("--shape", callback=parse_shape, metavar="MxN", help="A shape, such as 768x3072."),
        click.option("--backend", callback=check_backend, metavar="NAME", help="A backend, such as blocked."),
        click.option("--status", type=click.Choice(["ok", "rejected", "failed"]), help="What came of it."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@_filter_options
@click.option("--all", "every", is_flag=True, help="Every trial: slower, wrong and out-of-date ones too.")
@json_option
@store_option
def show(every: bool, as_json: bool, store_path: Path | None, **filters: Any) -> None:
    """Show the best trial of each problem in the store.

    Only trials that are right and up to date count: those that DMuon would use now. --status and --all list
    single trials instead. With --json each line is one trial, as `export` writes it.

    \b
      dmuon-tune show
      dmuon-tune show --device cpu --dtype bf16
      dmuon-tune show --shape 768x3072 --all
      dmuon-tune show --status rejected
    """
    store = open_store(store_path)
    asked = _Filters(**filters)
    trials = asked.select(store)
    listed = every or asked.status is not None
    chosen = trials if listed else _best(trials)
    if as_json:
        for trial in chosen:
            click.echo(trial.to_json())
        return
    if not trials:
        _explain_nothing(store)
        return

    from dmuon.cli.trial_tables import print_best, print_trials, problem_of

    if listed:
        print_trials(chosen)
    else:
        print_best(chosen, problems=len(set(map(problem_of, trials))))


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@_filter_options
@store_option
def export(file: Path, store_path: Path | None, **filters: Any) -> None:
    """Write trials to FILE as JSON Lines, one trial a line; - is stdout.

    FILE appears whole or not at all. `dmuon-tune import` reads it back, here or on another machine.

    \b
      dmuon-tune export trials.jsonl
      dmuon-tune export --device cuda --status ok - | gzip > best.jsonl.gz
    """
    from dmuon.tuning_cache.jsonl import write_lines

    trials = _Filters(**filters).select(open_store(store_path))
    to_stdout = str(file) == "-"
    with bad_input():
        count = write_lines(trials, sys.stdout if to_stdout else file)
    click.echo(f"Exported {_trials(count)} to {'stdout' if to_stdout else file}.", err=True)


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@store_option
def import_(file: Path, store_path: Path | None) -> None:
    """Add the trials of FILE, as `dmuon-tune export` wrote it, to the store; - is stdin.

    All are added or, if a line is not a valid trial, none. Those that are there already are not added twice.

    \b
      dmuon-tune import trials.jsonl
      ssh gpu-node dmuon-tune export - | dmuon-tune import -
    """
    store = open_store(store_path)
    with bad_input():
        count = store.import_jsonl(sys.stdin if str(file) == "-" else file)
    click.echo(f"Added {_trials(count)} to {store.path}.", err=True)


@click.command()
@click.option("--older-than", callback=parse_age, metavar="AGE", help="Drop also older trials: 30d, 12h.")
@click.option("--rejected", is_flag=True, help="Drop also trials that gave wrong numbers or failed.")
@click.option("--dry-run", is_flag=True, help="Say what would be dropped, and drop nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@store_option
def prune(
    older_than: float | None, rejected: bool, dry_run: bool, yes: bool, store_path: Path | None
) -> None:
    """Drop trials that are out of date from the store.

    Those are the ones made with other kernel sources or other versions of the libraries than are installed
    here now; they are never used. Trials imported from a machine with other versions are among them.

    \b
      dmuon-tune prune --dry-run
      dmuon-tune prune --older-than 30d --rejected --yes
    """
    store = open_store(store_path)
    oldest = time.time() - older_than if older_than is not None else None
    with bad_input():
        trials = store.trials()
    reasons = Counter(reason for trial in trials if (reason := _why_drop(trial, oldest, rejected)))
    doomed = sum(reasons.values())
    for reason, count in reasons.most_common():
        click.echo(f"{count:>7,}  {reason}")
    if not doomed:
        click.echo(f"Nothing to drop: {_trials(len(trials))} in {store.path}.")
        return
    if dry_run:
        click.echo(f"Would drop {doomed:,} of {_trials(len(trials))} in {store.path}.")
        return
    if not yes:
        click.confirm(f"Drop {doomed:,} of {_trials(len(trials))} in {store.path}?", abort=True)
    with bad_input():
        dropped = store.prune(keep=lambda trial: _why_drop(trial, oldest, rejected) is None)
    click.echo(f"Dropped {_trials(dropped)}.")


def _why_drop(trial: Trial, oldest: float | None, rejected: bool) -> str | None:
    from dmuon.autotune import valid

    if not valid(trial):
        return "made with other kernel sources or library versions"
    if rejected and trial.status != "ok":
        return "gave wrong numbers or failed"
    if oldest is not None and trial.created_at < oldest:
        return "too old"
    return None


def _best(trials: list[Trial]) -> list[Trial]:
    """The trial of each problem that DMuon would use, of those that are right and up to date."""
    from dmuon.cli.trial_tables import problem_of

    if not trials:
        return []  # the tuner brings torch along: an empty store must not wait for it
    from dmuon.autotune import valid
    from dmuon.autotune.answers import best_trial

    usable: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:
        if trial.status == "ok" and valid(trial):
            usable.setdefault(problem_of(trial), []).append(trial)
    return [best for group in usable.values() if (best := best_trial(group))]


def _explain_nothing(store: Store) -> None:
    with bad_input():
        count = len(store.trials())
    if count:
        click.echo(f"None of the {_trials(count)} in {store.path} is as asked.")
        return
    click.echo(f"The store {store.path} is empty. To fill it, tune a model:\n\n  dmuon-tune run gpt2")


def _trials(count: int) -> str:
    return "1 trial" if count == 1 else f"{count:,} trials"
