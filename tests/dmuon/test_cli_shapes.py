"""``dmuon-tune shapes`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dmuon.cli.shapes import shapes
from dmuon.models import preset_names


def run(*arguments: str) -> Result:
    return CliRunner().invoke(shapes, arguments)


def test_table_names_shapes_counts_shares_and_reasons() -> None:
    result = run("gpt2")
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines()]
    # 6m²n + 14m³: 24 of 768×3072, 12 of 768×2304, 12 of 768×768, as 24·38 : 12·32 : 12·20 in units of 768³.
    assert ["768×3072", "24", "59.4%", "transformer.h.*.mlp.c_{fc,proj}.weight"] in rows
    assert ["768×2304", "12", "25.0%", "transformer.h.*.attn.c_attn.weight"] in rows
    assert ["768×768", "12", "15.6%", "transformer.h.*.attn.c_proj.weight"] in rows
    assert "AdamW: embedding, tied to lm_head.weight (1 parameter, 38.6 M elements)" in result.output


@pytest.mark.parametrize("name", preset_names())
def test_tables_fit_80_columns(name: str) -> None:
    lines = run(name).output.splitlines()
    # Names are not broken: they are there to be copied.
    assert [line for line in lines if len(line) > 80 and not line.startswith("  ")] == []


def test_every_parameter_with_all() -> None:
    result = run("gpt2", "--all", "--json")
    routing = json.loads(result.output)["routing"]
    assert len(routing) == 148
    assert routing[4] == {
        "name": "transformer.h.0.attn.c_attn.weight",
        "algorithm": "muon",
        "reason": "linear layer",
        "shape": [768, 2304],
        "matrices": [{"batch": 1, "rows": 2304, "cols": 768}],
    }
    assert "transformer.h.11.ln_2.bias" in run("gpt2", "--all").output


def test_json_agrees_with_itself() -> None:
    found = json.loads(run("qwen3-30b-a3b", "--json").output)
    assert found["elements"] == 30_532_122_624
    assert sum(each["share"] for each in found["matrices"]) == pytest.approx(1)
    assert sum(each["count"] for each in found["routing"]) == found["parameters"]
    batches = sum(group["count"] * each["batch"] for group in found["routing"] for each in group["matrices"])
    assert sum(each["count"] for each in found["matrices"]) == batches


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path) -> None:
    header = json.dumps({"a[bold]b.weight": {"dtype": "F32", "shape": [4, 8]}}).encode()
    path = tmp_path / "[red]m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    for arguments in ((str(path),), (str(path), "--all")):
        output = run(*arguments).output
        assert "[red]m.safetensors: 1 parameter, 32 elements" in output
        assert output.count("a[bold]b.weight") == 2


@pytest.mark.parametrize("model", ["gpt3", "/no/such/config.json", "no_such_module_of_ours:build"])
def test_a_bad_model_is_one_line_and_exit_code_2(model: str) -> None:
    result = run(model)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert model.partition(":")[0] in result.stderr
