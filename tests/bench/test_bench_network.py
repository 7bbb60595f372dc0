"""bench/network.py: two levels beat flat routes over a slow link, where there can be one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import network

    return network


@pytest.mark.slow
def test_two_levels_beat_flat_routes(network: Any) -> None:
    options = ["--link=100", "--bucket=2", "--rounds=3"]
    printed = CliRunner().invoke(network.main, options, catch_exceptions=False).output
    if printed.startswith("skipped: "):
        pytest.skip(printed)
    local, link = (float(rate) for rate in re.findall(r"(?:carries|link) ([0-9.]+)", printed)[:2])
    assert 0.05 < link <= 0.11 and local > 3 * link
    assert "pass" in printed, printed
    (crossed,) = re.findall(r"two levels *│.*│ *([0-9.]+) │", printed)
    (least,) = re.findall(r"least that can cross: ([0-9.]+) MB", printed)
    # TCP's headers and acknowledgements are on the wire, too.
    assert float(least) <= float(crossed) < 1.15 * float(least), printed
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert "dmuon-" not in listed


def test_it_says_what_is_missing(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else tool)
    printed = CliRunner().invoke(network.main, catch_exceptions=False).output
    assert printed == "skipped: there is no 'tc' (Debian: iproute2)\n"
    monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    assert "need root" in CliRunner().invoke(network.main, catch_exceptions=False).output
