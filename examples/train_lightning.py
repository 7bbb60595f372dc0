"""Train a small Qwen with Lightning and Muon, in one process or sharded by FSDP2 (ModelParallelStrategy).

    python examples/train_lightning.py
    torchrun --nproc-per-node 2 examples/train_lightning.py

With ``--resume`` it goes on from the last checkpoint. The model is Qwen2.5 0.5B's configuration with fewer and
narrower layers; the text is the language reference that every CPython carries, read byte by byte. Needs
``pip install dmuon[clients]``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader
from transformers import Qwen2Config, Qwen2ForCausalLM

import dmuon
from dmuon.models.presets import preset_config

CONTEXT = 64
SMALL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 256}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


class LanguageModel(lightning.LightningModule):
    """Next-byte prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Qwen2ForCausalLM | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(0)  # equal weights in every process
        _, published = preset_config("qwen2.5-0.5b")
        model = Qwen2ForCausalLM(Qwen2Config(**{**published, **SMALL}))
        self.model = model.to(self.trainer.strategy.root_device)
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            owned = dmuon.own(self.model, mesh)
            for module in (*self.model.model.layers, self.model):
                fully_shard(module, mesh=mesh, ignored_params=owned.params)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = dmuon.Muon(self.model, lr=0.02, adamw_lr=4e-3, weight_decay=0.1)
        schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Lightning would see the gradients of sharded parameters only."""
        if self.device_mesh is None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:
            dmuon.clip_grad_norm_(self.model, gradient_clip_val)


def windows() -> list[dict[str, Tensor]]:
    """The text in windows of CONTEXT bytes, which are inputs and, shifted by the model, labels."""
    text = torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    return [{"input_ids": window, "labels": window} for window in text.unfold(0, CONTEXT, CONTEXT)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--epochs", type=int, default=2, help="each ends in a checkpoint (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=20, help="batches an epoch (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows of each process (default: %(default)s)")
    parser.add_argument(
        "--accumulate", type=int, default=1, help="micro-batches a step (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("train_lightning"), help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --out")
    options = parser.parse_args()

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sharded = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=ranks,
        strategy=sharded if ranks > 1 else "auto",
        max_epochs=options.epochs,
        limit_train_batches=options.steps,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(options.out, "{epoch}", save_top_k=-1, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    model = LanguageModel()
    batches = DataLoader(windows(), batch_size=options.batch, shuffle=True)
    trainer.fit(model, batches, ckpt_path=options.out / "last.ckpt" if options.resume else None)
    final, weights = options.out / "final", dmuon.full_state_dict(model.model)  # whole, for from_pretrained
    if trainer.is_global_zero:
        model.model.save_pretrained(final, state_dict=weights)
        if not model.losses:
            print(f"{options.out} is at step {trainer.global_step} already: give more --epochs to go on")
            return
        first, last = (sum(part) / len(part) for part in (model.losses[:5], model.losses[-5:]))
        print(f"loss {first:.3f} at first, {last:.3f} at last; model saved to {final}")


if __name__ == "__main__":
    main()
