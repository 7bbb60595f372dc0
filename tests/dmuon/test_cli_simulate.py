"""``dmuon-tune simulate`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import check_one_line_error, invoke

STRATEGIES = ["adamw", "gather", "all-to-all", "round-robin", "greedy", "planned"]


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path / "cache"))


def test_tables_compare_strategies_at_each_number_of_ranks() -> None:
    printed = invoke("simulate", "gpt2", "--ranks", "16,8").stdout
    assert "gpt2, simulated on H100" in printed
    rows = [line for line in printed.splitlines() if line.startswith(("FSDP2", "Muon", "DMuon"))]
    assert len(rows) == 12 and sum("DMuon, planned" in row for row in rows) == 2
    assert printed.index("\n8 ranks") < printed.index("\n16 ranks")
    assert "All figures are simulated; nothing ran." in printed
    assert max(map(len, printed.splitlines())) <= 80 and "…" not in printed


def test_memory_that_no_device_has_is_marked() -> None:
    printed = invoke("simulate", "llama-3.1-8b", "--ranks", "1,64").stdout
    alone, many = printed.split("64 ranks")
    assert "1 rank " in alone and alone.count("GB!") == 6 and "GB!" not in many


def test_json_has_what_the_tables_say() -> None:
    document = json.loads(invoke("simulate", "gpt2", "--ranks", "8,16", "--json").stdout)
    assert document["simulated"] is True and document["tokens"] == 8192 and document["zero"] == 3
    assert [each["ranks"] for each in document["comparisons"]] == [8, 16]
    for comparison in document["comparisons"]:
        rows = comparison["strategies"]
        assert [row["strategy"] for row in rows] == STRATEGIES
        for row in rows:
            parts = (row["forward_ms"], row["backward_ms"], row["optimizer_ms"], row["waiting_ms"])
            assert row["step_ms"] == pytest.approx(sum(parts))
            assert row["over_adamw"] == pytest.approx(row["step_ms"] / rows[0]["step_ms"] - 1)
    assert document["assumptions"] and document["sources"]


def test_options_change_what_is_simulated() -> None:
    def first_step(*options: object) -> dict[str, float]:
        document = json.loads(invoke("simulate", "gpt2", "--ranks", "16", "--json", *options).stdout)
        step: dict[str, float] = document["comparisons"][0]["strategies"][0]
        return step

    plain = first_step()
    assert first_step("--tokens", 16384)["forward_ms"] == pytest.approx(2 * plain["forward_ms"])
    assert first_step("--machine", "a800")["forward_ms"] > plain["forward_ms"]
    assert first_step("--zero", 2)["step_ms"] <= plain["step_ms"]
    assert first_step("--hybrid")["memory_bytes"] > plain["memory_bytes"]
    assert first_step("--gpus-per-node", 4)["step_ms"] > first_step("--gpus-per-node", 16)["step_ms"]


def test_bad_input_is_one_line() -> None:
    check_one_line_error("simulate", "gpt2", "--ranks", "8,x", says="'8,x' is not a list such as 8,64,256")
    check_one_line_error("simulate", "gpt2", "--ranks", "0", says="is not a list")
    check_one_line_error("simulate", "gpt2", "--ranks", "8,12", says="12 ranks do not fill nodes of 8")
    check_one_line_error(
        "simulate", "gpt2", "--machine", "b300", says="no machine 'b300': take a800, h100, h200"
    )
    check_one_line_error("simulate", "./none", "--ranks", "8", says="no model './none'")
    check_one_line_error("simulate", says="Missing argument 'MODEL'")


def test_a_machine_of_ones_own(tmp_path: Path) -> None:
    import dmuon.simulator

    shipped = Path(dmuon.simulator.__file__).parent / "machines" / "h100.json"
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(json.loads(shipped.read_text()) | {"name": "my cluster"}))
    assert "my cluster" in invoke("simulate", "gpt2", "--ranks", "8", "--machine", mine).stdout
    mine.write_text("{}")
    check_one_line_error(
        "simulate",
        "gpt2",
        "--ranks",
        "8",
        "--machine",
        mine,
        says="mine.json: a machine has the fields name, device",
    )
    mine.write_text("not json")
    check_one_line_error("simulate", "gpt2", "--ranks", "8", "--machine", mine, says="mine.json: ")
