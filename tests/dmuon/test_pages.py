"""The examples of the pages, one after the other as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

PAGES = [
    "README.md",
    "docs/index.md",
    "docs/optimizer.md",
    "docs/planning.md",
    "docs/policy.md",
    "docs/tuning.md",
]
# Whose examples need several processes or more packages.
ELSEWHERE = {
    "docs/checkpoints.md": "test_own_checkpoint.py",
    "docs/clients.md": "test_clients.py",
    "docs/distributed.md": "test_own_example.py, test_own_groups.py, test_own_meta.py",
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
