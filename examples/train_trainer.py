"""Train a small Llama with Hugging Face's Trainer and Muon, in one process or sharded by FSDP2 through accelerate.

    python examples/train_trainer.py
    torchrun --nproc-per-node 2 examples/train_trainer.py

With ``--resume`` it goes on from the last checkpoint. The model is Llama 3.2 3B's configuration with fewer and
narrower layers; the text is the language reference that every CPython carries, read byte by byte. Needs
``pip install dmuon[clients]``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import dmuon
from dmuon.integrations.transformers import MuonTrainer
from dmuon.models.presets import preset_config

CONTEXT = 64
SMALL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 256}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MUON = {"lr": 0.02, "weight_decay": 0.1, "adamw_lr": 4e-3, "adamw_betas": (0.9, 0.95)}


def build() -> LlamaForCausalLM:
    """Equal weights in every process."""
    torch.manual_seed(0)
    _, published = preset_config("llama-3.2-3b")
    return LlamaForCausalLM(LlamaConfig(**{**published, **SMALL}))


def windows() -> list[dict[str, Tensor]]:
    """The text in windows of CONTEXT bytes, which are inputs and, shifted by the model, labels."""
    text = torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    return [{"input_ids": window, "labels": window} for window in text.unfold(0, CONTEXT, CONTEXT)]


def training_arguments(options: argparse.Namespace, sharded: bool) -> TrainingArguments:
    return TrainingArguments(
        str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        max_grad_norm=1.0,
        bf16=options.bf16,
        fsdp=sharded,
        fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"} if sharded else None,
        save_steps=options.save_every,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )


def shard_on_cpu(arguments: TrainingArguments) -> None:
    """Let accelerate shard on a CPU, too, where it would replicate the model instead. No GPU needs this."""
    assert arguments.device.type == "cpu"
    plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    state = Accelerator(cpu=True, mixed_precision="bf16" if arguments.bf16 else "no").state
    if arguments.bf16:
        plugin.set_mixed_precision("bf16")
    PartialState().distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--save-every", type=int, default=20, help="steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows of each process (default: %(default)s)")
    parser.add_argument(
        "--accumulate", type=int, default=1, help="micro-batches a step (default: %(default)s)"
    )
    parser.add_argument("--bf16", action="store_true", help="compute in bf16; weights and state stay fp32")
    parser.add_argument("--out", type=Path, default=Path("train_trainer"), help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --out")
    options = parser.parse_args()

    sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1
    arguments, model, data = training_arguments(options, sharded), build(), windows()
    if sharded:
        if arguments.use_cpu:
            shard_on_cpu(arguments)
        trainer = MuonTrainer(model, arguments, train_dataset=data, muon=MUON)
    else:
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(dmuon.Muon(model, **MUON), None))
    last = get_last_checkpoint(str(options.out)) if options.resume else None
    if last and int(last.rpartition("-")[2]) >= options.steps:
        # The Trainer would take one step more.
        if trainer.is_world_process_zero():
            print(f"{last} is there already: give more --steps to go on")
        return
    trainer.train(resume_from_checkpoint=last)

    final = options.out / "final"
    trainer.save_model(str(final))  # whole, for from_pretrained
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; model saved to {final}")


if __name__ == "__main__":
    main()
