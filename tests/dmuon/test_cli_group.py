"""The `dmuon-tune` group: help, lazy imports, MODEL for `run MODEL`, mistyped words, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import click
import pytest
from cli_helpers import check_one_line_error, invoke
from click.testing import CliRunner

import dmuon
from dmuon.cli import main

COMMANDS = ["run", "compile", "shapes", "profile", "show", "export", "import", "prune", "doctor"]


def test_help_names_every_command_and_each_has_help():
    text = invoke("--help").stdout
    assert all(f"\n  {name} " in text for name in COMMANDS)
    for name in ("compile", "shapes", "profile", "show", "export", "import", "prune", "doctor"):
        assert f"dmuon-tune {name}" in invoke(name, "--help").stdout.split("Options:")[0].split("\n", 1)[1]
    assert invoke("--version").stdout == f"dmuon {dmuon.__version__}\n"


def test_starting_up_imports_neither_torch_nor_the_dsls(tmp_path):
    code = (
        "import sys\n"
        "from dmuon.cli import main\n"
        "for arguments in (['--help'], ['show'], ['show', '--json'], ['export', '-']):\n"
        "    main(arguments, standalone_mode=False)\n"
        "heavy = {'torch', 'triton', 'tilelang', 'cutlass', 'scipy', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "DMUON_CACHE": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "dmuon-tune run gpt2" in done.stdout and not (tmp_path / "none").exists()


@pytest.fixture
def fake_run(monkeypatch):
    """A `run` that prints what it was asked, or does as its model's name says."""

    @click.command(context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1)
    def run(arguments):
        if arguments[0] == "interrupt:now":
            raise KeyboardInterrupt
        click.echo(" ".join(arguments))

    module = types.ModuleType("dmuon.cli.run")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dmuon.cli.run", module)


@pytest.mark.parametrize(
    "arguments",
    [
        ["gpt2"],
        ["GPT2", "--budget", "1m"],
        ["package.module:factory"],
        ["./missing/config.json"],
        ["model.safetensors"],
        ["--shape", "4096x11008", "--count", "32"],
    ],
)
def test_what_is_no_command_but_may_be_a_model_goes_to_run(fake_run, arguments):
    assert invoke(*arguments).stdout == " ".join(arguments) + "\n" == invoke("run", *arguments).stdout


def test_an_existing_folder_is_a_model(fake_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mymodel").mkdir()
    assert invoke("mymodel").stdout == "mymodel\n"


@pytest.mark.parametrize(
    ("word", "near"), [("shwo", "'show'"), ("exprot", "'export'"), ("gtp2", "'gpt2'"), ("zzzz", "")]
)
def test_a_mistyped_word_gets_the_commands_and_the_models(word, near):
    result = invoke(word, code=2)
    assert result.stderr.startswith(f"Error: {word!r} is neither a command nor a model")
    assert result.stderr.count("\n") == 1
    assert near in result.stderr and ("did you mean" in result.stderr) == bool(near)
    assert all(name in result.stderr for name in [*COMMANDS, "qwen2.5-7b"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bogus"], "--bogus"),
        (["run", "gpt2", "--device", "tpu"], "'tpu' is not one of 'auto', 'cpu', 'cuda'; see dmuon-tune run"),
        (["run", "gpt2", "more", "words"], "extra arguments (more words); see dmuon-tune run --help"),
        (["gpt2", "--budget"], "requires an argument"),
        (["gpt2", "--budget", "2x"], "--budget 2x: a time above zero"),
    ],
)
def test_a_wrong_call_gets_one_line(arguments, says):
    check_one_line_error(*arguments, says=says)


def test_without_arguments_comes_the_help():
    assert "Commands:" in CliRunner().invoke(main, []).output


def test_an_interrupted_command_exits_with_130(fake_run):
    result = invoke("interrupt:now", code=130)
    assert "Interrupted" in result.stderr and result.stdout == ""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_in_a_real_process_exits_with_130():
    code = (
        "import sys, time, types, click\n"
        "module = types.ModuleType('dmuon.cli.run')\n"
        "module.run = click.command()(lambda: (print('working', flush=True), time.sleep(60)))\n"
        "sys.modules['dmuon.cli.run'] = module\n"
        "from dmuon.cli import main\n"
        "main(['run'])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"working\n"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 130 and b"Traceback" not in errors


def test_a_cache_folder_that_is_a_file_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    path.touch()
    monkeypatch.setenv("DMUON_CACHE", str(path))
    for arguments in (("show",), ("doctor",), ("compile", "gpt2", "--arch", "sm_80")):
        check_one_line_error(*arguments, says=f"DMUON_CACHE names {path}, which is a file")
