"""bench/simulator.py: it runs, and its table says what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
def test_quick_simulates_and_measures_the_same_steps(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "simulator.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "simulated / measured" in done.stdout and "2 ranks, 2 blocks of width 64" in done.stdout
    (path,) = tmp_path.glob("simulator-cpu-*.json")
    document = json.loads(path.read_text())
    assert [row["strategy"] for row in document["steps"]] == ["adamw", "planned"]
    for row in document["steps"]:
        assert row["simulated_s"] == pytest.approx(sum(row["computed_s"].values()) + row["waiting_s"])
        assert len(row["samples_s"]) == document["setting"]["rounds"] and row["measured_s"] > 0
    assert {tuple(batch[:3]) for batch in document["batches_s"]} >= {(64, 256, 1), (256, 64, 1)}


def test_verdict_is_by_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import simulator
    from rich.console import Console

    rows = [("adamw", 1.24), ("planned", 1.26), ("adamw", 0.76), ("planned", 0.74)]
    document = {
        "setting": {"ranks": 4, "blocks": 2, "width": 8},
        "steps": [{"strategy": name, "simulated_s": ratio, "measured_s": 1.0} for name, ratio in rows],
    }
    console = Console(width=120)
    with console.capture() as printed:
        console.print(simulator.table_of(document))
    lines = [line for line in printed.get().splitlines() if "adamw" in line or "planned" in line]
    assert ["pass" in line for line in lines] == [True, False, True, False]
    assert ["MISS" in line for line in lines] == [False, True, False, True]
