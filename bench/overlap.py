"""How much of its exchanges a step hides, with every transfer delayed and compute that takes a known time.

    python bench/overlap.py --ranks 4
    python bench/overlap.py --delay 20 --forward 10 --backward 10    # longer transfers than compute

Blocks sleep instead of computing, so that ranks do not fight for cores. Publications and reductions each have a link
of their own, which carries one transfer at a time. README.md, next to this file, explains the table.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import Any
from unittest import mock

import click
import torch
import torch.distributed as dist
from ranks import measure_in_ranks
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.ownership.probe import make_routes
from dmuon.ownership.routes import Pending

TARGET = 1.15
"""A step may take this many times the longer of its compute and its transfers."""

MODES = ("compute", "in series", "overlapped")


@dataclass(frozen=True)
class Late:
    """A transfer that ends no sooner than ``ready``, on the clock of ``time.perf_counter``."""

    pending: Pending
    ready: float

    @property
    def done(self) -> bool:
        return time.perf_counter() >= self.ready and self.pending.done

    def wait(self) -> Tensor:
        time.sleep(max(0.0, self.ready - time.perf_counter()))
        return self.pending.wait()


@dataclass
class DelayedRoutes:
    """Routes of which every transfer takes ``delay_s`` longer.

    ``mode``: "compute" delays nothing; "in series" waits for each transfer at once; "overlapped" is as it is meant.
    """

    routes: Any
    delay_s: float
    mode: str = "compute"
    free: dict[str, float] = field(default_factory=lambda: {"publish": 0.0, "reduce": 0.0})
    transfers: dict[str, int] = field(default_factory=lambda: {"publish": 0, "reduce": 0})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.routes, name)

    def publish(self, flat: Tensor, sizes: Sequence[int], lane: int = 0) -> Pending:
        return self._delayed("publish", self.routes.publish(flat, sizes, lane))

    def reduce(self, packed: Tensor, sizes: Sequence[int]) -> Pending:
        return self._delayed("reduce", self.routes.reduce(packed, sizes))

    def _delayed(self, direction: str, pending: Pending) -> Pending:
        self.transfers[direction] += 1
        if self.mode == "compute":
            return pending
        # A link carries one transfer at a time.
        self.free[direction] = max(self.free[direction], time.perf_counter()) + self.delay_s
        late = Late(pending, self.free[direction])
        if self.mode == "in series":
            late.wait()
        return late


class Sleep(torch.autograd.Function):
    """The identity, which takes a while forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Block(nn.Module):
    """A matrix for each rank to own, between the input and a sleep."""

    def __init__(self, ranks: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(ranks))
        self.sleep = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return Sleep.apply(x, *self.sleep)


@dataclass(frozen=True)
class Setting:
    ranks: int
    blocks: int
    delay_s: float
    forward_s: float
    backward_s: float
    reshard: bool
    rounds: int
    steps: int


def measure(rank: int, setting: Setting, store: str, results: Any) -> None:
    """One rank of the bench. Puts seconds a step by mode, and transfers a step, into ``results`` on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=setting.ranks, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(0)
    model = nn.Sequential(
        *(Block(setting.ranks, setting.forward_s, setting.backward_s) for _ in range(setting.blocks))
    )
    made: list[DelayedRoutes] = []

    def delayed(*args: Any, **kwargs: Any) -> DelayedRoutes:
        made.append(DelayedRoutes(make_routes(*args, **kwargs), setting.delay_s))
        return made[0]

    mesh = init_device_mesh("cpu", (setting.ranks,))
    with mock.patch("dmuon.ownership.owned.make_routes", delayed):
        dmuon.own(model, mesh, reshard_after_forward=setting.reshard)
    (routes,) = made
    optimizer = dmuon.Muon(model, autotune="off")
    batch = torch.randn(2, 16)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    samples: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(setting.rounds):
        for routes.mode in MODES:
            step()
            dist.barrier()
            routes.transfers = {"publish": 0, "reduce": 0}
            start = time.perf_counter()
            for _ in range(setting.steps):
                step()
            dist.barrier()
            samples[routes.mode].append((time.perf_counter() - start) / setting.steps)
    if rank == 0:
        seconds = {mode: median(each) for mode, each in samples.items()}
        results.put((seconds, {kind: n / setting.steps for kind, n in routes.transfers.items()}))
    dist.barrier()
    dist.destroy_process_group()


@click.command()
@click.option("--ranks", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--blocks", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--delay", default=5.0, show_default=True, help="Milliseconds that every transfer takes.")
@click.option(
    "--forward", default=5.0, show_default=True, help="Milliseconds of compute in a block's forward."
)
@click.option("--backward", default=10.0, show_default=True, help="The same in its backward.")
@click.option("--zero", type=click.Choice(["2", "3"]), default="3", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Timed in each round."
)
def main(
    ranks: int, blocks: int, delay: float, forward: float, backward: float, zero: str, rounds: int, steps: int
) -> None:
    """How much of its exchanges a step hides, with every transfer delayed."""
    times = (each / 1e3 for each in (delay, forward, backward))
    setting = Setting(ranks, blocks, *times, zero == "3", rounds, steps)
    seconds, transfers = measure_in_ranks(measure, setting, ranks)
    longest = max(transfers.values()) * delay / 1e3
    bound = max(seconds["compute"], longest)
    table = Table(title=f"ZeRO-{zero}, {ranks} ranks, {blocks} blocks, {delay:g} ms a transfer")
    table.add_column("a step")
    table.add_column("ms", justify="right")
    table.add_column("of the bound", justify="right")
    rows = {
        "compute alone": seconds["compute"],
        f"transfers alone ({transfers['publish']:g} publications beside {transfers['reduce']:g} reductions)": longest,
        "in series": seconds["in series"],
        "overlapped": seconds["overlapped"],
    }
    for name, value in rows.items():
        table.add_row(name, f"{value * 1e3:.1f}", f"{value / bound:.2f}")
    console = Console(highlight=False)
    console.print(table)
    ratio = seconds["overlapped"] / bound
    verdict = "pass" if ratio <= TARGET else "MISS"
    console.print(f"overlapped / max(compute, transfers) = {ratio:.2f}, target {TARGET}: {verdict}")


if __name__ == "__main__":
    main()
