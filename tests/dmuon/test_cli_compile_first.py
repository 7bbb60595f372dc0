"""``dmuon-tune run`` on a GPU compiles what it will time before it starts its budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dmuon.cli.ahead import specs_of
from dmuon.cli.run import _compile
from dmuon.kernels.choose import Problem
from dmuon.kernels.gpu.arch import ARCHS
from dmuon.tuning_cache import Store


def problem(m: int, dtype: str) -> Problem:
    return Problem("gram_ns", 1, m, 4 * m, dtype, "cpu:x:1", "polar_express:5")


def test_kernels_of_half_precision_problems_alone() -> None:
    specs = specs_of([problem(512, "fp16"), problem(512, "fp32")], ("cute", "torch"), ARCHS["sm_90a"])
    assert specs and set(specs.values()) == {"cute"}
    assert {spec.options["dtype"] for spec in specs} == {"fp16"}
    assert specs_of([problem(512, "fp32")], (), ARCHS["sm_90a"]) == {}


def test_run_compiles_on_a_gpu_what_the_store_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr("dmuon.kernels.gpu.load.compile_all", lambda specs, **_: compiled.append(set(specs)))
    problems = [problem(512, "fp16"), problem(1024, "bf16")]
    with Store(tmp_path / "tuning.db") as store:
        _compile(problems, ("cute",), False, store)
        assert compiled == []  # no GPU
        monkeypatch.setattr("dmuon.kernels.gpu.arch.arch_of", lambda device: ARCHS["sm_90a"])
        _compile(problems, ("cute",), False, store)
        both = set(specs_of(problems, ("cute",), ARCHS["sm_90a"]))
        assert compiled == [both]
        answered = type("Answers", (), {"exact": lambda self, each: each.dtype == "fp16" or None})
        monkeypatch.setattr("dmuon.autotune.answers.Answers", lambda trials: answered())
        _compile(problems, ("cute",), False, store)
        assert {spec.options["dtype"] for spec in compiled[-1]} == {"bf16"}
        _compile(problems, ("cute",), True, store)
        assert compiled[-1] == both
