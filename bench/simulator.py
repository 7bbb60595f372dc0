"""The simulator against reality: rates measured here, a step predicted from them, and the same step timed.

    python bench/simulator.py --ranks 4
    python bench/simulator.py --quick          # does it run?

Everything happens in the same processes, one thread each: what products, elementwise work, Newton–Schulz batches and
collectives take with all ranks at it at once; then steps of FSDP2 with AdamW and of DMuon, by turns. README.md, next to
this file, explains the table.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist
from ranks import measure_in_ranks
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.autotune import Cost
from dmuon.batching import batch_sizes
from dmuon.kernels.gram_ns import gram_ns
from dmuon.models import ModelShapes
from dmuon.ownership.link_costs import GroupCosts, LinkCosts
from dmuon.ownership.probe import measure_network
from dmuon.planner import items_of, plan_of_owners
from dmuon.planner.costs import AROUND_BYTES
from dmuon.simulator import (
    Cluster,
    Link,
    Machine,
    MachineCosts,
    Network,
    Scenario,
    plan_for,
    simulate,
    workload_of,
)

TARGET = 0.25
"""By how much a simulated step may differ from the measured one."""

STRATEGIES = ("adamw", "planned")


@dataclass(frozen=True)
class Setting:
    ranks: int
    width: int
    blocks: int
    tokens: int
    rounds: int
    steps: int


class Block(nn.Module):
    """Two products around a residual, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Rates:
    """What things take on this machine while all ranks do them at once: medians of samples taken round by round."""

    def __init__(self, setting: Setting, mesh: DeviceMesh) -> None:
        width, tokens = setting.width, setting.tokens
        x, y, weight = (
            torch.randn(tokens, width),
            torch.randn(tokens, 4 * width),
            torch.randn(4 * width, width),
        )

        def products() -> None:
            x @ weight.T  # forward, and the two of the backward
            y @ weight
            y.T @ x

        one, other = torch.zeros(2, 2**22)
        counts = range(1, setting.blocks + 1)
        shapes = ((4 * width, width), (width, 4 * width))
        batches = {(*shape, size) for shape in shapes for n in counts for size in batch_sizes(n, *shape)}
        self._runs: dict[Any, Callable[[], object]] = {
            "products": products,
            "memory": lambda: one.copy_(other),
            **{batch: _iteration(*batch) for batch in sorted(batches)},
        }
        self._operations, self._bytes = 3 * 2 * tokens * 4 * width**2, 2 * 4 * one.numel()
        self._mesh = mesh
        self._seconds: dict[Any, list[float]] = {name: [] for name in self._runs}
        self._networks: list[GroupCosts] = []

    def sample(self) -> None:
        """Time everything once. Collective."""
        for name, run in self._runs.items():
            self._seconds[name].append(seconds_of(run))
        self._networks.append(measure_network(self._mesh)["flat"])

    def products(self) -> float:
        """Operations a second."""
        return self._operations / median(self._seconds["products"])

    def memory(self) -> float:
        """Bytes a second."""
        return self._bytes / median(self._seconds["memory"])

    def batches(self) -> dict[tuple[int, int, int], float]:
        """(rows, cols, size) → seconds of Newton–Schulz."""
        return {name: median(each) for name, each in self._seconds.items() if isinstance(name, tuple)}

    def network(self) -> GroupCosts:
        """What each way of exchange takes."""

        def middle(ways: Callable[[GroupCosts], Mapping[str, LinkCosts]]) -> dict[str, LinkCosts]:
            every = [ways(each) for each in self._networks]
            return {
                way: LinkCosts(
                    median(each[way].alpha_s for each in every),
                    median(each[way].beta_s_per_byte for each in every),
                )
                for way in every[0]
            }

        return GroupCosts(middle(lambda each: each.publish), middle(lambda each: each.reduce))


def seconds_of(run: Callable[[], object], times: int = 1) -> float:
    """Of one run, when all ranks do it at once, to the end of the last."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        run()
    dist.barrier()
    return (time.perf_counter() - start) / times


def _iteration(rows: int, cols: int, size: int) -> Callable[[], object]:
    stack = torch.randn(size, rows, cols)
    return lambda: gram_ns(stack, precision="fp32", out=stack)


class MeasuredCosts(MachineCosts):
    """Newton–Schulz as it was timed."""

    def __init__(self, machine: Machine, batches: Mapping[tuple[int, int, int], float]) -> None:
        super().__init__(machine, "fp32")
        self.batches = batches

    def cost(self, rows: int, cols: int, batch: int) -> Cost:
        around = batch * rows * cols * AROUND_BYTES / self.machine.memory_rate
        return Cost(1e3 * (self.batches[rows, cols, batch] + around), "measured")


def scenario_of(setting: Setting, rates: Rates) -> Scenario:
    """The setting as the simulator sees it, on the machine that was measured."""
    unused = Link(1.0, 0.0)
    machine = Machine(
        name="this machine",
        device="cpu",
        ranks_per_node=setting.ranks,
        memory=1e12,
        peak={"fp32": rates.products()},
        training=1.0,
        products=1.0,
        memory_rate=rates.memory(),
        launch=0.0,
        call=0.0,
        inside=unused,
        across=unused,
        overlaps=False,
        sources={},
    )
    with torch.device("meta"):
        model = nn.Sequential(*(Block(setting.width) for _ in range(setting.blocks)))
    shapes = ModelShapes("mlp", "bench", tuple(dmuon.MatrixPolicy().route_model(model)))
    return Scenario(
        workload_of(shapes),
        Network(Cluster(machine, setting.ranks), itemsize=4, measured=rates.network()),
        MeasuredCosts(machine, rates.batches()),
        setting.tokens,
        compute="fp32",
    )


def trainer(
    strategy: str, setting: Setting, mesh: DeviceMesh, owners: Mapping[str, int]
) -> Callable[[], None]:
    """One step of training, as users would write it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(setting.width) for _ in range(setting.blocks)))
    owned = dmuon.own(model, mesh, plan=owners) if strategy == "planned" else None
    ignored = owned.params if owned else set()
    for block in model:
        fully_shard(block, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    muon = owned is not None
    optimizer = dmuon.Muon(model) if muon else torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(setting.tokens, setting.width)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rank: int, setting: Setting, store: str, results: Any) -> None:
    """One rank of the bench; puts the document of all into ``results`` on rank 0."""
    os.environ["DMUON_CACHE"] = f"{store}.cache"  # nothing of this is for later runs
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=setting.ranks, timeout=timedelta(seconds=300)
    )
    mesh = init_device_mesh("cpu", (setting.ranks,))
    rates = Rates(setting, mesh)
    rates.sample()
    plan = plan_for(scenario_of(setting, rates), "planned")
    # Ranks time alike, not equal: the first one's plan is everyone's.
    shared = [{name: ranks[0] for name, ranks in plan.owners.items()}]
    dist.broadcast_object_list(shared)
    owners = shared[0]
    steps = {strategy: trainer(strategy, setting, mesh, owners) for strategy in STRATEGIES}
    for step in steps.values():
        step()
    samples: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    # By turns, so that a machine that slows down does so for both sides.
    for _ in range(setting.rounds):
        rates.sample()
        for strategy, step in steps.items():
            samples[strategy].append(seconds_of(step, setting.steps))
    scenario = scenario_of(setting, rates)
    given = {
        "planned": plan_of_owners(owners, items_of(scenario.workload.owned), setting.ranks, scenario.costs)
    }
    simulations = {strategy: simulate(scenario, strategy, given.get(strategy)) for strategy in STRATEGIES}
    if rank == 0:
        results.put(
            {
                "setting": asdict(setting),
                "products_per_s": rates.products(),
                "memory_bytes_per_s": rates.memory(),
                "batches_s": [[*key, seconds] for key, seconds in rates.batches().items()],
                "network": asdict(rates.network()),
                "steps": [
                    {
                        "strategy": strategy,
                        "simulated_s": found.step,
                        "computed_s": found.compute,
                        "waiting_s": found.waiting,
                        "measured_s": median(samples[strategy]),
                        "samples_s": samples[strategy],
                    }
                    for strategy, found in simulations.items()
                ],
            }
        )
    dist.barrier()
    dist.destroy_process_group()


@click.command()
@click.option("--ranks", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--width", type=click.IntRange(min=8), default=384, show_default=True, help="Of a block.")
@click.option("--blocks", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=384, show_default=True, help="Of a rank.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Timed in a round.")
@click.option("--quick", is_flag=True, help="Does it run? Two ranks, a small model.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(__file__).parent / "results",
    show_default=True,
    help="Folder of the JSON file.",
)
def main(
    ranks: int, width: int, blocks: int, tokens: int, rounds: int, steps: int, quick: bool, out: Path
) -> None:
    """Compare simulated steps with measured ones."""
    setting = Setting(ranks, width, blocks, tokens, rounds, steps)
    setting = Setting(2, 64, 2, 64, 2, 1) if quick else setting
    document: dict[str, Any] = measure_in_ranks(measure, setting, setting.ranks)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"simulator-cpu-{datetime.now():%Y-%m-%d-%H%M%S}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console = Console(highlight=False)
    console.print(table_of(document))
    console.print(f"Wrote {path}.")


def table_of(document: Mapping[str, Any]) -> Table:
    """A row for each strategy, with its verdict."""
    setting = document["setting"]
    table = Table(title=f"{setting['ranks']} ranks, {setting['blocks']} blocks of width {setting['width']}")
    for name in ("a step", "simulated ms", "measured ms", "simulated / measured", f"within {TARGET:.0%}"):
        table.add_column(name, justify="left" if name == "a step" else "right")
    for row in document["steps"]:
        ratio = row["simulated_s"] / row["measured_s"]
        verdict = "pass" if abs(ratio - 1) <= TARGET else "MISS"
        times = (f"{1e3 * row[key]:.1f}" for key in ("simulated_s", "measured_s"))
        table.add_row(row["strategy"], *times, f"{ratio:.2f}", verdict)
    return table


if __name__ == "__main__":
    main()
