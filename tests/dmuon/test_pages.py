"""The examples of the pages, one after the other as a reader would type them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

PAGES = [
    "README.md",
    "docs/index.md",
    "docs/numerics.md",
    "docs/optimizer.md",
    "docs/planning.md",
    "docs/policy.md",
    "docs/tuning.md",
]
# Whose examples need several processes or more packages.
ELSEWHERE = {
    "docs/checkpoints.md": "test_own_checkpoint.py",
    "docs/clients.md": "test_clients.py",
    "docs/distributed.md": "test_own_example.py, test_own_groups.py, test_own_meta.py, test_own_tensor.py",
    "docs/kernels.md": "tests/kernels/test_kernels_page.py",
}


def test_no_page_is_forgotten() -> None:
    pages = [ROOT / "README.md", ROOT / "bench" / "README.md", *(ROOT / "docs").glob("**/*.md")]
    with_examples = {
        p.relative_to(ROOT).as_posix() for p in pages if "```python\n" in p.read_text(encoding="utf-8")
    }
    assert with_examples == {*PAGES, *ELSEWHERE}


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path))
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, page, "exec"), names)
    assert examples


def test_the_benchmarks_are_the_results() -> None:
    """Every row of a table is what the file that is named below it says."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    found = {
        name.split("-")[0]: json.loads((ROOT / "bench" / "results" / name).read_text(encoding="utf-8"))
        for name in re.findall(r"From\s`(\S+\.json)`", page)
    }
    rows, rest = [], []
    for result in found["ns"]["results"]:
        torchs, ours = (result["timings"][name]["median_ms"] for name in ("torch.optim.Muon", "dmuon"))
        if result["target"] < 1:
            rest.append(torchs / ours)
            continue
        batch = f"{result['batch']} of " if result["batch"] > 1 else ""
        shape = f"{batch}{result['rows']}×{result['cols']}"
        rows.append(f"{shape} | {result['precision']} | {torchs:.1f} | {ours:.1f} | {torchs / ours:.2f}")
    assert (
        f"The other {len(rest)}, " in page and f" are at {min(rest):.2f} to {max(rest):.2f}. From\n" in page
    )
    for name, times in found["distributed"]["total_ms"].items():
        optimizer = found["distributed"]["optimizer_ms"][name]
        rows.append(f"{name} | {median(optimizer):.1f} | {median(times):.1f}")
    for plan in found["planner"]["presets"]:
        if plan["name"] in page:
            gap = abs(plan["makespan"] / plan["bound"] - 1)
            rows.append(f"{plan['name']} | {plan['ranks']} | {plan['excess']:.1%} | {gap:.2%}")
    assert [line for line in page.splitlines() if re.match(r"\| .*\d", line)] == [
        f"| {row} |" for row in rows
    ]
