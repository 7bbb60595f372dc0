"""docs/kernels.md: its examples run, and its figures are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dmuon.kernels import default_restarts
from dmuon.kernels.coefficients import NAMED
from dmuon.kernels.precision import PRECISIONS

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_examples_run(example: str) -> None:
    exec(compile(example, "docs/kernels.md", "exec"), {})


def test_the_table_of_restarts_is_right() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (none|[\d, ]+) \| ([\d, ]+) \| ([\d, ]+) \|$", PAGE, re.MULTILINE)
    assert {row[0] for row in rows} == set(NAMED)
    for name, wide, fp16, bf16 in rows:
        for cell, precisions in ((wide, ("fp64", "fp32")), (fp16, ("fp16",)), (bf16, ("bf16",))):
            restarts = default_restarts(NAMED[name](), PRECISIONS[precisions[0]])
            assert cell == (", ".join(map(str, restarts)) or "none")
            assert {default_restarts(NAMED[name](), PRECISIONS[key]) for key in precisions} == {restarts}
