"""bench/gpu_suite.py at toy sizes: it runs, resumes, reports failures and keeps to its time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test import the modules of bench/, which is no package."""
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture(autouse=True)
def _same_chooser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmuon.kernels.choose._chooser", None)


def run(out: Path, *arguments: str) -> str:
    import gpu_suite

    result = CliRunner().invoke(gpu_suite.main, ["--device", "cpu", "--out", str(out), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_all_stages_run_on_a_cpu_and_a_second_run_has_nothing_to_do(bench: None, tmp_path: Path) -> None:
    from gpu_stages import STAGES

    printed = run(tmp_path, "--minutes", "3")
    found = records(tmp_path)
    assert {record["stage"] for record in found} == STAGES.keys() - {"compile"}
    assert not [record for record in found if "failed" in record], printed
    assert "not complete" not in printed
    tables = (tmp_path / "README.md").read_text()
    assert all(f"## {stage}" in tables for stage in STAGES.keys() - {"compile"})
    tuned = [json.loads(line) for line in (tmp_path / "tuned.jsonl").read_text().splitlines()]
    assert any(trial.get("m") == 16 for trial in tuned)
    (owner,) = (record for record in found if record["stage"] == "owner")
    assert owner["matrices"] == 4 and owner["dmuon ms"] > 0
    run(tmp_path, "--minutes", "3")
    assert records(tmp_path) == found


def test_what_fails_is_reported_and_tried_again(
    bench: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_setting

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such thing\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(gpu_setting, "typical_ms", broken)
        run(tmp_path, "--stage", "launch")
    assert [record["failed"] for record in records(tmp_path)] == ["RuntimeError: no such thing"]
    assert "failed: 16×32 bf16: RuntimeError: no such thing" in (tmp_path / "README.md").read_text()
    run(tmp_path, "--stage", "launch")
    assert "failed" not in records(tmp_path)[-1]
    assert "RuntimeError" not in (tmp_path / "README.md").read_text()


def test_wrong_numbers_fail_the_correctness_stage(
    bench: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dmuon.kernels.backends import blocked

    gram = blocked._PRODUCTS["gram"]
    monkeypatch.setitem(blocked._PRODUCTS, "gram", lambda X, out, **rest: gram(X, out, **rest).mul_(1.01))
    run(tmp_path, "--stage", "correctness")
    failed = [record["task"] for record in records(tmp_path) if "failed" in record]
    assert failed and all(task.startswith("blocked gram ") for task in failed)


def test_time_is_kept_and_a_torn_last_line_is_forgotten(bench: None, tmp_path: Path) -> None:
    printed = run(tmp_path, "--minutes", "0.0000001")
    assert "did not fit the time" in printed and f"--out {tmp_path}" in printed
    (tmp_path / "results.jsonl").write_text('{"stage": "launch", "task": "16×32 b')
    run(tmp_path, "--stage", "launch")
    assert len(records_that_read(tmp_path)) == 1


def records_that_read(out: Path) -> list[dict[str, Any]]:
    import gpu_suite

    return list(gpu_suite.Records(out / "results.jsonl"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_how_to_try(bench: None, tmp_path: Path) -> None:
    import gpu_suite

    result = CliRunner().invoke(gpu_suite.main, ["--out", str(tmp_path / "new")])
    assert result.exit_code == 2 and "--device cpu" in result.output
    assert not (tmp_path / "new").exists()
