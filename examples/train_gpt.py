"""Train a small GPT with AdamW and with Muon on the same batches, and plot both loss curves.

    python examples/train_gpt.py

With ``--resume`` it goes on from the last checkpoints. The text is the language reference that every CPython carries,
read byte by byte. Both runs start from the same weights, see the same batches and follow the same learning-rate
schedule; only the optimizer differs. Needs ``pip install matplotlib``.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from itertools import pairwise
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dmuon

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 128, 16, 128, 4, 5
WARMUP, EVALUATE_EVERY, EVALUATION_BATCHES = 20, 10, 4

# The best by the final loss of the default 300 steps: AdamW's of 2e-3, 4e-3, 8e-3 and 1.6e-2, Muon's of 0.02,
# 0.04 and 0.08. Muon's AdamW half takes AdamW's.
ADAMW_LR, MUON_LR = 8e-3, 0.04
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1

Curve = list[tuple[int, float]]


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
            project(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes (batch, time) to logits (batch, time, 256); 1.1 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def read_text() -> bytes:
    """English prose from the standard library, or its source code where the prose is not installed."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        return b"\n\n".join(source.read_bytes() for source in sources)
    return "\n\n".join(topics.values()).encode()


def sample(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch of inputs and the bytes that follow them, each (BATCH, CONTEXT)."""
    starts = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=generator).to(data.device)
    windows = data[starts + torch.arange(CONTEXT + 1, device=data.device)]
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per byte."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def build_optimizer(name: str, model: GPT) -> torch.optim.Optimizer:
    """AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for the rest."""
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), ADAMW_LR, BETAS, weight_decay=WEIGHT_DECAY)
    return dmuon.Muon(model, MUON_LR, adamw_lr=ADAMW_LR, adamw_betas=BETAS, weight_decay=WEIGHT_DECAY)


def train(name: str, options: argparse.Namespace) -> Curve:
    """(step, validation loss) every few steps and at the end."""
    steps, device, seed, last = options.steps, options.device, options.seed, options.out / f"{name}.pt"
    data = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8).long().to(device)
    training, validation = data.split([int(0.9 * len(data)), len(data) - int(0.9 * len(data))])
    fixed = torch.Generator().manual_seed(seed)
    validation_batches = [sample(validation, fixed) for _ in range(EVALUATION_BATCHES)]

    torch.manual_seed(seed)
    model = GPT().to(device)
    optimizer = build_optimizer(name, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    batches = torch.Generator().manual_seed(seed + 1)
    start, curve, started = 0, [], time.perf_counter()
    if options.resume and last.exists():
        saved = torch.load(last)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        batches.set_state(saved["batches"])
        start, curve = saved["step"], saved["curve"]
        if start >= steps:
            print(f"{last} is at step {start} already: give more --steps to go on")
    for step in range(start, steps + 1):
        if step % EVALUATE_EVERY == 0 or step == steps:
            with torch.no_grad():
                losses = [loss_of(model, *batch).item() for batch in validation_batches]
            curve.append((step, sum(losses) / len(losses)))
            seconds = time.perf_counter() - started
            print(f"{name:5}  step {step:4d}  loss {curve[-1][1]:.3f}  {seconds:5.1f} s", flush=True)
        if step == steps:
            break
        loss_of(model, *sample(training, batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        done = step + 1
        if done % options.save_every == 0 or done == steps:
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            state = {part: value.state_dict() for part, value in parts.items()}
            state |= {"batches": batches.get_state(), "step": done, "curve": curve}
            torch.save(state, last.with_suffix(".tmp"))
            last.with_suffix(".tmp").replace(last)  # whole, or the one before
    return curve


def first_step_at(curve: Curve, target: float) -> float | None:
    """The step at which ``curve`` first comes down to ``target``, interpolated; None if it never does."""
    for (before, high), (after, low) in pairwise(curve):
        if low <= target <= high:
            return before + (after - before) * (high - target) / (high - low) if high > low else before
    return None


def verdict(adamw: Curve, muon: Curve) -> str:
    """One line: when Muon reached AdamW's final loss."""
    steps, target = adamw[-1]
    reached = first_step_at(muon, target)
    if reached is None:
        return f"Muon did not reach AdamW's final loss of {target:.3f} in {steps} steps"
    return (
        f"Muon reached AdamW's final loss of {target:.3f} at step {reached:.0f} of {steps}, "
        f"in {reached / steps:.2f} of its steps"
    )


def plot(adamw: Curve, muon: Curve, out: Path) -> None:
    """Save both curves, and where Muon reaches AdamW's final loss, as a PNG."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for curve, label, colour in ((adamw, "AdamW", "#7f7f7f"), (muon, "Muon", "#d1495b")):
        axes.plot(*zip(*curve, strict=True), color=colour, linewidth=2)
        axes.annotate(
            f"{label} {curve[-1][1]:.2f}",
            curve[-1],
            (6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
        )
    steps, target = adamw[-1]
    reached = first_step_at(muon, target)
    if reached is not None:
        axes.hlines(target, reached, steps, color="#7f7f7f", linewidth=1, linestyle=":")
        axes.plot(reached, target, "o", color="#d1495b", markersize=5)
        axes.annotate(
            f"Muon gets there in {reached / steps:.0%} of the steps",
            (steps, target),
            (0, -5),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=9,
        )
    axes.set(xlabel="step", ylabel="validation loss (nats per byte)", title="A 1.1M-parameter GPT on bytes")
    axes.set_xlim(0, steps * 1.2)
    top = sorted(loss for _, loss in adamw)[-min(3, len(adamw))]
    axes.set_ylim(min(adamw[-1][1], muon[-1][1]) - 0.1, top)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="of each optimizer (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=50, help="steps (default: %(default)s)")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("train_gpt"), help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoints in --out")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")

    options.out.mkdir(parents=True, exist_ok=True)
    adamw, muon = train("AdamW", options), train("Muon", options)
    picture = options.out / "loss.png"
    plot(adamw, muon, picture)
    print(verdict(adamw, muon))
    print(f"loss {muon[0][1]:.3f} at first, {muon[-1][1]:.3f} at last; plot saved to {picture}")


if __name__ == "__main__":
    main()
