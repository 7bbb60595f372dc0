"""One rank of bench/network.py: times flat and two-level routes in turn. Started by it, inside a node's namespace."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dmuon.ownership.routes import FlatRoutes, Routes
from dmuon.ownership.two_level import TwoLevelRoutes


def crossed() -> int:
    """Bytes that this node's end of the link has sent and received so far."""
    counters = Path("/sys/class/net/link0/statistics")
    return sum(int((counters / name).read_text()) for name in ("tx_bytes", "rx_bytes"))


def measured(run: Callable[[], object]) -> tuple[float, int]:
    """Seconds of ``run``, on the rank that takes longest, and bytes that cross the link meanwhile."""
    dist.barrier()
    start, before = time.perf_counter(), crossed()
    run()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item(), crossed() - before


def exchanges(routes: Routes, elements: int) -> dict[str, Callable[[], object]]:
    """A publication and a reduction of one bucket of which every rank owns as much."""
    sizes = [elements // routes.size] * routes.size
    flat = torch.zeros(sum(sizes))
    return {
        "publish": lambda: routes.publish(flat, sizes).wait(),
        "reduce": lambda: routes.reduce(flat, sizes).wait(),
    }


def main(rank: int, nodes: int, ranks_per_node: int, elements: int, rounds: int, folder: Path) -> None:
    torch.set_num_threads(1)
    size = nodes * ranks_per_node
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    routes: dict[str, Routes] = {
        "flat": FlatRoutes(init_device_mesh("cpu", (size,))),
        "two levels": TwoLevelRoutes(init_device_mesh("cpu", (nodes, ranks_per_node))),
    }
    runs = {
        f"{kind}, {name}": run
        for name, each in routes.items()
        for kind, run in exchanges(each, elements).items()
    }
    publishing, reducing = routes["flat"].levels["flat"]
    sizes, flat = [elements // size] * size, torch.zeros(elements)
    for way in ("broadcast", "all_gather", "all_to_all"):
        runs[f"publish, flat by {way}"] = lambda way=way: publishing.publish(flat, sizes, way).wait()
    for way in ("all_to_all", "reduce", "reduce_scatter"):
        runs[f"reduce, flat by {way}"] = lambda way=way: reducing.reduce(flat, sizes, way).wait()
    intra, inter = (routes["two levels"].levels[level][0] for level in ("intra", "inter"))
    for name, exchange in (("local", intra), ("link", inter)):
        parts = [elements, *[0] * (exchange.size - 1)]
        # One rank of a node alone, else several share the link.
        alone = name == "local" or rank % ranks_per_node == 0
        runs[name] = lambda e=exchange, p=parts, alone=alone: alone and e.publish(flat, p, "broadcast").wait()
    samples: dict[str, list[tuple[float, int]]] = {name: [] for name in runs}
    for done in range(rounds + 1):
        for name, run in runs.items():
            sample = measured(run)
            if done:  # the first round warms up
                samples[name].append(sample)
    if rank == 0:
        result = {name: tuple(map(median, zip(*each, strict=True))) for name, each in samples.items()}
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    # Some builds abort now and then when the interpreter ends with gloo loaded.
    os._exit(0)


if __name__ == "__main__":
    *numbers, where = sys.argv[1:]
    main(*map(int, numbers), Path(where))
