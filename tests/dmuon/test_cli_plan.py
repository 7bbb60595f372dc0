"""``dmuon-tune plan`` as a user meets it."""

from __future__ import annotations

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cli_helpers import check_one_line_error, invoke

from dmuon.planner import Plan


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path / "cache"))


def test_summary_loads_and_strategies() -> None:
    printed = invoke("plan", "gpt2", "--ranks", 8).stdout
    assert "gpt2 on 8 ranks: H100" in printed and "48 parameters, 48 matrices; plan " in printed
    bars = re.findall(r"^rank (\d)  (█+)(░*) +(\S+ \S+)$", printed, re.MULTILINE)
    assert [rank for rank, *_ in bars] == [*"01234567"]
    assert max(len(full) for _, full, *_ in bars) == 40 and not any(part for _, _, part, _ in bars)
    assert "DMuon, planned" in printed and "All figures are simulated" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_many_ranks_share_lines() -> None:
    printed = invoke("plan", "gpt2", "--ranks", 512).stdout
    lines = re.findall(r"^ *ranks (\d+)–(\d+)  ", printed, re.MULTILINE)
    assert lines[0] == ("0", "15") and lines[-1] == ("496", "511") and len(lines) == 32


def test_out_is_a_plan_that_own_takes(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = invoke("plan", "gpt2", "--ranks", 8, "--out", path, "--json")
    document, plan = json.loads(result.stdout), Plan.load(path)
    assert result.stderr == f"Wrote {path}.\n"
    assert plan.hash == document["plan"]["hash"] and plan.ranks == 8
    assert list(plan.loads) == document["plan"]["loads_ms"]
    assert max(plan.loads) == document["plan"]["makespan_ms"] >= document["plan"]["bound_ms"]
    assert {name: list(ranks) for name, ranks in plan.owners.items()} == document["plan"]["owners"]
    planned = document["strategies"][-1]
    assert planned["strategy"] == "planned"
    rest_ms = planned["optimizer_ms"] - document["plan"]["makespan_ms"]
    assert 0 < rest_ms < planned["optimizer_ms"]


class Page(HTMLParser):
    """The tags and attributes of a page, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_page_that_needs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    invoke("plan", "gpt2", "--ranks", 16, "--html", path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert not any({"src", "href", "xlink:href"} & attributes.keys() for _, attributes in page.tags)
    assert "http" not in text and "@import" not in text and "url(" not in text
    for heading in (
        "Load of each rank",
        "Memory of each rank",
        "A step of the plan",
        "Strategies",
        "As ranks are added",
    ):
        assert f"<h2>{heading}</h2>" in text
    assert "Simulated on H100" in text and "All figures are simulated" in text

    charts = [ElementTree.fromstring(each) for each in re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL)]
    labels = [chart.get("aria-label") for chart in charts]
    assert labels == [
        "load of each rank", "memory of each rank", "timeline of a step", "time of a step by strategy",
        "time of a step by ranks",
    ]  # fmt: skip
    for chart in charts:
        _check_inside(chart)
    loads, memory, timeline, strategies, curves = charts
    for chart in (loads, memory):
        assert len(chart.findall("rect[@class='bar']")) == 16
    kinds = {rect.get("class") for rect in timeline.iter("rect")}
    assert {"k-forward", "k-backward", "k-optimizer", "k-weights", "k-gradients"} <= kinds
    assert len([each for each in strategies.iter("text") if each.get("class") == "name end"]) == 6
    assert len(curves.findall("polyline")) == 6
    assert {len(line.get("points", "").split()) for line in curves.findall("polyline")} == {6}


def _check_inside(chart: ElementTree.Element) -> None:
    _, _, wide, tall = map(float, chart.get("viewBox", "").split())
    for rect in chart.iter("rect"):
        x, y, w, h = (float(rect.get(name, "nan")) for name in ("x", "y", "width", "height"))
        assert x >= 0 and x + w <= wide + 0.5 and y >= 0 and y + h <= tall and w >= 0 and h >= 0
    for line in chart.iter("polyline"):
        for point in line.get("points", "").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= wide and 0 <= y <= tall


def test_bars_are_as_tall_as_the_loads(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    document = json.loads(invoke("plan", "gpt2", "--ranks", 8, "--html", path, "--json").stdout)
    [loads, *_] = re.findall(r"<svg viewBox.*?</svg>", path.read_text(encoding="utf-8"), re.DOTALL)
    chart = ElementTree.fromstring(loads)
    tall = [float(rect.get("height", 0)) for rect in chart.findall("rect[@class='bar']")]
    lines = [float(line.get("y1", 0)) for line in chart.findall("line[@class='grid']")]
    [mark] = chart.findall("line[@class='mark']")
    assert max(tall) == pytest.approx(max(lines) - min(lines))
    share = document["plan"]["share_ms"] / document["plan"]["makespan_ms"]
    assert (max(lines) - float(mark.get("y1", 0))) / max(tall) == pytest.approx(share, abs=1e-3)
    expected = document["plan"]["loads_ms"]
    assert [each / max(tall) for each in tall] == pytest.approx(
        [each / max(expected) for each in expected], abs=1e-3
    )


def test_names_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "<b>&model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "vocab_size": 100, "n_positions": 8, "n_embd": 64, "n_layer": 2})
    )
    path = tmp_path / "report.html"
    invoke("plan", folder, "--ranks", 2, "--html", path)
    assert "&lt;b&gt;&amp;model on 2 ranks" in path.read_text(encoding="utf-8")
    assert Page(path.read_text(encoding="utf-8")).open == []


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.png"
    invoke("plan", "gpt2", "--ranks", 8, "--png", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_png_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    path = tmp_path / "report.png"
    check_one_line_error("plan", "gpt2", "--ranks", 8, "--png", path, says="pip install 'dmuon[bench]'")
    assert not path.exists()


def test_outputs_are_checked_before_the_work(tmp_path: Path) -> None:
    # A model that is not there would be found out next.
    plan = ("plan", "no-such-model", "--ranks", 8)
    for option in ("--out", "--html"):
        check_one_line_error(*plan, option, tmp_path / "none" / "x", says="cannot be written")
    check_one_line_error(*plan, "--html", tmp_path, says="is a directory")
    check_one_line_error(*plan, "--html", tmp_path / "x", "--png", tmp_path / "x", says="written twice")
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_one_line() -> None:
    check_one_line_error("plan", "gpt2", says="Missing option '--ranks'")
    check_one_line_error("plan", "gpt2", "--ranks", 0, says="0 is not in the range")
    check_one_line_error("plan", "gpt2", "--ranks", 12, says="12 ranks do not fill nodes of 8")
    check_one_line_error("plan", "./none", "--ranks", 8, says="no model './none'")


def test_a_model_that_fits_no_memory_is_an_error(tmp_path: Path) -> None:
    import dmuon.simulator

    shipped = Path(dmuon.simulator.__file__).parent / "machines" / "h100.json"
    small = tmp_path / "small.json"
    small.write_text(json.dumps(json.loads(shipped.read_text()) | {"memory_gb": 0.01}))
    check_one_line_error("plan", "gpt2", "--ranks", 8, "--machine", small, says="fits on no rank any more")


def test_measured_costs_are_taken_from_the_store(tmp_path: Path) -> None:
    import dmuon.simulator
    from dmuon.kernels.choose import device_key

    store = tmp_path / "trials.db"
    invoke("run", "--shape", "24x48", "--count", 6, "--precision", "fp32", "--budget", "2s", "--store", store)
    shipped = Path(dmuon.simulator.__file__).parent / "machines" / "h100.json"
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(json.loads(shipped.read_text()) | {"device": device_key("cpu")}))
    model = tmp_path / "config.json"
    model.write_text(
        json.dumps(
            {
                "model_type": "gpt2",
                "vocab_size": 64,
                "n_positions": 8,
                "n_embd": 24,
                "n_inner": 48,
                "n_layer": 3,
            }
        )
    )
    how = ("plan", model, "--ranks", 2, "--machine", mine, "--precision", "fp32", "--json")
    measured = json.loads(invoke(*how, "--store", store).stdout)["plan"]
    modelled = json.loads(invoke(*how).stdout)["plan"]
    assert measured["costs"].startswith("measured on cpu:") and "no such device" in modelled["costs"]
    assert measured["makespan_ms"] != modelled["makespan_ms"]
