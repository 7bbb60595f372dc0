"""``dmuon-tune profile``: the steps of a model's owners are measured once, and planning goes by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_helpers import check_one_line_error, invoke

from dmuon.planner import StepCosts
from dmuon.tuning_cache import Store

MODEL = "own_models:GPT"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path / "tuning.db"))
    return tmp_path / "tuning.db"


def test_what_is_measured_is_kept_and_planned_by(path: Path) -> None:
    printed = invoke("profile", MODEL, "--budget", "30s").stdout
    trials = [trial for trial in Store(path).trials() if trial.op == "owner_step"]
    assert f"{len(trials)} steps measured on cpu in fp32; kept in {path}" in printed
    assert {(trial.m, trial.n) for trial in trials} == {(16, 16), (48, 16), (16, 48), (8, 16)}
    costs = StepCosts(Store(path), torch.device("cpu"), "fp32")
    assert all(costs.cost(each.m, each.n, each.batch).source == "measured" for each in trials)
    again = json.loads(invoke("profile", MODEL, "--budget", "30s", "--json").stdout)
    assert (again["measured"], again["left"], again["precision"]) == (0, [], "fp32")


def test_what_there_was_no_time_for_is_said(path: Path) -> None:
    left = json.loads(invoke("profile", MODEL, "--budget", "0.00001s", "--json").stdout)["left"]
    assert {"rows": 16, "cols": 48, "batch": 1} in left and not Store(path).trials()
    printed = invoke("profile", MODEL, "--budget", "0.00001s").stdout
    assert f"No time for {len(left)}, from 1 × " in printed


def test_bad_input_is_one_line(path: Path) -> None:
    check_one_line_error("profile", "no_such_model", says="no_such_model")
    check_one_line_error("profile", "gpt2", "--device", "cuda", says="no CUDA GPU here")
    path.write_bytes(b"SQLite format 3\0" + b"x" * 200)
    check_one_line_error("profile", "gpt2", says="not a DMuon store")
