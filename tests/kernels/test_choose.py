"""Problems, choices, their JSON form, and where a choice comes from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from dmuon.kernels import gram_ns, polar_express
from dmuon.kernels.choose import (
    NSChoice,
    Problem,
    ProductChoice,
    current_chooser,
    device_key,
    heuristic_choice,
    problem_of,
    set_chooser,
)
from dmuon.kernels.coefficients import resolve_coefficients
from dmuon.kernels.run import run_ns

PROBLEM = Problem("gram_ns", 1, 256, 1024, "fp32", "cpu:x:2", "polar_express:5")
BLOCKED = ProductChoice("blocked", {"block": 128, "split": "panel"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("op", "svd"),
        ("dtype", "float32"),
        ("batch", 0),
        ("m", 0),
        ("n", -1),
        ("coefficients", ""),
    ],
)
def test_a_problem_checks_its_fields(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        replace(PROBLEM, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="coefficients"):
        Problem("gram", 1, 2, 3, "fp32", "cpu:x:2", "polar_express:5")


def test_the_problem_of_a_tensor() -> None:
    found = problem_of("gram", torch.empty(3, 4, 5, dtype=torch.bfloat16))
    assert (found.batch, found.m, found.n, found.dtype) == (3, 4, 5, "bf16")
    with pytest.raises(TypeError):
        problem_of("gram", torch.empty(3, 4, 5, dtype=torch.int32))


def test_a_device_key_tells_thread_counts_apart() -> None:
    one = device_key("cpu")
    assert one == device_key(torch.device("cpu")) and one.startswith("cpu:") and one.endswith(":1")
    torch.set_num_threads(2)
    assert device_key("cpu").endswith(":2")


@pytest.mark.parametrize(
    "choice",
    [
        NSChoice("standard"),
        NSChoice("gram", (1, 3), BLOCKED, ProductChoice("torch"), loop=True),
        NSChoice(
            "gram",
            (2,),
            ProductChoice("triton", {"lower": "write"}),
            ProductChoice("triton", {"lower": "both"}),
        ),
        heuristic_choice(replace(PROBLEM, m=1024, n=4096)),
    ],
)
def test_a_choice_survives_json(choice: NSChoice) -> None:
    assert NSChoice.from_config(json.loads(json.dumps(choice.to_config()))) == choice


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "svd"),
        ("method", ["gram"]),
        ("method", None),
        ("restarts", 2),
        ("restarts", "13"),
        ("restarts", [0]),
        ("restarts", [-1]),
        ("restarts", [1.0]),
        ("restarts", [True]),
        ("restarts", [3, 1]),
        ("restarts", [2, 2]),
        ("loop", 1),
        ("loop", None),
        ("gram", "torch"),
        ("gram", {}),
        ("symmetric_product", {"backend": 3}),
        ("apply", None),
    ],
)
def test_a_malformed_choice_is_refused(field: str, value: object) -> None:
    config = NSChoice("gram", (2,)).to_config()
    with pytest.raises(ValueError, match=field):
        NSChoice.from_config({**config, field: value})


@pytest.mark.parametrize("lower", [("write", None), (None, "both"), ("write", "read"), ("both", "both")])
def test_what_gram_leaves_out_is_read_by_nobody(lower: tuple[str | None, str | None]) -> None:
    gram, square = (ProductChoice("triton", {"lower": each} if each else {}) for each in lower)
    config = NSChoice("gram", (2,)).to_config()
    for op, product in (("gram", gram), ("symmetric_product", square)):
        config[op] = {"backend": product.backend, **product.config}
    with pytest.raises(ValueError, match="lower must be 'write' for the one and 'both' for the other"):
        NSChoice.from_config(config)
    with pytest.raises(ValueError, match="absent for apply"):
        NSChoice("gram", (), apply=ProductChoice("triton", {"lower": True}))


def test_a_choice_has_all_its_fields_and_no_other() -> None:
    config = NSChoice("gram", (2,)).to_config()
    for name in config:
        with pytest.raises(ValueError, match="fields"):
            NSChoice.from_config({key: value for key, value in config.items() if key != name})
    with pytest.raises(ValueError, match="fields"):
        NSChoice.from_config({**config, "threads": 2})
    with pytest.raises(ValueError, match="restarts"):
        NSChoice.from_config({**config, "method": "standard"})


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        (NSChoice("gram", (5,)), "restarts"),
        (NSChoice("gram", gram=ProductChoice("magma")), "magma"),
        (NSChoice("gram", gram=ProductChoice("blocked", {"block": 0, "split": "panel"})), "block"),
        (NSChoice("gram", gram=ProductChoice("blocked", {"block": 8, "split": "thirds"})), "split"),
        (NSChoice("gram", apply=BLOCKED), "apply"),
        (NSChoice("gram", apply=ProductChoice("torch", {"block": 8})), "configuration"),
    ],
)
def test_a_choice_that_cannot_run_writes_nothing(choice: NSChoice, word: str) -> None:
    out = torch.full((6, 12), 5.0)
    with pytest.raises(ValueError, match=word):
        run_ns(torch.ones(6, 12), choice, polar_express(), torch.float32, out)
    assert (out == 5).all()


def test_a_list_without_a_name_gets_restarts_of_its_own() -> None:
    """The problem's key does not lead back to a list of triples; the coefficients themselves do."""
    own = resolve_coefficients([list(step) for step in polar_express().steps])
    problem = replace(PROBLEM, dtype="fp16", coefficients=own.key)
    assert heuristic_choice(problem, own).restarts == (2,)
    assert heuristic_choice(problem).method == "standard"


def test_installing_a_chooser_gives_back_the_one_before() -> None:
    class Silent:
        def choose(self, problem: Problem) -> NSChoice | None:
            return None

    silent = Silent()
    assert set_chooser(silent) is None
    assert current_chooser() is silent
    G = torch.randn(8, 40)
    answered = gram_ns(G)
    assert set_chooser(None) is silent
    assert torch.equal(answered, gram_ns(G))


def fresh(code: str, **env: str) -> Any:
    """What ``code`` prints as JSON in an interpreter where no chooser was asked for yet."""
    clean = {key: value for key, value in os.environ.items() if key != "DMUON_AUTOTUNE"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**clean, **env}, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


DISCOVER = """
import importlib.metadata, json, sys, torch, warnings
from types import SimpleNamespace
from dmuon.kernels import gram_ns
asked = []
class Entry:
    value = "somewhere:Chooser"
    def load(self):
        asked.append("load"); return LOAD
importlib.metadata.entry_points = lambda group: [Entry()] if group == "dmuon.chooser" else []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    shapes = [list(gram_ns(torch.ones(4, 8)).shape) for _ in range(2)]
print(json.dumps([shapes, asked, [str(w.message) for w in caught]]))
"""


def test_off_asks_nobody() -> None:
    shapes, asked, warned = fresh(DISCOVER.replace("LOAD", "None"), DMUON_AUTOTUNE="off")
    assert (shapes, asked, warned) == ([[4, 8], [4, 8]], [], [])


def test_a_broken_entry_point_warns_once_and_the_heuristics_run() -> None:
    shapes, asked, warned = fresh(DISCOVER.replace("LOAD", "1 / 0"))
    assert (shapes, asked) == ([[4, 8], [4, 8]], ["load"])
    assert len(warned) == 1 and "somewhere:Chooser" in warned[0] and "ZeroDivisionError" in warned[0]


def test_the_entry_point_is_asked_at_each_call_and_loaded_once() -> None:
    chooser = "lambda: SimpleNamespace(choose=lambda problem: asked.append(problem.op))"
    shapes, asked, warned = fresh(DISCOVER.replace("LOAD", f"({chooser})"))
    assert (shapes, asked, warned) == ([[4, 8], [4, 8]], ["load", "gram_ns", "gram_ns"], [])
