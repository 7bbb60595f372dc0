"""What the tests of `dmuon-tune` share."""

from __future__ import annotations

import time
from typing import Any

from click.testing import CliRunner

from dmuon.cli import main
from dmuon.kernels.choose import NSChoice, ProductChoice
from dmuon.tuning_cache import Trial

CPU, GPU = "cpu:Some CPU AVX512:2", "cuda:NVIDIA H200"
BLOCKED = ProductChoice("blocked", {"block": 256})


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
        "config": NSChoice("gram", (2,), BLOCKED, BLOCKED).to_config(),
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
        values.update(median_ms=None, spread=None, error=0.5, message="relative error 0.5 is above 1e-5")
    return Trial(**{**values, **changes})


def invoke(*arguments: object, code: int = 0, **options: Any) -> Any:
    result = CliRunner().invoke(main, list(map(str, arguments)), prog_name="dmuon-tune", **options)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def check_one_line_error(*arguments: object, says: str, **options: Any) -> None:
    result = invoke(*arguments, code=2, **options)
    assert result.stdout == ""
    [line] = [line for line in result.stderr.splitlines() if not line.startswith("Warning: ")]
    assert line.startswith("Error: ") and says in line


def lines(result: Any) -> list[Trial]:
    return [Trial.from_json(line) for line in result.stdout.splitlines()]
