"""The trainings that ``distributed.py`` compares: one GPT, four optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import dmuon
from dmuon.kernels import gram_ns

VOCABULARY, HEADS = 512, 4
LR, DECAY, MOMENTUM, ADAMW_LR = 0.02, 0.1, 0.95, 3e-4


class Block(nn.Module):
    """Pre-norm causal attention and MLP on (batch, time, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            project(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Tokens (batch, time) to logits."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Contender:
    """One training: a model and what steps it. ``owned``: the ownership, if there is one."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    owned: Any = None

    def forward_backward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting ``tokens`` (batch, time + 1), with its gradients under way."""
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def held_bytes(self) -> int:
        """What this rank keeps from step to step: weights and the optimizers' state."""
        state = [each for o in self.optimizers for values in o.state.values() for each in values.values()]
        masters = [] if self.owned is None else list(self.owned.masters.values())
        shown = [p for p in self.model.parameters() if self.owned is None or p not in self.owned.params]
        tensors = [each for each in (*shown, *masters, *state) if isinstance(each, Tensor)]
        return sum(local(each).nbytes for each in tensors)


class GatherMuon(torch.optim.Optimizer):
    """Muon on sharded matrices: every rank gathers each of them, orthogonalises it, and keeps its shard.

    Momentum and update are on shards. Equal shapes are orthogonalised in one batch, by what DMuon uses.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        by_shape = itertools.groupby(sorted(parameters, key=lambda p: p.shape), key=lambda p: p.shape)
        for shape, equal in by_shape:
            batch = list(equal)
            directions = gram_ns(torch.stack([self._whole(p) for p in batch]), **ITERATION)
            factor = max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, direction in zip(batch, directions, strict=True):
                placed = (parameter.device_mesh, parameter.placements)
                shard = distribute_tensor(direction, *placed, src_data_rank=None).to_local()
                local(parameter).mul_(1 - LR * DECAY).add_(shard, alpha=-LR * factor)

    def _whole(self, parameter: DTensor) -> Tensor:
        state, gradient = self.state[parameter], local(parameter.grad)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        update = torch.lerp(gradient, momentum, MOMENTUM)
        placed = {"device_mesh": parameter.device_mesh, "placements": parameter.placements}
        return DTensor.from_local(
            update, **placed, shape=parameter.shape, stride=parameter.stride()
        ).full_tensor()


ITERATION: dict[str, Any] = {"coefficients": "keller_jordan", "precision": "bf16"}
"""What torch.optim.Muon computes, for all that orthogonalise."""

ADAMW, TORCH, GATHER, OURS = "FSDP2 + AdamW", "torch.optim.Muon on DTensors", "gather, then compute", "dmuon"


def make_contenders(mesh: DeviceMesh, width: int, layers: int, device: str) -> dict[str, Contender]:
    """The same weights for all."""

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(width, layers).to(device)

    def sharded(muon: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None) -> Contender:
        gpt = shard(model(), mesh)
        matrices = [] if muon is None else [p for p in gpt.blocks.parameters() if p.ndim == 2]
        rest = [p for p in gpt.parameters() if not any(p is matrix for matrix in matrices)]
        adamw = torch.optim.AdamW(rest, ADAMW_LR, (0.9, 0.95), weight_decay=DECAY, fused=True)
        return Contender(gpt, [adamw] if muon is None else [muon(matrices), adamw])

    def torch_muon(matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(matrices, LR, DECAY, MOMENTUM, nesterov=True, adjust_lr_fn="original")

    gpt = model()
    owned = dmuon.own(gpt, mesh)
    shard(gpt, mesh, ignored_params=owned.params)
    ours = dmuon.Muon(gpt, LR, weight_decay=DECAY, momentum=MOMENTUM, adamw_lr=ADAMW_LR, **ITERATION)
    return {
        ADAMW: sharded(None),
        TORCH: sharded(torch_muon),
        GATHER: sharded(GatherMuon),
        OURS: Contender(gpt, [ours], owned),
    }


def shard(gpt: GPT, mesh: DeviceMesh, **options: Any) -> GPT:
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(gpt, mesh=mesh, **options)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
