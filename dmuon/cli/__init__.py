"""The ``dmuon-tune`` command. Each subcommand is imported when it is used."""

from __future__ import annotations

import difflib
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from dmuon.cli.errors import INTERRUPTED, BadInput, check_cache_folder, usage_on_one_line

_COMMANDS = {
    "run": ("dmuon.cli.run:run", "Tune a model's matrices on this machine and keep the results."),
    "compile": ("dmuon.cli.compile:compile_", "Build a model's GPU kernels ahead, with or without a GPU."),
    "shapes": ("dmuon.cli.shapes:shapes", "Show what of a model would be tuned, and why."),
    "profile": ("dmuon.cli.profile:profile", "Measure the optimizer's steps, for planning."),
    "plan": ("dmuon.cli.plan:plan", "Plan who owns which matrix on a cluster, and simulate a step."),
    "simulate": ("dmuon.cli.simulate:simulate", "Compare ways to train on clusters that are not at hand."),
    "show": ("dmuon.cli.store_commands:show", "Show the best trials in the store."),
    "export": ("dmuon.cli.store_commands:export", "Write trials to a JSON Lines file."),
    "import": ("dmuon.cli.store_commands:import_", "Add the trials of a JSON Lines file to the store."),
    "prune": ("dmuon.cli.store_commands:prune", "Drop trials that are out of date."),
    "doctor": ("dmuon.cli.doctor:doctor", "Examine devices, kernel compilers, backends and the store."),
}
_MODEL_SUFFIXES = (".json", ".safetensors")


class TuneGroup(click.Group):
    """A group of lazily imported commands; what starts with none of their names belongs to ``run``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[name][0].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        if args and args[0].startswith("-") and args[0] not in own:
            args = ["run", *args]
        with usage_on_one_line():
            return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS:
            _check_is_model(args[0])
            args = ["run", *args]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            warnings.simplefilter("default", UserWarning)
            try:
                with usage_on_one_line():
                    return super().invoke(ctx)
            except KeyboardInterrupt:
                click.echo("\nInterrupted. What was finished is kept.", err=True)
                ctx.exit(INTERRUPTED)


@click.group(
    cls=TuneGroup,
    subcommand_metavar="(COMMAND | MODEL) ...",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="dmuon", message="dmuon %(version)s")
def main() -> None:
    """Tune Muon's Newton-Schulz kernels for the matrices of a model, once for each machine.

    The results are kept in a store that every later run of DMuon on this machine reads by itself.

    \b
      dmuon-tune run gpt2             tune a model; `dmuon-tune gpt2` for short
      dmuon-tune show                 see what was found
      dmuon-tune doctor               see what can run here
    """
    check_cache_folder()


def _check_is_model(word: str) -> None:
    """Tell a mistyped command from a model, before `run` looks for one."""
    if any(sign in word for sign in "/\\:") or word.endswith(_MODEL_SUFFIXES) or Path(word).exists():
        return
    from dmuon.models import preset_names

    presets = preset_names()
    if word.lower() in presets:
        return
    near = difflib.get_close_matches(word.lower(), [*_COMMANDS, *presets], n=2)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    raise BadInput(
        f"{word!r} is neither a command nor a model{hint} Commands: {', '.join(_COMMANDS)}. "
        f"Models: {', '.join(presets)}, a path, or package.module:factory."
    )


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(f"Warning: {message}", err=True)
