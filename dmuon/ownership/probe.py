"""What exchanges take between the ranks of a mesh: measured on request, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmuon.kernels.choose import device_key
from dmuon.ownership.control import Control
from dmuon.ownership.exchange import Exchange, Transfer
from dmuon.ownership.link_costs import GroupCosts, LinkCosts, publication_loads, reduction_loads
from dmuon.ownership.routes import LANES, FlatRoutes, Grid, Routes
from dmuon.ownership.two_level import TwoLevelRoutes
from dmuon.tuning_cache.files import replace_file
from dmuon.tuning_cache.paths import default_path

SMALL, LARGE, ROUNDS = 2**14, {"cpu": 2**22, "cuda": 2**26}, 5
"""Bytes of the two exchanges that are timed, and how often each is."""


def make_routes(
    mesh: DeviceMesh,
    costs: Mapping[str, GroupCosts] | None = None,
    lanes: int = LANES,
    timeout: timedelta | None = None,
    grids: Sequence[Grid] | None = None,
) -> Routes:
    """The routes of a mesh of one dimension, or of two. Collective."""
    kind = FlatRoutes if mesh.ndim == 1 else TwoLevelRoutes
    return kind(mesh, costs, lanes, timeout, grids)


def measure_network(mesh: DeviceMesh) -> dict[str, GroupCosts]:
    """Time every way of exchange on every level of ``mesh``, and keep the result for later runs. Collective.

    It takes seconds. From then on, :func:`dmuon.own` on an equal mesh (the same devices, the same number of ranks on
    as many hosts) chooses by these times; without, by assumptions. Rank 0 keeps them, beside the tuning store
    (``DMUON_CACHE``).

    Args:
        mesh: as for :func:`dmuon.own`.

    Returns:
        Level ("flat", or "intra" and "inter") → what each way takes, equal on all ranks. A level of one rank has none.

    Raises:
        ValueError: the mesh does not hold all ranks.
    """
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"mesh must hold all {dist.get_world_size()} ranks, got {mesh.size()}: beside a tensor-parallel axis, "
            "exchanges go by assumptions"
        )
    control = Control(mesh.mesh.flatten().tolist())
    routes = make_routes(mesh, lanes=1)
    costs = {
        level: GroupCosts(
            publish=_measure(publishing, publishing.publish, publication_loads, mesh.device_type, control),
            reduce=_measure(reducing, reducing.reduce, reduction_loads, mesh.device_type, control),
        )
        for level, (publishing, reducing) in routes.levels.items()
        if publishing.size > 1
    }
    for publishing, reducing in routes.levels.values():
        dist.destroy_process_group(publishing.group)
        dist.destroy_process_group(reducing.group)
    topology = _topology(mesh, control)
    if routes.rank == 0:
        _keep(topology, costs)
    return costs


def known_network(mesh: DeviceMesh, control: Control) -> dict[str, GroupCosts]:
    """What :func:`measure_network` has kept for such a mesh on rank 0's host; empty if nothing. Collective."""
    topology = _topology(mesh, control)
    known: dict[str, GroupCosts] = control.from_first(_kept(topology) if dist.get_rank() == 0 else None)
    return known


def _measure(
    exchange: Exchange,
    run: Callable[..., Transfer],
    loads: Callable[[Sequence[int]], dict[str, tuple[int, int]]],
    device_type: str,
    control: Control,
) -> dict[str, LinkCosts]:
    sizes = [[nbytes // exchange.size // 4] * exchange.size for nbytes in (SMALL, LARGE[device_type])]
    small, large = (loads([4 * size for size in each]) for each in sizes)
    return {
        way: fit(
            [(small[way], large[way])[k] for k in range(2)],
            [_seconds(exchange, run, way, each, device_type, control) for each in sizes],
        )
        for way in small
    }


def _seconds(
    exchange: Exchange,
    run: Callable[..., Transfer],
    way: str,
    sizes: Sequence[int],
    device_type: str,
    control: Control,
) -> float:
    """The median time of one exchange, of the slowest rank of all."""
    flat = torch.zeros(sum(sizes), device=device_type)
    taken = []
    for _ in range(ROUNDS + 1):
        dist.barrier(group=exchange.group)
        start = time.perf_counter()
        run(flat, sizes, way).wait()
        if device_type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    # The first one warms up.
    (slowest,) = control.largest([round(median(taken[1:]) * 1e9)])
    return slowest / 1e9


def fit(loads: Sequence[tuple[int, int]], seconds: Sequence[float]) -> LinkCosts:
    """The costs that explain two exchanges of (calls, bytes), as far as none gets negative."""
    (calls, small), (_, large) = loads
    beta = max(0.0, (seconds[1] - seconds[0]) / (large - small))
    return LinkCosts(max(0.0, seconds[0] - beta * small) / calls, beta)


def _topology(mesh: DeviceMesh, control: Control) -> dict[str, Any]:
    """What costs depend on, as rank 0 sees it."""
    hosts = Counter(control.gather(socket.gethostname()))
    return {
        "device": device_key(mesh.device_type),
        "backend": dist.get_backend(),
        "torch": torch.__version__,
        "mesh": list(mesh.shape),
        "ranks on each host": sorted(hosts.values()),
    }


def _path(topology: Mapping[str, Any]) -> Path:
    text = json.dumps(topology, sort_keys=True)
    return default_path().parent / "network" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _keep(topology: dict[str, Any], costs: Mapping[str, GroupCosts]) -> None:
    path = _path(topology)
    document = {"topology": topology, "levels": {level: asdict(each) for level, each in costs.items()}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{json.dumps(document, indent=1)}\n".encode())
    except OSError as error:
        warnings.warn(f"what the network takes could not be kept for later runs: {error}", stacklevel=3)


def _kept(topology: Mapping[str, Any]) -> dict[str, GroupCosts]:
    path = _path(topology)
    try:
        levels = json.loads(path.read_text(encoding="utf-8"))["levels"]
        return {
            level: GroupCosts(
                **{
                    kind: {way: LinkCosts(**costs) for way, costs in ways.items()}
                    for kind, ways in kinds.items()
                }
            )
            for level, kinds in levels.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"{path} is left aside: {error!r}", stacklevel=3)
        return {}
