"""What importing the kernels costs and loads, each time in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from statistics import median

import pytest
import torch

HEAVY = ("triton", "tilelang", "cutlass", "sqlite3", "sqlite_utils", "scipy", "click", "rich")


def in_fresh_interpreter(code: str):
    env = {key: value for key, value in os.environ.items() if key != "DMUON_AUTOTUNE"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    "statement",
    [
        "from dmuon.kernels import gram_ns",
        "from dmuon.kernels.gram_ns import gram_ns",
        "import dmuon.kernels.gram_ns as gram_ns",
        "import dmuon, dmuon.kernels; gram_ns = dmuon.kernels.gram_ns",
        "import dmuon.kernels.run; import dmuon.kernels.gram_ns as gram_ns",
    ],
)
def test_every_form_of_import_gives_the_function(statement):
    found = in_fresh_interpreter(
        f"import json, torch; {statement}\n"
        "from dmuon.kernels import gram_ns as function\n"
        "print(json.dumps([gram_ns is function, list(gram_ns(torch.eye(2)).shape)]))"
    )
    assert found == [True, [2, 2]]


def test_nothing_heavy_is_loaded():
    loaded = in_fresh_interpreter(
        "import json, sys, torch; before = set(sys.modules)\n"
        "import dmuon.kernels.gram_ns\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    assert "dmuon.kernels.run" in loaded
    assert [name for name in loaded if name.split(".")[0] in HEAVY] == []
    ours = [name for name in loaded if name.startswith("dmuon.")]
    assert [name for name in ours if not name.startswith("dmuon.kernels")] == []
    assert [name for name in loaded if name.startswith("torch.distributed")] == []


def test_it_costs_little_over_importing_torch():
    seconds = [
        in_fresh_interpreter(
            "import json, time, torch; start = time.perf_counter()\n"
            "import dmuon.kernels.gram_ns\n"
            "print(json.dumps(time.perf_counter() - start))"
        )
        for _ in range(3)
    ]
    assert median(seconds) <= 0.15, seconds


def test_importing_changes_nothing_of_the_process():
    found = in_fresh_interpreter(
        "import json, os, torch; env = dict(os.environ)\n"
        "state = lambda: [torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()]\n"
        "before = state(); import dmuon.kernels.gram_ns\n"
        "print(json.dumps([dict(os.environ) == env, state() == before]))"
    )
    assert found == [True, True]


def test_public_names_are_there():
    import dmuon.kernels

    assert all(callable(getattr(dmuon.kernels, name)) for name in dmuon.kernels.__all__)
    assert dmuon.kernels.gram_ns(torch.zeros(2, 3)).equal(torch.zeros(2, 3))
