"""A small transformer, trained by one process and by several."""

from __future__ import annotations

import copy
from collections.abc import Callable
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

WIDTH, VOCABULARY, TIME = 16, 24, 6
HOW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "adamw_lr": 1e-2, "precision": "fp64"}


class Block(nn.Module):
    """Attention and an MLP; ``spare`` is for tests of gradients that do not come."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor, spare: bool = True) -> Tensor:
        y = self.norm(x)
        x = x + F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y), is_causal=True)
        x = x + self.down(F.gelu(self.up(x)))
        return x + self.spare(x).sum(-1, keepdim=True) if spare else x


class Experts(nn.Module):
    """Stacked experts; a token goes to the expert of its position modulo ``used``."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("btd,ede->bte", F.gelu(x), self.weight[:, :, : len(self.weight)])


class GPT(nn.Module):
    """Tokens (batch, time) to logits; ``order`` says which blocks run, ``kind`` of checkpointing."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.mixer = nn.Linear(WIDTH, WIDTH, bias=False)  # in no block: its bucket is the model's own
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.order: list[int] = list(range(layers))
        self.checkpointing: str | None = None

    def forward(self, tokens: Tensor, spare: tuple[bool, ...] = (True,) * 9) -> Tensor:
        x = self.embedding(tokens)
        for k in self.order:
            if self.checkpointing is None:
                x = self.blocks[k](x, spare[k])
            else:
                x = checkpoint(self.blocks[k], x, spare[k], use_reentrant=self.checkpointing == "reentrant")
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


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def difference(model: nn.Module, owned: Any, reference: nn.Module) -> float:
    """The largest difference of any weight on this rank from the reference's."""
    expected = dict(reference.named_parameters())
    worst = [(master - expected[name]).abs().max().item() for name, master in owned.masters.items()]
    for name, parameter in model.named_parameters():
        if parameter not in owned.params:
            worst.append((parameter.full_tensor() - expected[name]).abs().max().item())
    return max(worst)


Forward = Callable[[GPT, int, int, Tensor], Tensor]


@dataclass
class Training:
    """How to train, in several processes and in one."""

    steps: int = 3
    micro_batches: int = 1
    sync_all: bool = True
    clip: float | None = None
    own: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    checkpointing: str | None = None
    order: list[int] | None = None
    # The blocks whose spare layer is unused, by rank; one process then sees every rank's rows.
    unused: dict[int, set[int]] = field(default_factory=dict)
    evaluate: bool = False


def train_both(training: Training) -> dict[str, Any]:
    """Train on all ranks and, beside it, alone on all rows. The largest differences in losses and weights."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build(**training.model)
    model.order = training.order or model.order
    reference = copy.deepcopy(model)
    model.checkpointing = training.checkpointing
    owned = wrap(model, line(), **training.own)
    optimizer, alone = dmuon.Muon(model, **HOW), dmuon.Muon(reference, **HOW)
    worst_loss, norms = 0.0, []
    for step in range(training.steps):
        for micro in range(training.micro_batches):
            last = micro == training.micro_batches - 1
            if not training.sync_all:
                dmuon.set_requires_gradient_sync(model, last)
            tokens, targets = batch(step * 10 + micro, 2 * ranks)
            spare = [tuple(k not in training.unused.get(r, ()) for k in range(9)) for r in range(ranks)]
            rows = [slice(2 * r, 2 * r + 2) for r in range(ranks)]
            loss = (
                loss_of(model(tokens[rows[rank]], spare[rank]), targets[rows[rank]]) / training.micro_batches
            )
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            expected = [loss_of(reference(tokens[rows[r]], spare[r]), targets[rows[r]]) for r in range(ranks)]
            mean = sum(expected) / ranks / training.micro_batches
            mean.backward()
            worst_loss = max(worst_loss, abs(total.item() / ranks - mean.item()))
            if training.evaluate:
                with torch.no_grad():
                    model(tokens[:1])
        if training.clip is not None:
            norm = dmuon.clip_grad_norm_(model, training.clip)
            alone_norm = nn.utils.clip_grad_norm_(reference.parameters(), training.clip)
            norms.append((norm.item(), alone_norm.item()))
        optimizer.step()
        alone.step()
        optimizer.zero_grad()
        alone.zero_grad()
    return {"loss": worst_loss, "weights": difference(model, owned, reference), "norms": norms}


def assert_equal(results: list[dict[str, Any]], tolerance: float = 1e-12) -> None:
    for rank, result in enumerate(results):
        assert result["loss"] < tolerance and result["weights"] < tolerance, (rank, result)
