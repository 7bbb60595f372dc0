"""bench/ns.py: it runs, its yardstick is torch's, its polynomials are exact, and its sums are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon.kernels import polynomial_polar
from dmuon.kernels.coefficients import keller_jordan, resolve_coefficients

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test import the modules of bench/, which is no package."""
    monkeypatch.syspath_prepend(str(BENCH))


def run(*arguments: str, home: Path) -> str:
    # One thread: on a busy machine the barriers of several cost more than these tiny products.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DMUON_CACHE": str(home / "cache")}
    command = [sys.executable, str(BENCH / "ns.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quick_prints_a_table_and_writes_json_and_png(tmp_path: Path) -> None:
    printed = run(
        "--quick", "--shape", "24x80", "--batch", "3", "--precision", "fp32", "--precision", "fp64", "--tune", "5s",
        "--peer", f"gram-newton-schulz={sys.executable}", "--out", str(tmp_path), home=tmp_path,
    )  # fmt: skip
    assert "3 of 24×80" in printed and "torch / dmuon" in printed
    assert "not available: gram-newton-schulz in fp32, fp64: computes in fp16 alone" in printed
    (png,) = tmp_path.glob("ns-cpu-*.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    document = json.loads(png.with_suffix(".json").read_text())
    assert [result["precision"] for result in document["results"]] == ["fp32", "fp64"]
    for result in document["results"]:
        _check(result)
    assert document["tuned_s"] == 5 and not any("untuned" in each["choice"] for each in document["results"])
    assert not (tmp_path / "cache").exists()  # --tune keeps to a store of its own


def _check(result: dict[str, Any]) -> None:
    ours, torchs = result["timings"]["dmuon"], result["timings"]["torch.optim.Muon"]
    assert (result["batch"], result["rows"], result["cols"]) == (3, 24, 80)
    assert len(ours["samples_ms"]) == len(torchs["samples_ms"]) == 3
    medians = [sorted(timing["samples_ms"])[1] for timing in (torchs, ours)]
    assert torchs["over_dmuon"] == pytest.approx(medians[0] / medians[1])
    assert ours["error"] < (1e-4 if result["precision"] == "fp32" else 1e-11)


def test_bad_options_say_what_is_wrong(bench: None, tmp_path: Path) -> None:
    import ns
    from click.testing import CliRunner

    for arguments, message in (
        (["--shape", "1024"], "not a shape"),
        (["--batch", "4"], "--shape"),
        (["--tune", "2x"], "not a time"),
        (["--peer", "unknown=python"], "NAME=PYTHON"),
        (["--peer", f"dion={tmp_path}/python"], "does not start"),
    ):
        result = CliRunner().invoke(ns.main, [*arguments, "--out", str(tmp_path / "out")])
        assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    assert not (tmp_path / "out").exists()


def test_wrong_numbers_are_not_timed(bench: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import comparison
    from cases import Shape

    monkeypatch.setitem(comparison.PEERS, "dion", _stand_in("dion", lambda G: 1.5 * G))
    monkeypatch.setitem(comparison.PEERS, "emerging-optimizers", _stand_in("emerging-optimizers", _broken))
    result = comparison.compare(Shape(1, 8, 24), "fp32", "cpu", 2, {})
    assert list(result.timings) == ["dmuon", "torch.optim.Muon"]
    assert result.absent["dion"].startswith("wrong by")
    assert result.absent["emerging-optimizers"] == "fails here: ValueError: broken"
    monkeypatch.setattr(comparison, "gram_ns", lambda G, **_: G)
    with pytest.raises(comparison.WrongResult, match="dmuon, 8×24 in fp32"):
        comparison.compare(Shape(1, 8, 24), "fp32", "cpu", 2, {})


def _stand_in(name: str, run: Any) -> Any:
    import peers

    return peers.Peer(name, name, peers.KELLER_JORDAN, lambda precision, device: run)


def _broken(G: torch.Tensor) -> torch.Tensor:
    raise ValueError("broken")


@pytest.mark.parametrize("shape", [(24, 80), (80, 24), (32, 32)])
@pytest.mark.parametrize("name", ["KELLER_JORDAN", "YOU"])
def test_the_yardstick_is_the_polynomial(bench: None, shape: tuple[int, int], name: str) -> None:
    import peers

    steps = getattr(peers, name)
    assert steps == (keller_jordan() if name == "KELLER_JORDAN" else resolve_coefficients("you")).steps
    G = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = polynomial_polar(G, resolve_coefficients(steps))
    assert (peers.torch_newton_schulz(G, torch.float64, steps) - exact).norm() < 1e-11 * exact.norm()


def test_another_torch_muon_is_noticed(bench: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import peers

    peers.check_torch_newton_schulz("cpu")
    original = peers.torch_newton_schulz
    almost = ((3.4445, -4.7750, 2.0400), *peers.KELLER_JORDAN[1:])
    monkeypatch.setattr(peers, "torch_newton_schulz", lambda G, dtype: original(G, dtype, almost))
    with pytest.raises(RuntimeError, match="no longer computes"):
        peers.check_torch_newton_schulz("cpu")


def test_rounds_interleave_and_ratios_pair_their_samples(bench: None) -> None:
    from timing import interleave, ratio

    order: list[str] = []

    def sampler(name: str, ms: float) -> Any:
        return lambda: order.append(name) or ms * (1 + len(order) // 3)

    samples = interleave(
        {name: sampler(name, ms) for name, ms in (("a", 1.0), ("b", 2.0), ("c", 4.0))}, 4, 60, 2
    )
    assert "".join(order) == "abcbcacababc"
    assert [len(times) for times in samples.values()] == [4, 4, 4]
    assert len(interleave({"a": lambda: 1.0}, 9, 0.0, 2)["a"]) == 2
    found = ratio([2.0, 4.0, 9.0, 8.0], [1.0, 2.0, 3.0, 4.0])
    assert found.of_medians == 6.0 / 2.5
    assert (found.quartile_1, found.quartile_3) == (2.0, 2.25)


def test_targets_are_those_that_were_promised(bench: None) -> None:
    from cases import distinct, must_show, preset_shapes

    shapes = distinct([*must_show(), *preset_shapes()])
    due = {
        (shape.batch, shape.rows, shape.cols, precision): shape.target(precision, "cpu")
        for shape in shapes
        for precision in ("fp32", "bf16")
    }
    assert (due[1, 1024, 4096, "fp32"], due[1, 512, 2048, "fp32"]) == (2.2, 1.9)
    assert (due[1, 1024, 4096, "bf16"], due[1, 512, 2048, "bf16"]) == (1.7, 1.4)
    assert due[32, 128, 512, "fp32"] == due[32, 128, 512, "bf16"] == 2.5
    assert due[1, 768, 768, "fp32"] == due[1, 2048, 11008, "bf16"] == 0.97
    assert max(shape.rows for shape in shapes) == 2048 and shapes[0].target("fp32", "cuda") is None


def test_a_peer_runs_in_another_process_on_the_same_input(
    bench: None, tmp_path: Path, monkeypatch: Any
) -> None:
    """A stand-in package under the peer's name, which prints, and negates what it is given."""
    package = tmp_path / "dion"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "newton_schulz_triton.py").write_text(
        "def zeropower_via_newtonschulz5(G):\n"
        "    print('chatter')\n"
        "    if G.shape[-1] == 13: raise ValueError('thirteen\\nmore')\n"
        "    return -G\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    from contenders import PeerProcess
    from peers import NotAvailable

    G = torch.randn(5, 9)
    with PeerProcess("dion", sys.executable) as process:
        contender = process.contender("bf16", G)
        assert torch.equal(contender.result(), -G)
        assert contender.sample(3) > 0
        with pytest.raises(NotAvailable, match="bf16 alone"):
            process.contender("fp32", G)
        with pytest.raises(NotAvailable, match=r"ValueError: thirteen$"):
            process.contender("bf16", torch.randn(5, 13)).result()
        assert process.versions == {"dion": "not installed by pip", "torch": torch.__version__}
