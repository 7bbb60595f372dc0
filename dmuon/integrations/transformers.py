"""Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from dmuon.muon import Muon
from dmuon.ownership.export import full_state_dict
from dmuon.ownership.gradients import clip_grad_norm_
from dmuon.ownership.owned import Owned

if not hasattr(Trainer, "_clip_grad_norm"):
    raise ImportError(
        "MuonTrainer needs transformers 5.3 or newer: before, nothing of a Trainer's clipping can be replaced"
    )


class MuonTrainer(Trainer):
    """A Trainer whose optimizer is :class:`dmuon.Muon`; under FSDP2 with owned matrices.

    What the Trainer does with gradients and weights by itself — accumulating, clipping, logging their norm, dropping
    them, saving the model — it then does with owned ones as well. Checkpoints are FSDP's sharded ones:
    ``fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"}``.

    Args:
        *args: the Trainer's, without ``optimizers``.
        muon: options of :class:`dmuon.Muon`. AdamW's that are not given come from the training arguments
            (``learning_rate``, ``adam_beta1``, ``adam_beta2``, ``adam_epsilon``), and ``weight_decay`` too.
        ownership: under FSDP2, ``policy`` and ``plan`` as for :func:`dmuon.own`.
        **kwargs: the Trainer's.

    Attributes:
        owned: the ownership, once training under FSDP2 has begun.
    """

    optimizer: torch.optim.Optimizer | None

    def __init__(
        self,
        *args: Any,
        muon: Mapping[str, Any] | None = None,
        ownership: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.owned: Owned | None = None
        self._muon, self._ownership = dict(muon or {}), dict(ownership or {})

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            whole: nn.Module = self.model if model is None else model
            if self.is_fsdp_enabled:
                from dmuon.integrations.accelerate import shard

                self.owned = shard(whole, self.accelerator, **self._ownership)
                self.add_callback(_DropGradients())
            args = self.args
            defaults = {
                "weight_decay": args.weight_decay,
                "adamw_lr": args.learning_rate,
                "adamw_betas": (args.adam_beta1, args.adam_beta2),
                "adamw_eps": args.adam_epsilon,
            }
            self.optimizer = Muon(whole, **{**defaults, **self._muon})
        return self.optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.owned is not None:
            self.owned.set_requires_gradient_sync(self.accelerator.sync_gradients)
        loss: Tensor = super().training_step(*args, **kwargs)
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.owned is None or _internal_call:  # within a checkpoint the weights are sharded
            super().save_model(output_dir, _internal_call=_internal_call)
            return
        self._save(output_dir, state_dict=full_state_dict(self.model))

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.owned is None:
            return super()._clip_grad_norm(model)
        return clip_grad_norm_(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self.owned is not None and grad_norm is None:
            grad_norm = clip_grad_norm_(model, float("inf"))
        return super()._get_grad_norm(model, grad_norm)


class _DropGradients(TrainerCallback):
    """The Trainer has the model drop its gradients, but owned ones are not the model's."""

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, *, optimizer: torch.optim.Optimizer, **kwargs: Any
    ) -> None:
        optimizer.zero_grad()
