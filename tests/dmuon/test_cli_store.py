"""`dmuon-tune show`, `export`, `import` and `prune`."""

from __future__ import annotations

import sqlite3
import time

import pytest
from cli_helpers import CPU, GPU, check_one_line_error, invoke, lines, trial

import dmuon.autotune
from dmuon.cli.options import OPERATIONS as CLI_OPERATIONS
from dmuon.cli.options import PRECISIONS as CLI_PRECISIONS
from dmuon.kernels.choose import OPERATIONS, NSChoice
from dmuon.kernels.precision import PRECISIONS
from dmuon.tuning_cache import Store


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
        trial(median_ms=11.25, backend="torch", config=NSChoice("standard").to_config()),
        trial(median_ms=1.0, source_hash="old"),
        trial(status="rejected"),
        trial(m=512, n=512, batch=4, median_ms=3.5, backend="blocked+torch", dtype="bf16"),
        trial(op="gram", coefficients="", config={"block": 256}, device=GPU, median_ms=0.0425),
    ]
    Store(path).record(trials)
    return trials


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
    assert row.split() == ["768×3072", "1", "standard", "·", "torch", "11.25", "±3%", "2.0e-07", "1", "h"]
    assert "gram, restart 2 · blocked 256" in text and 'blocked {"block": 256}' in text


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
    assert "rejected gram, restart 2 · blocked 256 5.0e-01 1 h relative error 0.5 is above 1e-5" in text


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
        (["show", "--status", "fine"], "'fine' is not one of 'ok', 'rejected', 'failed'"),
        (["show", "--dtype", "zz"], "'zz' is not one of 'fp64', 'fp32', 'bf16', 'fp16'"),
        (["show", "--op", "zz"], "'zz' is not one of 'gram_ns', "),
        (["show", "--backend", "zz"], "'zz' is not one of 'torch', 'blocked', "),
        (["export", "--dtype", "zz", "-"], "'zz' is not one of"),
        (["show", "--bogus"], "--bogus"),
        (["show", "--dtype"], "requires an argument"),
        (["prune", "--older-than", "2x"], "'2x' is not an age such as 30d"),
        (["prune", "--older-than", "-1d"], "is not an age"),
        (["import"], "Missing argument 'FILE'"),
        (["doctor", "--timeout", "soon"], "'soon' is not a valid float"),
    ],
)
def test_bad_arguments(path, arguments, says):
    check_one_line_error(*arguments, says=says)
    assert not path.parent.exists()


def test_the_words_that_options_take_are_those_of_the_kernels():
    assert tuple(PRECISIONS) == CLI_PRECISIONS and OPERATIONS == CLI_OPERATIONS
