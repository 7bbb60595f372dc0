"""A small transformer, trained by one process and by several."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import dmuon
from dmuon.ownership.sharded import reshard

WIDTH, VOCABULARY, TIME = 16, 24, 6
HOW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "adamw_lr": 1e-2, "precision": "fp64"}


class Block(nn.Module):
    """Attention, an MLP and three stacked experts, which not every call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        # No bias: FSDP cannot reduce what only some ranks have a gradient for.
        self.experts = nn.Parameter(torch.randn(3, WIDTH // 2, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, experts: bool = True) -> Tensor:
        y = self.norm(x)
        x = x + F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y), is_causal=True)
        x = x + self.down(F.gelu(self.up(x)))
        return (
            x + torch.einsum("btd,efd->bte", F.gelu(x), self.experts).mean(-1, keepdim=True) if experts else x
        )


class GPT(nn.Module):
    """Tokens (batch, time) to logits. ``order`` says which blocks run, ``experts`` which of them use theirs."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.mixer = nn.Linear(WIDTH, WIDTH, bias=False)  # in no block: its bucket is the model's own
        # Fewer rows than ranks, and FSDP's.
        self.scales = nn.Embedding(3, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.order: list[int] = list(range(layers))
        self.checkpointing: str | None = None

    def forward(self, tokens: Tensor, experts: tuple[bool, ...] = (True,) * 9) -> Tensor:
        x = self.embedding(tokens) * self.scales.weight.sum(0)
        for k in self.order:
            if self.checkpointing is None:
                x = self.blocks[k](x, experts[k])
            else:
                x = checkpoint(self.blocks[k], x, experts[k], use_reentrant=self.checkpointing == "reentrant")
        return self.head(self.norm(self.mixer(x)))


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCABULARY, (rows, TIME + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(**options).to(dtype)


def wrap(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    """Own and shard ``model``; returns the ownership."""
    owned = dmuon.own(model, mesh, **options)
    reshard = options.get("reshard_after_forward", True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, ignored_params=owned.params)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, ignored_params=owned.params)
    return owned


def mesh_of(nodes: int = 1) -> DeviceMesh:
    ranks = dist.get_world_size()
    if nodes == 1:
        return init_device_mesh("cpu", (ranks,))
    return init_device_mesh("cpu", (nodes, ranks // nodes), mesh_dim_names=("replicate", "shard"))


def difference(model: nn.Module, owned: Any, reference: nn.Module) -> float:
    """The largest difference of any weight on this rank from the reference's."""
    reshard(model)
    expected = dict(reference.named_parameters())
    worst = [(master - expected[name]).abs().max().item() for name, master in owned.masters.items()]
    for name, parameter in model.named_parameters():
        if parameter not in owned.params:
            worst.append((parameter.full_tensor() - expected[name]).abs().max().item())
    return max(worst)


@dataclass
class Training:
    """How to train, in several processes and in one."""

    steps: int = 2
    micro_batches: int = 1
    sync_all: bool = True
    # All forwards before one backward of the "sum", or before a backward of "each"; else by turns.
    forwards_first: str | None = None
    clip: float | None = None
    nodes: int = 1
    own: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)  # options of the optimizer
    checkpointing: str | None = None
    # torch.compile of each "block" or of the "model".
    compiled: str | None = None
    order: list[int] | None = None
    # The blocks whose experts are unused, by rank; one process then sees every rank's rows.
    unused: dict[int, set[int]] = field(default_factory=dict)
    evaluate: bool = False
    # Drop gradients between forward and backward, not after the step.
    zero_late: bool = False


def train_both(training: Training) -> dict[str, Any]:
    """Train on all ranks and, beside it, alone on all rows. The largest differences in losses and weights."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build()
    model.order = training.order or model.order
    reference = copy.deepcopy(model)
    model.checkpointing = training.checkpointing
    owned = wrap(model, mesh_of(training.nodes), **training.own)
    run = torch.compile(model, backend="aot_eager") if training.compiled == "model" else model
    for block in model.blocks if training.compiled == "block" else ():
        block.compile(backend="aot_eager")
    how = {**HOW, **training.how}
    optimizer = dmuon.Muon(run, **how)
    alone = dmuon.Muon(reference, policy=training.own.get("policy"), **how)
    experts = [tuple(k not in training.unused.get(r, ()) for k in range(9)) for r in range(ranks)]
    rows = [slice(2 * r, 2 * r + 2) for r in range(ranks)]
    worst_loss, norms = 0.0, []
    for step in range(training.steps):
        losses, means = [], []
        for micro in range(training.micro_batches):
            if not training.sync_all:
                dmuon.set_requires_gradient_sync(model, micro == training.micro_batches - 1)
            tokens, targets = batch(step * 10 + micro, 2 * ranks)
            losses.append(loss_of(run(tokens[rows[rank]], experts[rank]), targets[rows[rank]]))
            each = [loss_of(reference(tokens[rows[r]], experts[r]), targets[rows[r]]) for r in range(ranks)]
            means.append(torch.stack(each).mean())
            if training.zero_late and micro == 0:
                optimizer.zero_grad()
                alone.zero_grad()
            if training.forwards_first is None:
                losses[-1].backward()
            if training.evaluate:
                with torch.no_grad():
                    model(tokens[:1])
        if training.forwards_first == "sum":
            torch.stack(losses).sum().backward()
        elif training.forwards_first == "each":
            for loss in losses:
                loss.backward()
        torch.stack(means).sum().backward()
        total = torch.stack(losses).detach().sum()
        dist.all_reduce(total)
        worst_loss = max(worst_loss, abs(total.item() / ranks - torch.stack(means).sum().item()))
        if training.clip is not None:
            norm = dmuon.clip_grad_norm_(model, training.clip).item()
            expected = nn.utils.clip_grad_norm_(reference.parameters(), training.clip).item()
            norms.append(abs(norm - expected))
        optimizer.step()
        alone.step()
        if not training.zero_late:
            optimizer.zero_grad()
            alone.zero_grad()
    return {
        "loss": worst_loss,
        "weights": difference(model, owned, reference),
        "state": 0.0 if run is not model else _state_difference(owned, optimizer, alone),
        "norm": max(norms, default=0.0),
    }


def _state_difference(owned: Any, optimizer: dmuon.Muon, alone: dmuon.Muon) -> float:
    """The largest of any state on this rank; infinite where it is not this rank's, or missing.

    What never had a gradient has zeros here, and nothing in a single process.
    """
    state, expected = _state_by_name(optimizer), _state_by_name(alone)
    elsewhere = owned.parameters.keys() - owned.masters.keys()
    if state.keys() & elsewhere or not state.keys() >= expected.keys() - elsewhere:
        return math.inf
    zero = torch.zeros(())
    pairs = [(v, expected.get(name, {}).get(key, zero)) for name in state for key, v in state[name].items()]
    whole = [(ours.full_tensor() if hasattr(ours, "full_tensor") else ours, theirs) for ours, theirs in pairs]
    return max((ours - theirs).abs().max().item() for ours, theirs in whole)


def _state_by_name(optimizer: dmuon.Muon) -> dict[str, dict[str, Tensor]]:
    return {
        name: optimizer.state[parameter]
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if optimizer.state.get(parameter)
    }


def train_each(trainings: list[Training]) -> list[dict[str, float]]:
    """One after the other in the same processes."""
    return [train_both(training) for training in trainings]
