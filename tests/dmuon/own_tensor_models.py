"""A small transformer whose layers are divided over a tensor-parallel axis, and the same in one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from own_models import HOW, VOCABULARY, WIDTH, batch, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import dmuon
from dmuon.policy import MatrixPolicy

HIDDEN, HEADS = 3 * WIDTH + 1, 4
# Neither the rows nor their parts divide by two.
SPLIT = MatrixPolicy(splits={"*.up.weight": (16, HIDDEN - 16)})


class Block(nn.Module):
    """Attention of heads that are divided, an MLP of uneven shards, experts, and layers that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.experts = nn.Parameter(torch.randn(3, WIDTH // 2, WIDTH) / WIDTH**0.5)
        self.gate, self.mix = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        x = x + self.down(F.gelu(self.up(x)))
        x = x + self.mix(x) * torch.sigmoid(self.gate(x))
        return x + self.route(x).mean(-1, keepdim=True)

    def route(self, x: Tensor) -> Tensor:
        if not isinstance(self.experts, DTensor):
            return torch.einsum("btd,efd->bte", F.gelu(x), self.experts)
        x = _replicated(x, self.experts.device_mesh)
        return torch.einsum("btd,efd->bte", F.gelu(x), self.experts).full_tensor()


class GPT(nn.Module):
    """Tokens (batch, time) to logits."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.mixer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.mixer(x)))


def _replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def _enter(placement: Placement, module: nn.Module, args: Any, mesh: DeviceMesh) -> DTensor:
    return _replicated(args[0], mesh).redistribute(mesh, [placement])


def build(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT().double()


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Every kind of layout: rows, columns, uneven rows, experts, whole DTensors, and plain tensors."""
    for block in model.blocks:
        plan: dict[str, Any] = {
            "up": ColwiseParallel(use_local_output=False),
            "down": RowwiseParallel(),
        }
        if HEADS % mesh.size() == 0:
            plan |= {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel()}
            plan |= {"out": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
        block.experts = nn.Parameter(distribute_tensor(block.experts.detach(), mesh, [Shard(0)]))
        # Each rank has the gradient of its own tokens, or of its own rows where these divide, only.
        for module, placement in (
            (block.norm, Shard(1)),
            (block.gate, Shard(0) if mesh.size() == 2 else Replicate()),
        ):
            enter, leave = partial(_enter, placement), lambda _, output, __: output.full_tensor()
            distribute_module(module, mesh, input_fn=enter, output_fn=leave)
    parallelize_module(model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate())})


def mesh_of(tensor: int, replicas: int = 1) -> DeviceMesh:
    """(replicate, shard, tp); without replicas (shard, tp)."""
    ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh("cpu", (ranks // tensor, tensor), mesh_dim_names=("shard", "tp"))
    shape = (replicas, ranks // tensor // replicas, tensor)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["shard"] if mesh.ndim == 2 else mesh["replicate", "shard"]


def wrap(model: GPT, mesh: DeviceMesh, sharded: bool = True, **options: Any) -> Any:
    """Divide, own and, if it is to be ``sharded``, shard ``model``; returns the ownership."""
    parallelize(model, mesh["tp"])
    owned = dmuon.own(model, data_mesh(mesh), **options)
    if not sharded:
        return owned
    reshard = options.get("reshard_after_forward", True)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=data_mesh(mesh), reshard_after_forward=reshard, ignored_params=owned.params)
    return owned


@dataclass
class Training:
    tensor: int = 2
    replicas: int = 1
    steps: int = 3
    micro_batches: int = 1
    sync_all: bool = True
    clip: float | None = None
    # Without it there must be one rank for all data.
    sharded: bool = True
    own: dict[str, Any] = field(default_factory=dict)
    muon: dict[str, Any] = field(default_factory=dict)


def train_both(training: Training) -> dict[str, float]:
    """Train on all ranks and, beside it, alone on all rows. The largest differences in losses, weights, norms."""
    model = build()
    reference = copy.deepcopy(model)
    mesh = mesh_of(training.tensor, training.replicas)
    owned = wrap(model, mesh, training.sharded, **training.own)
    place, places = data_mesh(mesh).mesh.flatten().tolist().index(dist.get_rank()), data_mesh(mesh).size()
    how = {**HOW, **training.muon}
    optimizer = dmuon.Muon(model, **how)
    alone = dmuon.Muon(reference, policy=training.own.get("policy"), **how)
    worst = {"loss": 0.0, "norm": 0.0}
    for step in range(training.steps):
        for micro in range(training.micro_batches):
            if not training.sync_all:
                dmuon.set_requires_gradient_sync(model, micro == training.micro_batches - 1)
            tokens, targets = batch(step * 10 + micro, 2 * places)
            part = slice(2 * place, 2 * place + 2)
            loss = loss_of(model(tokens[part]), targets[part])
            loss.backward()
            expected = loss_of(reference(tokens), targets)
            expected.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            worst["loss"] = max(worst["loss"], abs(total.item() / dist.get_world_size() - expected.item()))
        if training.clip is not None:
            norm = dmuon.clip_grad_norm_(model, training.clip).item()
            wanted = nn.utils.clip_grad_norm_(reference.parameters(), training.clip).item()
            worst["norm"] = max(worst["norm"], abs(norm - wanted))
        for each in (optimizer, alone):
            each.step()
            each.zero_grad()
    dmuon.check_consistency(model)
    return worst | difference(owned, model, optimizer, reference, alone)


def difference(
    owned: Any, model: GPT, optimizer: dmuon.Muon, reference: GPT, alone: dmuon.Muon
) -> dict[str, float]:
    """The largest of any weight, and of any state of what this rank has."""
    expected = dict(reference.named_parameters())
    weights, state = 0.0, 0.0
    for name, parameter in model.named_parameters():
        weight = owned.masters.get(name) if parameter in owned.params else parameter
        if weight is None:
            continue
        weights = max(weights, (whole(weight) - expected[name]).abs().max().item())
        for key, value in alone.state[expected[name]].items():
            state = max(state, (whole(optimizer.state[parameter][key]) - value).abs().max().item())
    return {"weights": weights, "state": state}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_each(trainings: list[Training]) -> list[dict[str, float]]:
    return [train_both(training) for training in trainings]
