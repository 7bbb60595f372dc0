"""bench/distributed.py: it runs, counts what must cross, and judges by the numbers that it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test import the modules of bench/, which is no package."""
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.mark.slow
def test_quick_counts_and_writes(tmp_path: Path) -> None:
    import distributed

    result = CliRunner().invoke(
        distributed.main, ["--quick", "--ranks", "2", "--out", str(tmp_path)], catch_exceptions=False
    )
    assert "What bounds ours" in result.output
    (path,) = tmp_path.glob("distributed-cpu-*.json")
    document = json.loads(path.read_text())
    names = ["FSDP2 + AdamW", "torch.optim.Muon on DTensors", "gather, then compute", "dmuon"]
    for key in ("total_ms", "optimizer_ms", "traffic", "held_bytes", "losses"):
        assert sorted(document[key]) == sorted(names)
    assert all(
        len(samples) == 3 for samples in (*document["total_ms"].values(), document["newton_schulz_ms"])
    )
    for name in names:
        pairs = zip(document["optimizer_ms"][name], document["total_ms"][name], strict=True)
        assert all(0 < optimizer < total for optimizer, total in pairs)
    width, layers, vocabulary = 64, 2, 512
    matrices = 4 * layers * (4 + 2 * 4) * width**2
    rest = 4 * (2 * vocabulary * width + (2 * layers + 1) * 2 * width)
    adamw, torchs, gather, ours = (document["traffic"][name] for name in names)
    assert adamw["reduce-scatter"] == torchs["reduce-scatter"] == gather["reduce-scatter"] == matrices + rest
    assert gather["all-gather"] - adamw["all-gather"] == matrices
    assert torchs["all-gather"] > gather["all-gather"]
    assert ours["reduce-scatter"] == rest and ours["all-to-all"] >= matrices
    # ZeRO-3: everything twice, less what the last block keeps; FSDP keeps none of the model's own either.
    assert ours["broadcast"] == 2 * matrices - matrices // layers
    assert document["held_bytes"]["FSDP2 + AdamW"] >= 3 * (matrices + rest) / 2
    assert document["held_bytes"]["dmuon"] < document["held_bytes"]["FSDP2 + AdamW"]
    markdown = path.with_suffix(".md").read_text()
    assert all(f"| {name} |" in markdown for name in names)
    verdicts = ["pass" if target["passed"] else "miss" for target in document["targets"]]
    assert [
        line.split("|")[-2].strip() for line in markdown.splitlines() if "≥" in line or "≤" in line
    ] == verdicts


def test_targets_follow_from_the_times() -> None:
    from distributed import targets
    from distributed_run import Measured

    names = ["FSDP2 + AdamW", "torch.optim.Muon on DTensors", "gather, then compute", "dmuon"]
    measured = Measured(
        total_ms={name: [ms] * 3 for name, ms in zip(names, (100.0, 400.0, 300.0, 130.0), strict=True)},
        optimizer_ms={name: [ms] * 3 for name, ms in zip(names, (5.0, 320.0, 110.0, 40.0), strict=True)},
        newton_schulz_ms=[20.0, 25.0, 30.0],
    )
    found: list[Any] = [(each["of_medians"], each["passed"]) for each in targets(measured)]
    assert found == [(8.0, True), (2.75, False), (130 / 125, True)]
    measured.total_ms["dmuon"] = [144.0] * 3
    assert not targets(measured)[2]["passed"]


def test_other_trainings_are_no_contenders() -> None:
    from distributed_run import _check

    losses = {"FSDP2 + AdamW": [6.0, 5.0], "gather, then compute": [6.0, 5.5], "dmuon": [6.0, 5.501]}
    _check(losses)
    with pytest.raises(RuntimeError, match="gather, then compute does not train as dmuon does"):
        _check({**losses, "gather, then compute": [6.0, 5.6]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--width", "130"], "multiple of 4"), (["--device", "cuda", "--ranks", "512"], "need as many GPUs")],
)
def test_bad_options_say_what_is_wrong(arguments: list[str], message: str) -> None:
    import distributed

    result = CliRunner().invoke(distributed.main, arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.split())
