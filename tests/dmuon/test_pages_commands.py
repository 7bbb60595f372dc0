"""The commands of the pages: run where this machine can, and otherwise held against what the programs accept."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from cli_helpers import invoke

from dmuon.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What is not run here, and who runs it instead.
NOT_RUN = {
    r"python3(\.12)? -m venv |\. \.venv/|(\S+/)?pip install |\S+/pytest": ".ci/run makes environments and tests there",
    r"\.venv/bin/mkdocs serve": "it never ends; .ci/run builds the site",
    r"(sudo )?python bench/": "full benchmarks; tests/bench runs each with toy sizes",
    r"\.venv/bin/python examples/": "minutes; test_example.py runs it in full",
    r"dmuon-tune run .*--device cuda": "there is no GPU",
    r"dmuon-tune compile |dmuon-tune doctor --arch": "minutes of compilers; test_cli_compile.py runs one shape",
    r"export |.*torchrun … ": "with the reader's own folder or script",
}


def commands_of(page: Path) -> list[str]:
    found = []
    for language, block in re.findall(r"```(bash|console)\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            assert language == "bash" or line.startswith("$ "), line
            found += [part.split(" # ")[0].strip() for part in line.removeprefix("$ ").split("&&")]
    return [command for command in found if command]


COMMANDS = {str(page.relative_to(ROOT)): commands for page in PAGES if (commands := commands_of(page))}


def arguments_of(command: str) -> list[str] | None:
    """What ``dmuon-tune`` is given; None for other commands."""
    program, *arguments = shlex.split(command)
    return arguments if program in ("dmuon-tune", ".venv/bin/dmuon-tune") else None


def not_run(command: str) -> bool:
    return any(re.match(pattern, command) for pattern in NOT_RUN)


def test_the_pages_have_commands() -> None:
    assert {"README.md", "docs/index.md", "docs/cli.md", "docs/gpu.md", "bench/README.md"} <= COMMANDS.keys()
    every = [command for commands in COMMANDS.values() for command in commands]
    for command in every:
        assert not_run(command) or arguments_of(command) is not None, f"who runs {command!r}?"
    for pattern in NOT_RUN:
        assert any(re.match(pattern, command) for command in every), f"{pattern} is on no page"


@pytest.mark.parametrize("page", COMMANDS)
def test_dmuon_tune_accepts_its_arguments(page: str) -> None:
    """All of them: names and values of options, models that are presets, devices, archs."""
    for command in COMMANDS[page]:
        arguments = arguments_of(command)
        if arguments is not None:
            with click.Context(main, info_name="dmuon-tune") as context:
                name, subcommand, rest = main.resolve_command(context, arguments)
                assert subcommand is not None
                subcommand.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", [page for page in COMMANDS if any(map(arguments_of, COMMANDS[page]))])
def test_dmuon_tune_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small shape in place of a model to tune, and seconds in place of minutes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path / "cache"))
    for command in COMMANDS[page]:
        arguments = arguments_of(command)
        if arguments is None or not_run(command):
            continue
        if arguments[0] == "run":
            arguments = ["run", "--shape", "64x256", *arguments[2:], "--budget", "10s"]
        invoke(*arguments)


SCRIPTS = sorted(
    {match[0] for c in COMMANDS.values() for s in c if (match := re.search(r"\b(bench|examples)/\w+\.py", s))}
)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_have_the_options_that_pages_name(script: str) -> None:
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    options = set(re.findall(r"--[\w-]+", done.stdout))
    named = [c for commands in COMMANDS.values() for c in commands if script in c]
    assert named and {option for c in named for option in re.findall(r"--[\w-]+", c)} <= options


def test_the_extras_that_pages_install_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    extras = set(
        re.findall(r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1].split("\n[")[0], re.M)
    )
    named = {e for page in PAGES for e in re.findall(r"(?:'\.|dmuon)\[(\w+)\]", page.read_text("utf-8"))}
    assert {"test", "docs", "bench", "clients"} <= named <= extras
