"""Train a small GPT with Muon beside FSDP2, on any number of processes.

    torchrun --nproc-per-node 4 examples/train_fsdp.py

Runs on CUDA with NCCL where every process has a GPU, else on the CPU with gloo. With ``--resume`` it goes on from the
last checkpoint, on as many processes as you like. The text is this very file's folder, read byte by byte; every
process draws its own batches from it.
"""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon

CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 4


class Block(nn.Module):
    """Pre-norm causal attention and MLP on (batch, time, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes (batch, time) to logits (batch, time, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text() -> Tensor:
    """The examples' source code, as bytes."""
    text = b"\n\n".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def sample(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``count`` windows and the bytes that follow them, each (count, CONTEXT)."""
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    replicas, tensor = arguments.hsdp or 1, arguments.tp
    shape = (replicas, ranks // replicas // tensor, tensor)
    every = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard", "tp"))
    mesh = every["replicate", "shard"] if arguments.hsdp else every["shard"]
    place, places = rank // tensor, ranks // tensor  # tensor-parallel ranks see the same data
    torch.manual_seed(0)
    model = GPT().to(device)
    if tensor > 1:
        columns = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        rows = {name: RowwiseParallel() for name in ("out", "down")}
        for block in model.blocks:
            parallelize_module(block, every["tp"], {**columns, **rows})

    # The matrices get owners; everything else is FSDP's.
    compute = torch.bfloat16 if arguments.bf16 else None
    reshard = arguments.zero == 3
    owned = dmuon.own(model, mesh, reshard_after_forward=reshard, compute_dtype=compute)
    precision = MixedPrecisionPolicy(param_dtype=compute)
    for module in (*model.blocks, model):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=precision,
            ignored_params=owned.params,
        )
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=4e-3)

    start, last = 0, arguments.out / "last"
    if arguments.resume:
        with suppress(FileNotFoundError):  # in the first run
            start = dmuon.load_checkpoint(last, model, optimizer)["step"]

    if rank == 0:
        print(owned.describe(), f"from step {start}", sep="\n", flush=True)
        if start >= arguments.steps:
            print(f"{last} is at step {start} already: give more --steps to go on")
    text, batches, losses = read_text(), torch.Generator(), []
    for step in range(start, arguments.steps):
        # By the step, so that a run that goes on draws what it would have drawn.
        batches.manual_seed(step * places + place)
        total = torch.zeros((), device=device)
        for micro in range(arguments.accumulate):
            dmuon.set_requires_gradient_sync(model, micro == arguments.accumulate - 1)
            inputs, targets = (part.to(device) for part in sample(text, arguments.batch, batches))
            loss = F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
            (loss / arguments.accumulate).backward()
            total += loss.detach() / arguments.accumulate
        norm = dmuon.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == arguments.steps - 1:
            dist.all_reduce(total)
            losses.append(total.item() / ranks)
            if rank == 0:
                print(f"step {step:4d}  loss {losses[-1]:.3f}  gradient norm {norm.item():.3f}", flush=True)
        done = step + 1
        if done % arguments.save_every == 0 or done == arguments.steps:
            dmuon.save_checkpoint(last, model, optimizer, extra={"step": done})
    if rank == 0 and losses:
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; checkpoint saved to {last}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--save-every", type=int, default=50, help="steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows of each process (default: %(default)s)")
    parser.add_argument(
        "--accumulate", type=int, default=1, help="micro-batches a step (default: %(default)s)"
    )
    parser.add_argument("--zero", type=int, choices=(2, 3), default=3, help="default: %(default)s")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16; masters stay fp32")
    parser.add_argument(
        "--hsdp", type=int, metavar="REPLICAS", help="shard within each of so many replicas only"
    )
    parser.add_argument("--tp", type=int, metavar="RANKS", default=1, help="so many divide each layer")
    parser.add_argument("--out", type=Path, default=Path("train_fsdp"), help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --out")
    arguments = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.tp < 1 or HEADS % arguments.tp or ranks % arguments.tp:
        parser.error(f"--tp {arguments.tp} does not divide the {HEADS} heads and the {ranks} processes")
    if arguments.hsdp is not None and (arguments.hsdp < 1 or ranks // arguments.tp % arguments.hsdp):
        parser.error(f"--hsdp {arguments.hsdp} does not divide the {ranks // arguments.tp} ranks for data")

    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        train(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
