from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from dmuon.autotune import ns_problem
from dmuon.autotune.tuner import claim_key
from dmuon.cli import main
from dmuon.cli.run import BudgetType
from dmuon.cli.workloads import workloads_of
from dmuon.models import shape_spec
from dmuon.models.shapes import ModelShapes
from dmuon.policy import Matrix, MatrixPolicy, Routing
from dmuon.tuning_cache import Store, Trial

TINY = ("--shape", "16x48", "--count", "3", "--budget", "3s")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for the processes that tests start
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch) -> Store:
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path / "cache"))
    return Store(tmp_path / "cache" / "tuning.db")


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["run", *args])


def start(*args: str, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from dmuon.cli import main; main()", "run", *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **{**pipes, **options})


def refused(result: Result) -> str:
    """The one line that says why."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    [line] = result.stderr.strip().splitlines()
    return line


def test_tunes_then_answers_from_the_store(store: Store):
    first = run(*TINY)
    assert first.exit_code == 0, first.output
    assert "16×48" in first.stdout
    assert "100.0%" in first.stdout
    assert "1 tuned" in first.stdout
    assert str(store.path) in first.stdout.replace("\n", "")
    [line] = first.stderr.strip().splitlines()
    assert line.startswith("3 × 16×48: ")
    assert "x plain" in line
    trials = store.trials()
    assert {(trial.batch, trial.m, trial.n, trial.dtype) for trial in trials} == {(3, 16, 48, "fp32")}

    second = run(*TINY)
    assert second.exit_code == 0
    assert "All from the store" in second.stdout
    assert second.stderr == ""
    assert store.trials() == trials


def test_the_short_form(store: Store):
    result = CliRunner().invoke(main, list(TINY))
    assert result.exit_code == 0, result.output
    assert store.trials(status="ok")


def test_json_is_one_document(store: Store):
    result = run(*TINY, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    [shape] = document["shapes"]
    assert (shape["m"], shape["n"], shape["count"], shape["batches"]) == (16, 48, 3, [3])
    assert shape["status"] == "tuned"
    assert shape["share"] == 1.0
    assert shape["source"] == "measured"
    assert shape["step_ms"] == shape["ms"] == document["step_ms"]
    assert shape["choice"]["method"] in ("gram", "standard")
    assert shape["timed"] + shape["rejected"] + shape["failed"] <= shape["candidates"]
    assert not document["all_from_store"] and not document["interrupted"]
    assert 0 < document["elapsed_s"] <= 10
    assert Path(document["store"]) == store.path

    again = json.loads(run(*TINY, "--json").stdout)
    assert again["all_from_store"]
    assert again["shapes"][0]["choice"] == shape["choice"]
    assert again["shapes"][0]["speedup"] == pytest.approx(shape["speedup"])


def test_precision_and_coefficients_are_problems_of_their_own(store: Store):
    assert run(*TINY).exit_code == 0
    document = json.loads(run(*TINY, "--precision", "bf16", "--coefficients", "you", "--json").stdout)
    assert (document["precision"], document["coefficients"]) == ("bf16", "you:5")
    assert document["shapes"][0]["status"] == "tuned"
    assert {trial.dtype for trial in store.trials()} == {"fp32", "bf16"}


def test_force_tunes_again(store: Store):
    run(*TINY)
    before = len(store.trials())
    assert json.loads(run(*TINY, "--force", "--json").stdout)["shapes"][0]["status"] == "tuned"
    assert len(store.trials()) > before


def test_only_the_backend_asked_for_and_the_yardstick(store: Store):
    assert run("--shape", "300x300", "--budget", "3s", "--backend", "torch").exit_code == 0
    assert {trial.backend for trial in store.trials()} == {"torch"}


def test_out_of_reach_is_said_at_once(store: Store):
    start_s = time.perf_counter()
    result = run("--shape", "4096x11008", "--count", "32", "--budget", "1s")
    assert result.exit_code == 1
    assert time.perf_counter() - start_s < 20
    assert "4096×11008 not reached: needs about" in result.stdout
    assert "A larger --budget" in result.stdout
    assert not store.trials()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("2m", 120),
        ("1h", 3600),
        ("1m30s", 90),
        ("1h2m3s", 3723),
        ("0.5m", 30),
        ("1M", 60),
    ],
)
def test_budgets(text, seconds):
    assert BudgetType().convert(text, None, None) == seconds


@pytest.mark.parametrize(
    "text", ["2x", "", "0", "0s", "-5", "m", "s5", "5 minutes", "1s1m", "inf", "nan", "1e3", "٣"]
)
def test_a_budget_that_is_none(text, store: Store):
    line = refused(run("--shape", "8x8", "--budget", text))
    assert "--budget" in line and "1m30s" in line
    assert not store.path.parent.exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "name a MODEL or give --shape"),
        (("gpt2", "--shape", "8x8"), "one of the two"),
        (("gpt2", "--count", "3"), "--count goes with --shape"),
        (("no-such-model",), "no model 'no-such-model'"),
        (("--shape", "8by8"), "4096x11008"),
        (("--shape", "8x8", "--backend", "warp"), "'warp'"),
    ],
)
def test_bad_input_is_one_line(args, says, store: Store):
    assert says in refused(run(*args))
    assert not store.path.parent.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(store: Store):
    assert "--device cuda" in refused(run(*TINY, "--device", "cuda"))


def test_a_file_that_is_no_store_stays_as_it_is(tmp_path):
    thesis = tmp_path / "thesis.db"
    with closing(sqlite3.connect(thesis)) as db:
        db.execute("create table chapters (title text)")
    before = thesis.read_bytes()
    assert "thesis.db" in refused(run(*TINY, "--store", str(thesis)))
    assert thesis.read_bytes() == before


def matrices(*sides: tuple[int, int, int]) -> ModelShapes:
    routings = [
        Routing(f"w{k}", (count, m, n), "muon", "", (Matrix((count, m, n), m, n, batch=count),))
        for k, (count, m, n) in enumerate(sides)
    ]
    return ModelShapes("test", "test", tuple(routings))


def test_workloads_are_the_batches_that_the_optimizer_runs():
    """At most 2²⁵ elements a batch, as even as can be; transposes apart, though they pose one problem."""
    found = workloads_of(
        matrices((24, 768, 3072), (24, 3072, 768), (3, 64, 64)), "cpu", "auto", "polar_express"
    )
    assert [(w.problem.batch, w.problem.m, w.problem.n, w.sizes) for w in found] == [
        (12, 768, 3072, (12, 12, 12, 12)),
        (3, 64, 64, (3,)),
    ]
    assert found[0].count == 48


def test_workloads_agree_with_the_optimizer(monkeypatch):
    """Counted on a real step of dmuon.Muon."""
    import dmuon
    from dmuon import matrix_step

    model = torch.nn.Sequential(*[torch.nn.Linear(48, 16) for _ in range(5)], torch.nn.Linear(16, 48))
    asked = []
    gram_ns = matrix_step.gram_ns
    monkeypatch.setattr(
        matrix_step, "gram_ns", lambda G, **rest: asked.append(tuple(G.shape)) or gram_ns(G, **rest)
    )
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    dmuon.Muon(model).step()
    shapes = ModelShapes("m", "m", tuple(MatrixPolicy().route_model(model)))
    posed = [
        (size, w.problem.m, w.problem.n)
        for w in workloads_of(shapes, "cpu", "auto", "polar_express")
        for size in w.sizes
    ]
    assert sorted(posed) == sorted((b, min(r, c), max(r, c)) for b, r, c in asked)


def test_uneven_batches_share_a_problem():
    [work] = workloads_of(shape_spec("2048x4096", 9), "cpu", "auto", "polar_express")
    assert work.sizes == (3, 3, 3)
    [work] = workloads_of(shape_spec("2048x4096", 7), "cpu", "auto", "polar_express")
    assert work.sizes == (4, 3) and work.problem.batch == 4


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_ctrl_c_keeps_what_is_finished(store: Store, tmp_path):
    """A small problem is done and a large one in progress when SIGINT comes."""
    (tmp_path / "two_layers.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(48, 16), nn.Linear(1024, 512))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    process = start("two_layers:make", "--budget", "5m", env=env)
    wait_for(lambda: store.trials(m=16))
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "16×48" in out and "512×1024" in out
    assert store.trials(m=16, status="ok")
    assert not store.claimed(claim_key(ns_problem(512, 1024)))


def test_a_second_process_waits_for_the_first_and_uses_its_result(store: Store):
    problem = ns_problem(16, 48, 3)
    claim = store.claim(claim_key(problem), 60)
    assert claim is not None
    process = start(*TINY[:4], "--budget", "50s", "--json")
    assert process.stderr is not None
    assert "waiting for another process" in process.stderr.readline()
    assert not store.trials()
    store.record([made_elsewhere(problem)])
    claim.release()
    out, _ = process.communicate(timeout=60)
    [shape] = json.loads(out)["shapes"]
    assert shape["status"] == "stored"
    assert len(store.trials()) == 1


@pytest.mark.slow
def test_two_processes_at_once_tune_once(store: Store):
    pair = [start(*TINY[:4], "--budget", "30s", "--json") for _ in range(2)]
    documents = [json.loads(process.communicate(timeout=90)[0]) for process in pair]
    assert sorted(document["shapes"][0]["status"] for document in documents) == ["stored", "tuned"]
    assert len({trial.created_at for trial in store.trials()}) == 1


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_terminal_sees_what_is_timed_and_the_best_so_far():
    master, slave = os.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    process = start("--shape", "256x1024", "--count", "2", "--budget", "3s", stderr=slave, env=env)
    os.close(slave)
    seen = b""
    while chunk := read_some(master):
        seen += chunk
    out, _ = process.communicate(timeout=60)
    text = seen.decode()
    assert process.returncode == 0
    assert "2 × 256×1024: " in text
    assert "best" in text and "%" in text
    assert "256×1024" in out and "%" in out


def read_some(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says so when the other side is closed
        return b""


def made_elsewhere(problem) -> Trial:
    from dmuon.autotune.versions import versions_now
    from dmuon.kernels.backends import source_hash
    from dmuon.kernels.choose import NSChoice

    choice = NSChoice("standard")
    return Trial(
        **asdict(problem),
        backend="torch",
        config=choice.to_config(),
        status="ok",
        error=1e-6,
        tolerance=1e-4,
        median_ms=1.0,
        spread=0.0,
        samples=9,
        message="",
        versions=versions_now(choice.backends, problem.device),
        source_hash=source_hash(choice.backends),
        created_at=time.time(),
    )
