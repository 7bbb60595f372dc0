"""`dmuon-tune`: the group itself, the commands on the store, and `doctor`."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import click
import dmuon.autotune
import pytest
from click.testing import CliRunner
from dmuon.tuning_cache import Store, Trial

from dmuon.cli import doctor as doctor_module
from dmuon.cli import main
from dmuon.cli.probe import probe_import

COMMANDS = ["run", "shapes", "show", "export", "import", "prune", "doctor"]
CPU, GPU = "cpu:Some CPU AVX512:2", "cuda:NVIDIA H200"


def trial(**changes: Any) -> Trial:
    values: dict[str, Any] = {
        "op": "gram_ns",
        "batch": 1,
        "m": 768,
        "n": 3072,
        "dtype": "fp32",
        "device": CPU,
        "coefficients": "polar_express",
        "backend": "blocked",
        "config": {"method": "gram", "restarts": [2], "loop": False},
        "status": "ok",
        "error": 2e-7,
        "tolerance": 1e-5,
        "median_ms": 12.5,
        "spread": 0.03,
        "samples": 9,
        "message": "",
        "versions": {"torch": "2.13.0"},
        "source_hash": "current",
        "created_at": time.time() - 3600,
    }
    if changes.get("status", "ok") != "ok":
        values.update(median_ms=None, error=0.5, message="relative error 0.5 is above 1e-5")
    return Trial(**{**values, **changes})


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Where the default store is; a trial is valid unless its source hash says that it is old."""
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(dmuon.autotune, "valid", lambda trial: trial.source_hash != "old", raising=False)
    return tmp_path / "cache" / "tuning.db"


@pytest.fixture
def filled(path):
    """Two problems on the CPU, one of them with a faster but old trial, and one on a GPU."""
    trials = [
        trial(median_ms=12.5),
        trial(median_ms=11.25, backend="torch", config={"method": "standard", "restarts": [], "loop": False}),
        trial(median_ms=1.0, source_hash="old"),
        trial(status="rejected"),
        trial(m=512, n=512, batch=4, median_ms=3.5, backend="blocked+torch", dtype="bf16"),
        trial(op="gram", coefficients="", config={"block": 256}, device=GPU, median_ms=0.0425),
    ]
    Store(path).record(trials)
    return trials


def invoke(*arguments: object, code: int = 0, **options: Any) -> Any:
    result = CliRunner().invoke(main, list(map(str, arguments)), **options)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def check_one_line_error(*arguments: object, says: str, **options: Any) -> None:
    result = invoke(*arguments, code=2, **options)
    assert result.stdout == ""
    assert sum(line.startswith("Error: ") for line in result.stderr.splitlines()) == 1
    assert says in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr


def lines(result: Any) -> list[Trial]:
    return [Trial.from_json(line) for line in result.stdout.splitlines()]


# The group


def test_help_names_every_command_and_each_has_help():
    text = invoke("--help").stdout
    assert all(f"\n  {name} " in text for name in COMMANDS)
    for name in ("shapes", "show", "export", "import", "prune", "doctor"):
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


# show


def test_show_on_an_empty_store_says_what_to_run(path):
    text = invoke("show").stdout
    assert str(path) in text and "dmuon-tune run gpt2" in text
    assert invoke("show", "--json").stdout == ""
    assert not path.parent.exists()


def test_show_has_the_best_valid_trial_of_each_problem(filled):
    assert lines(invoke("show", "--json")) == [filled[1], filled[4], filled[5]]
    text = invoke("show").stdout
    assert CPU in text and GPU in text and "gram_ns in bf16, polar_express" in text
    row = next(line for line in text.splitlines() if "768×3072" in line and "standard" in line)
    assert row.split() == ["768×3072", "1", "standard", "torch", "11.25", "3%", "2.0e-07", "4", "1", "h"]
    assert "gram[2] blocked+torch" in text and 'blocked {"block": 256}' in text


def test_a_problem_with_old_trials_only_is_counted(path):
    Store(path).record([trial(source_hash="old"), trial(m=64, source_hash="old"), trial(m=32)])
    text = invoke("show").stdout
    assert "2 problems have no trial that is right and up to date; see --all" in text
    assert text.count("×3072") == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--device", "cpu"], [1, 4]),
        (["--device", "cuda"], [5]),
        (["--device", CPU], [1, 4]),
        (["--device", "cuda:NVIDIA H20"], []),
        (["--op", "gram"], [5]),
        (["--dtype", "bf16"], [4]),
        (["--shape", "512x512"], [4]),
        (["--shape", "3072×768", "--device", "cpu"], [1]),
        (["--backend", "blocked"], [0, 4, 5]),
        (["--backend", "blocked+torch"], [4]),
        (["--status", "rejected"], [3]),
        (["--all", "--device", "cpu", "--dtype", "fp32"], [0, 1, 2, 3]),
    ],
)
def test_show_filters(filled, options, expected):
    assert lines(invoke("show", "--json", *options)) == [filled[i] for i in expected]
    text = invoke("show", *options).stdout
    assert expected or "None of the 6 trials" in text


def test_listed_trials_say_why_they_were_rejected(filled):
    text = " ".join(invoke("show", "--status", "rejected").stdout.split())
    assert "rejected gram[2] blocked 3% 5.0e-01 1 h relative error 0.5 is above 1e-5" in text


def test_tables_fit_80_columns(path):
    Store(path).record(
        [
            trial(m=18944, n=151936, batch=128, median_ms=123456.7, backend="cute+tilelang+triton"),
            trial(m=3584, n=18944, status="failed", message="[ValueError] " + "shared memory " * 20),
        ]
    )
    for options in ([], ["--all"]):
        text = invoke("show", *options).stdout
        assert max(map(len, text.splitlines())) <= 80
        assert "18944×151936" in text and "123,457" in text
    assert "[ValueError]" in text


# export and import


def test_export_and_import_round_trip(filled, tmp_path):
    result = invoke("export", tmp_path / "all.jsonl")
    assert result.stdout == "" and "Exported 6 trials" in result.stderr
    other = tmp_path / "other.db"
    assert "Added 6 trials" in invoke("import", "--store", other, tmp_path / "all.jsonl").stderr
    assert Store(other).trials() == filled
    assert "Added 0 trials" in invoke("import", "--store", other, tmp_path / "all.jsonl").stderr


def test_export_and_import_through_pipes(filled, tmp_path):
    result = invoke("export", "-", "--device", "cuda")
    assert lines(result) == [filled[5]]
    invoke("import", "-", "--store", tmp_path / "other.db", input=result.stdout)
    assert Store(tmp_path / "other.db").trials() == [filled[5]]
    assert invoke("export", "-", "--status", "failed").stdout == ""


def test_a_bad_import_changes_nothing(filled, path, tmp_path):
    (tmp_path / "bad.jsonl").write_text(trial(m=5).to_json() + "\n{}\n")
    check_one_line_error("import", tmp_path / "bad.jsonl", says="bad.jsonl, line 2: missing")
    check_one_line_error("import", "-", input="junk\n", says="line 1: not JSON")
    check_one_line_error("import", tmp_path / "none.jsonl", says="none.jsonl: No such file")
    assert Store(path).trials() == filled


def test_export_to_nowhere(filled, tmp_path):
    check_one_line_error("export", tmp_path / "none" / "x.jsonl", says="No such file")


# prune


def test_prune_drops_what_is_out_of_date(filled, path):
    assert "Would drop 1 of 6 trials" in invoke("prune", "--dry-run").stdout
    assert Store(path).trials() == filled
    invoke("prune", input="n\n", code=1)
    invoke("prune", input="", code=1)
    assert Store(path).trials() == filled
    assert "Dropped 1 trial." in invoke("prune", input="y\n").stdout
    assert Store(path).trials() == [each for each in filled if each.source_hash != "old"]
    assert "Nothing to drop: 5 trials" in invoke("prune").stdout


def test_prune_by_age_and_outcome(path):
    now = time.time()
    kept = trial(created_at=now - 29 * 86400)
    Store(path).record([kept, trial(created_at=now - 31 * 86400), trial(status="rejected", m=2)])
    text = invoke("prune", "--older-than", "30d", "--rejected", "--yes").stdout
    assert "too old" in text and "wrong numbers" in text and "Dropped 2 trials." in text
    assert Store(path).trials() == [kept]


def test_prune_asks_the_tuner_what_is_valid(tmp_path):
    """With the real judgement: only this installation's sources and versions survive."""
    from dmuon.autotune.versions import versions_now
    from dmuon.kernels.backends import source_hash

    here = {"versions": versions_now(["blocked"], CPU), "source_hash": source_hash(["blocked"])}
    path = tmp_path / "tuning.db"
    Store(path).record([trial(m=1, **here), trial(m=2, **{**here, "versions": {"torch": "1.0"}}), trial(m=3)])
    invoke("prune", "--yes", "--store", path)
    assert [each.m for each in Store(path).trials()] == [1]


# Stores that cannot be used


@pytest.mark.parametrize("command", [["show"], ["export", "-"], ["prune", "--yes"], ["import", "-"]])
def test_a_store_that_cannot_be_used_is_bad_input(command, path, tmp_path):
    foreign = tmp_path / "theirs.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("create table mine (a)")
    connection.close()
    newer = tmp_path / "newer.db"
    Store(newer).record([trial()])
    with sqlite3.connect(newer) as connection:
        connection.execute("pragma user_version = 99")
    connection.close()
    (tmp_path / "notes.txt").write_text("not a database" * 9)
    for store, says in (
        (foreign, f"{foreign} is not a DMuon store"),
        (newer, "schema version 99"),
        (tmp_path, f"{tmp_path} is a folder"),
        (tmp_path / "notes.txt", "notes.txt is not a DMuon store"),
    ):
        before = store.read_bytes() if store.is_file() else b""
        check_one_line_error(*command, "--store", store, says=says, input=trial().to_json())
        assert (store.read_bytes() if store.is_file() else b"") == before
    assert {entry.name for entry in tmp_path.iterdir()} == {"theirs.db", "newer.db", "notes.txt"}


def test_a_corrupt_store_is_set_aside_with_one_line(path):
    path.parent.mkdir()
    path.write_bytes(b"garbage" * 99)
    result = invoke("show")
    assert result.stderr.count("\n") == 1 and result.stderr.startswith(f"Warning: {path} is corrupt")
    assert "is empty" in result.stdout
    assert [entry.read_bytes() for entry in path.parent.iterdir()] == [b"garbage" * 99]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "--shape", "768"], "'768' is not a shape such as 768x3072"),
        (["show", "--shape", "0x5"], "is not a shape"),
        (["show", "--status", "fine"], "'fine' is not one of"),
        (["prune", "--older-than", "2x"], "'2x' is not an age such as 30d"),
        (["prune", "--older-than", "-1d"], "is not an age"),
        (["import"], "Missing argument 'FILE'"),
        (["doctor", "--timeout", "soon"], "'soon' is not a valid float"),
    ],
)
def test_bad_arguments(path, arguments, says):
    check_one_line_error(*arguments, says=says)
    assert not path.parent.exists()


# doctor

MODULES = {
    "dsl_fine": "import sys; print('loud'); sys.stderr.write('louder')",
    "dsl_raises": "raise ImportError('libfancy.so.7: no such file')",
    "dsl_aborts": "import os; os.abort()",
    "dsl_hangs": "import time; time.sleep(600)",
    "dsl_exits": "import sys; sys.exit(3)",
    "dsl_crashes_at_exit": "import atexit, os; atexit.register(os.abort)",
    "dsl_hangs_in_a_child": (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "time.sleep(600)"
    ),
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    folder = tmp_path / "modules"
    folder.mkdir()
    for name, body in MODULES.items():
        (folder / f"{name}.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("dsl_fine", None),
        ("dsl_crashes_at_exit", None),
        ("dsl_raises", "ImportError: libfancy.so.7: no such file"),
        ("dsl_aborts", "SIGABRT"),
        ("dsl_exits", "import failed"),
        ("dsl_not_there", "No module named 'dsl_not_there'"),
    ],
)
def test_probe(modules, module, says):
    problem = probe_import(module).problem
    assert (problem is None) if says is None else (says in (problem or ""))


@pytest.mark.parametrize("module", ["dsl_hangs", "dsl_hangs_in_a_child"])
def test_probe_gives_up_on_an_import_that_hangs(modules, module):
    start = time.monotonic()
    assert probe_import(module, timeout_s=1.5).problem == "still importing after 1.5 s"
    assert time.monotonic() - start < 10


def test_probe_ignores_files_in_the_current_folder(modules, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(modules)
    assert "No module named" in (probe_import("dsl_aborts").problem or "")


@pytest.fixture
def compilers(modules, monkeypatch):
    """Pretend that compilers of all kinds are installed."""
    found = {"fine": "dsl_fine", "raising": "dsl_raises", "aborting": "dsl_aborts", "hanging": "dsl_hangs"}
    monkeypatch.setattr(doctor_module, "_COMPILERS", {**found, "absent": "dsl_not_there"})
    monkeypatch.setattr(doctor_module, "_version", lambda name: None if name == "absent" else "1.0")


def test_doctor_reports_what_fails_and_is_not_harmed(path, compilers):
    Store(path).record([trial()])
    report = json.loads(invoke("doctor", "--json", "--timeout", "2").stdout)
    problems = {each["name"]: each["problem"] for each in report["software"]}
    assert problems.pop("torch") is None and problems.pop("fine") is None
    assert "libfancy" in problems["raising"] and "SIGABRT" in problems["aborting"]
    assert "still importing" in problems["hanging"] and problems["absent"] == "not installed"
    assert report["devices"][0]["name"] == "cpu" and report["devices"][0]["key"].startswith("cpu:")
    assert {"backend": "torch", "device": "cpu", "problem": None} in report["backends"]
    assert report["store"]["rows"] == 1 and report["store"]["problem"] is None

    text = invoke("doctor", "--timeout", "2").stdout
    assert max(map(len, text.splitlines())) <= 80
    for word in ("Devices", "Libraries", "Backends", "Store", "SIGABRT", "not installed", "1 trial"):
        assert word in text


def test_doctor_names_the_library_that_keeps_a_backend_from_running(monkeypatch):
    class NeedsBroken:
        requires = ("torch", "broken")

        def unavailable(self, device):
            raise AssertionError("asked although its library is known to crash")

    monkeypatch.setattr("dmuon.kernels.backends.BACKENDS", {"fancy": NeedsBroken()})
    software = [
        doctor_module.Software("torch", "2", None),
        doctor_module.Software("broken", "1", "import failed: boom"),
    ]
    device = doctor_module.Device("cpu", "cpu:x:2", "")
    [report] = doctor_module.judge_backends([device], software)
    assert report.problem == "broken: import failed: boom"


def test_doctor_on_a_store_that_is_not_there_or_not_sound(path, monkeypatch):
    monkeypatch.setattr(doctor_module, "_COMPILERS", {"absent": "dsl_not_there"})
    assert "not there yet" in invoke("doctor").stdout
    assert not path.parent.exists()
    path.parent.mkdir()
    path.write_bytes(b"garbage" * 99)
    result = invoke("doctor", code=1)
    assert "file is not a database" in " ".join(result.stdout.split())
    assert path.read_bytes() == b"garbage" * 99
    assert json.loads(invoke("doctor", "--json", code=1).stdout)["store"]["problem"]
