"""The training example runs as a user would run it, and shows what the README says of it."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> str:
    result = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=True)
    return result.stdout


def test_a_few_steps_run_and_plot(tmp_path: Path) -> None:
    out = tmp_path / "loss.png"
    printed = run("--steps", "2", "--device", "cpu", "--out", str(tmp_path))
    lines = printed.splitlines()
    losses = {line.split()[0]: float(line.split()[4]) for line in lines if " step    0 " in line}
    assert losses["AdamW"] == losses["Muon"]  # one start
    assert len([line for line in lines if " step    2 " in line]) == 2
    assert "AdamW's final loss" in printed and str(out) in lines[-1]
    assert out.read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_resumes_bit_for_bit(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(out: str, resume: bool) -> tuple[object, dict[str, torch.Tensor]]:
        (tmp_path / out).mkdir(exist_ok=True)
        how = {"steps": 6, "save_every": 2, "device": torch.device("cpu"), "seed": 0, "resume": resume}
        curve = example.train("Muon", argparse.Namespace(out=tmp_path / out, **how))
        return curve, torch.load(tmp_path / out / "Muon.pt")["model"]

    monkeypatch.setattr(example, "BATCH", 2)
    curve, weights = trained("whole", resume=False)
    assert curve[-1][1] < curve[0][1]
    with monkeypatch.context() as patch:
        taken, sample = [], example.sample

        def interrupt(*arguments: object) -> object:
            taken.append(1)
            if len(taken) == example.EVALUATION_BATCHES + 6:
                raise KeyboardInterrupt
            return sample(*arguments)

        patch.setattr(example, "sample", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trained("parts", resume=False)
    assert torch.load(tmp_path / "parts" / "Muon.pt")["step"] == 4
    again, found = trained("parts", resume=True)
    assert again == curve and all(torch.equal(found[name], weights[name]) for name in weights)


def test_the_text_is_prose_and_falls_back_to_source(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(example.read_text()) > 300_000
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert b"def " in example.read_text()


def test_targets_are_the_bytes_that_follow(example: ModuleType) -> None:
    inputs, targets = example.sample(torch.arange(1000), torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (example.BATCH, example.CONTEXT)
    assert torch.equal(targets, inputs + 1)


def test_the_model_looks_back_only(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.GPT()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1
    before, after = model(tokens), model(changed % 256)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_the_crossing_is_interpolated(example: ModuleType) -> None:
    curve = [(0, 5.0), (10, 3.0), (20, 2.0)]
    assert example.first_step_at(curve, 2.5) == 15
    assert example.first_step_at(curve, 2.0) == 20
    assert example.first_step_at(curve, 1.0) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_muon_needs_at_most_three_quarters_of_the_steps(tmp_path: Path) -> None:
    printed = run("--device", "cpu", "--out", str(tmp_path))
    match = re.search(r"in ([0-9.]+) of its steps", printed)
    assert match is not None, printed
    assert float(match[1]) <= 0.75
    losses = re.search(r"loss ([0-9.]+) at first, ([0-9.]+) at last", printed)
    assert losses is not None and float(losses[2]) < 0.5 * float(losses[1])
    # Trained to the end, it has nothing left to do, and says so.
    again = run("--device", "cpu", "--out", str(tmp_path), "--resume")
    assert again.splitlines()[-2:] == printed.splitlines()[-2:]
    assert f"{tmp_path / 'Muon.pt'} is at step 300 already" in again
