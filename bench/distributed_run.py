"""The measurement of ``distributed.py``: every contender in the same processes, round by round in turn."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from distributed_contenders import ADAMW, ITERATION, OURS, VOCABULARY, Contender, make_contenders
from distributed_traffic import count
from ranks import measure_in_ranks
from timing import interleave
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dmuon.kernels import gram_ns

WARM_UP, TOLERANCE = 3, 2e-3
NEWTON_SCHULZ = "Newton-Schulz of the busiest owner"


@dataclass(frozen=True)
class Setting:
    """``rows`` × ``time`` tokens a rank and step; each of ``rounds`` times ``steps`` steps in a row."""

    ranks: int
    width: int
    layers: int
    rows: int
    time: int
    rounds: int
    steps: int
    device: str


@dataclass
class Measured:
    """By contender, of the slowest rank: milliseconds a step, in every round; bytes a step and rank by kind.

    ``newton_schulz``: milliseconds that the busiest owner cannot do without. ``waits``, ``phases``: of our step, by
    kind, in milliseconds a step; ``gap``: of our plan.
    """

    total_ms: dict[str, list[float]] = field(default_factory=dict)
    optimizer_ms: dict[str, list[float]] = field(default_factory=dict)
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)
    held_bytes: dict[str, int] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    newton_schulz_ms: list[float] = field(default_factory=list)
    waits_ms: dict[str, float] = field(default_factory=dict)
    phases_ms: dict[str, float] = field(default_factory=dict)
    gap: float = 0.0


def measure_in_processes(setting: Setting) -> Measured:
    """Spawn the ranks, and what rank 0 returns of them.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed.
    """
    measured: Measured = measure_in_ranks(_rank, setting, setting.ranks)
    return measured


def _rank(rank: int, setting: Setting, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    if setting.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if setting.device == "cuda" else "gloo"
    dist.init_process_group(
        backend, f"file://{store}", rank=rank, world_size=setting.ranks, timeout=timedelta(minutes=5)
    )
    measured = _measure(setting, torch.Generator().manual_seed(rank))
    if rank == 0:
        results.put(measured)
    dist.barrier()
    dist.destroy_process_group()


def _measure(setting: Setting, generator: torch.Generator) -> Measured:
    mesh = init_device_mesh(setting.device, (setting.ranks,))
    contenders = make_contenders(mesh, setting.width, setting.layers, setting.device)
    measured, (*shape,) = Measured(), (setting.rows, setting.time + 1)
    first = torch.randint(VOCABULARY, shape, generator=generator).to(setting.device)
    for name, contender in contenders.items():
        measured.losses[name] = [_mean(_step(contender, first)) for _ in range(WARM_UP)]
        measured.traffic[name] = dict(count(lambda contender=contender: _step(contender, first)).bytes)
        measured.held_bytes[name] = int(_largest([contender.held_bytes()], setting.device)[0])
    _check(measured.losses)

    optimizer_ms: dict[str, list[float]] = defaultdict(list)

    def sampler(name: str) -> Callable[[], float]:
        def sample() -> float:
            batches = torch.randint(VOCABULARY, (setting.steps, *shape), generator=generator)
            total, optimizer = _time(contenders[name], batches.to(setting.device), setting.device)
            optimizer_ms[name].append(optimizer)
            return total

        return sample

    ours = contenders[OURS].owned
    ours.statistics.reset()
    samplers = {name: sampler(name) for name in contenders}
    samplers[NEWTON_SCHULZ] = _newton_schulz(list(ours.masters.values()), setting)
    measured.total_ms = interleave(samplers, setting.rounds, math.inf, setting.rounds)
    measured.newton_schulz_ms = measured.total_ms.pop(NEWTON_SCHULZ)
    measured.optimizer_ms = dict(optimizer_ms)
    measured.gap = ours.plan.gap
    measured.waits_ms, measured.phases_ms = _bounds(ours, setting)
    return measured


def _step(contender: Contender, tokens: Tensor) -> Tensor:
    loss = contender.forward_backward(tokens)
    contender.step()
    return loss


def _time(contender: Contender, batches: Tensor, device: str) -> tuple[float, float]:
    """Milliseconds a step, and of it in the optimizer, on the rank that takes longest for each."""
    dist.barrier()
    marks = [_mark(device)]
    for tokens in batches:
        contender.forward_backward(tokens)
        marks.append(_mark(device))
        contender.step()
        marks.append(_mark(device))
    dist.barrier()
    marks.append(_mark(device))
    optimizer = sum(_between(*marks[k : k + 2]) for k in range(1, len(marks) - 1, 2))
    total, optimizer = _largest([_between(marks[0], marks[-1]), optimizer], device)
    return total / len(batches), optimizer / len(batches)


def _newton_schulz(masters: list[Tensor], setting: Setting) -> Callable[[], float]:
    """Times what this rank orthogonalises in a step, and nothing else."""
    shapes = [master.shape for master in masters]
    stacks = [
        torch.randn(shapes.count(shape), *shape, device=setting.device) for shape in dict.fromkeys(shapes)
    ]

    def sample() -> float:
        dist.barrier()
        start = _mark(setting.device)
        for stack in stacks:
            gram_ns(stack, **ITERATION)
        return _largest([_between(start, _mark(setting.device))], setting.device)[0]

    sample()
    return sample


def _bounds(owned: Any, setting: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """Waits by kind, and phases, in milliseconds a step on the rank that has most of each."""
    figures, scale = owned.statistics.as_dict(), 1e3 / (setting.rounds * setting.steps)
    waits = dict.fromkeys(("publish", "reduce"), 0.0)
    for wait in figures["waits"]:
        waits[wait["kind"]] += wait["seconds"] * scale
    phases = {name: tally["seconds"] * scale for name, tally in figures["phases"].items()}
    most = _largest([*waits.values(), *phases.values()], setting.device)
    names = [*waits, *phases]
    every = dict(zip(names, most, strict=True))
    return {name: every[name] for name in waits}, {name: every[name] for name in phases}


def _check(losses: dict[str, list[float]]) -> None:
    """All Muons have to train alike.

    Raises:
        RuntimeError: they do not, so that comparing them says nothing.
    """
    for name, values in losses.items():
        difference = max(abs(a - b) / b for a, b in zip(values, losses[OURS], strict=True))
        if name != ADAMW and difference > TOLERANCE:
            raise RuntimeError(f"{name} does not train as {OURS} does: losses {values} and {losses[OURS]}")


def _mean(loss: Tensor) -> float:
    value = loss.clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def _largest(values: list[float], device: str) -> list[float]:
    """Each value's maximum over the ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(value) for value in tensor]


def _mark(device: str) -> Any:
    """A point in time: of the host, or on CUDA of the current stream."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, stop: Any) -> float:
    """Milliseconds from one mark to another."""
    if isinstance(start, float):
        return (stop - start) * 1e3
    stop.synchronize()
    elapsed: float = start.elapsed_time(stop)
    return elapsed
