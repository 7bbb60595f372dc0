"""What a sharded Trainer does beside its steps: accumulation, evaluation, the best model, a second training."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from client_ranks import pretend_launched, shard_on_cpu
from own_processes import run_ranks

import dmuon

for framework in ("accelerate", "transformers"):
    pytest.importorskip(framework, reason="needs pip install dmuon[clients]")


def small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def train() -> dict[str, Any]:
    from transformers import TrainingArguments

    from dmuon.integrations.transformers import MuonTrainer

    pretend_launched()
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders, 0)
    out = Path(folders[0])
    arguments = TrainingArguments(
        str(out),
        max_steps=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        learning_rate=1e-2,
        fsdp=True,
        fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"},
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the worst: so that the last is not the best
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    assert arguments.device.type == "cpu"
    shard_on_cpu(arguments.fsdp_plugin_args)
    tokens = torch.arange(16) % 7
    data = [{"input_ids": tokens + k, "labels": tokens + k} for k in range(32)]
    trainer = MuonTrainer(
        small_llama(), arguments, train_dataset=data, eval_dataset=data[:4], muon={"lr": 0.02}
    )
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    reduced = [e for e in trainer.owned.statistics.as_dict()["exchanges"] if e["kind"] == "reduce"]
    found = {
        "losses": losses,
        "best": trainer.evaluate()["eval_loss"],
        "reductions": sum(e["calls"] for e in reduced),
    }

    trainer.save_model(str(out / "final"))
    weights = dmuon.full_state_dict(trainer.model)
    if dist.get_rank() == 0:
        from transformers import AutoModelForCausalLM

        saved = AutoModelForCausalLM.from_pretrained(out / "final").state_dict()
        found["saved"] = saved.keys() == weights.keys() and all(
            torch.equal(saved[n], weights[n]) for n in saved
        )
    trainer.train()
    found["again"] = trainer.evaluate()["eval_loss"]
    return found


@pytest.mark.slow
def test_a_sharded_trainer_does_the_rest_as_well() -> None:
    for found in run_ranks(2, train, timeout=150):
        first, second = found["losses"]
        assert second < first and found["best"] == first and found["again"] < first, found
        assert found["reductions"] == 2 * 2, "one of each of two buckets in each of two steps"
        assert found.get("saved", True)
