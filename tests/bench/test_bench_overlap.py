"""bench/overlap.py: it runs, and shows a step that hides its transfers apart from one that does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["2", "3"])
def test_overlap_hides_transfers(zero: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import overlap

    options = {"ranks": 2, "blocks": 4, "delay": 20, "forward": 20, "backward": 40, "rounds": 2, "steps": 2}
    arguments = [f"--{option}={value}" for option, value in options.items()]
    result = CliRunner().invoke(overlap.main, [*arguments, f"--zero={zero}"], catch_exceptions=False)
    publications = 7 if zero == "3" else 4
    assert f"({publications} publications beside 4 reductions)" in " ".join(result.output.split())
    rows = {"compute alone": 0.0, "in series": 0.0, "overlapped": 0.0}
    for name in rows:
        (row,) = re.findall(rf"{name} *│ *([0-9.]+) ", result.output)
        rows[name] = float(row)
    exposed = {name: ms - rows["compute alone"] for name, ms in rows.items()}
    assert exposed["in series"] > 0.8 * 20 * (publications + 4)
    assert exposed["overlapped"] < 0.5 * exposed["in series"]
