"""Hugging Face's Trainer and Lightning train with Muon: the examples as a user runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dmuon

for framework in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(framework, reason="needs pip install dmuon[clients]")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, ranks: int, out: Path, *options: str) -> str:
    """What ``example`` prints."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    done = subprocess.run(
        [sys.executable, *launcher, EXAMPLES / example, "--out", out, *options],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def losses_in(printed: str) -> tuple[float, float]:
    losses = re.search(r"loss ([0-9.]+) at first, ([0-9.]+) at last", printed)
    assert losses is not None, printed
    return float(losses[1]), float(losses[2])


def check_loss(printed: str) -> None:
    first, last = losses_in(printed)
    assert last < 0.75 * first


def check_equal(one: Path, other: Path) -> None:
    """Bitwise, and as transformers loads them."""
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(folder / "final").state_dict() for folder in (one, other)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def logged(printed: str, key: str) -> torch.Tensor:
    return torch.tensor([float(value) for value in re.findall(rf"'{key}': '([0-9.]+)'", printed)])


def small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def trainer(kind: type, out: Path, model: Any, **options: Any) -> Any:
    from transformers import TrainingArguments

    tokens = torch.arange(16) % 7
    arguments = TrainingArguments(
        str(out),
        max_steps=3,
        learning_rate=1e-2,
        weight_decay=0.2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": tokens + k, "labels": tokens + k} for k in range(32)]
    return kind(model, arguments, train_dataset=data, **options)


def test_the_trainers_ways_to_an_optimizer_agree(tmp_path: Path) -> None:
    """The optimizer itself, a factory that gets the model, and MuonTrainer."""
    from transformers import Trainer

    from dmuon.integrations.transformers import MuonTrainer

    how = {"lr": 0.01, "adamw_lr": 1e-2, "weight_decay": 0.2, "adamw_betas": (0.9, 0.999)}
    model = small_llama()
    trainers = [
        trainer(Trainer, tmp_path, model, optimizers=(dmuon.Muon(model, **how), None)),
        trainer(Trainer, tmp_path, small_llama(), optimizer_cls_and_kwargs=(lambda: dmuon.Muon, how)),
        trainer(MuonTrainer, tmp_path, small_llama(), muon={"lr": 0.01}),
    ]
    before = small_llama().state_dict()
    for each in trainers:
        each.train()
    expected = trainers[0].model.state_dict()
    assert not any(torch.equal(before[name], expected[name]) for name in before)
    for each in trainers[1:]:
        found = each.model.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (EXAMPLES.parent / "docs" / "clients.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "clients.md", "exec"), names)
    assert {"train_sharded", "prepare_sharded", "LanguageModel"} <= names.keys()


@pytest.mark.slow
def test_a_trainer_learns_and_resumes(tmp_path: Path) -> None:
    check_loss(run("train_trainer.py", 1, tmp_path / "one"))
    shutil.copytree(tmp_path / "one" / "checkpoint-20", tmp_path / "other" / "checkpoint-20")
    run("train_trainer.py", 1, tmp_path / "other", "--resume")
    check_equal(tmp_path / "one", tmp_path / "other")
    assert "checkpoint-40 is there already" in run("train_trainer.py", 1, tmp_path / "other", "--resume")


@pytest.mark.slow
def test_a_sharded_trainer_learns_and_resumes(tmp_path: Path) -> None:
    check_loss(run("train_trainer.py", 2, tmp_path / "one"))
    shutil.copytree(tmp_path / "one" / "checkpoint-20", tmp_path / "other" / "checkpoint-20")
    run("train_trainer.py", 2, tmp_path / "other", "--resume")
    check_equal(tmp_path / "one", tmp_path / "other")


@pytest.mark.slow
def test_a_sharded_trainer_equals_one_process(tmp_path: Path) -> None:
    """Losses and norms as logged, with accumulation and clipping: the ranks share out each batch."""
    steps = ("--steps", "20", "--accumulate", "2")
    alone = run("train_trainer.py", 1, tmp_path / "alone", *steps, "--batch", "4")
    shared = run("train_trainer.py", 2, tmp_path / "shared", *steps, "--batch", "2")
    for key in ("loss", "grad_norm"):
        expected, found = logged(alone, key), logged(shared, key)
        assert len(expected) == 4
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


@pytest.mark.slow
def test_a_sharded_trainer_learns_in_bf16(tmp_path: Path) -> None:
    check_loss(run("train_trainer.py", 2, tmp_path, "--bf16"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_learns_and_resumes(ranks: int, tmp_path: Path) -> None:
    printed = run("train_lightning.py", ranks, tmp_path / "one")
    check_loss(printed)
    saved, place = tmp_path / "one" / "epoch=0.ckpt", tmp_path / "other" / "last.ckpt"
    place.parent.mkdir()
    if ranks == 1:  # its batches after the first epoch are not reproducible
        shutil.copy(saved, place)
        resumed = run("train_lightning.py", ranks, tmp_path / "other", "--resume")
        assert losses_in(resumed)[0] < 0.75 * losses_in(printed)[0]
        again = run("train_lightning.py", ranks, tmp_path / "one", "--resume")
        assert "is at step 40 already" in again
    else:
        shutil.copytree(saved, place)
        run("train_lightning.py", ranks, tmp_path / "other", "--resume")
        check_equal(tmp_path / "one", tmp_path / "other")
