"""A long training that is killed, resumed elsewhere and killed again ends where an undisturbed one does."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from own_models import mesh_of, wrap
from own_processes import run_ranks
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import dmuon

STEPS, ROWS, WIDTH, VOCABULARY, EXPERTS = 300, 12, 12, 16, 3


class Block(nn.Module):
    """An MLP, then for each row one expert or none: a matrix of its own, and one of a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))
        self.stack = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH // 2) / WIDTH**0.5)

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        for k, expert in enumerate(self.experts):
            rows = (route == k).nonzero().flatten()
            if len(rows):
                y = x[rows]
                x = x.index_add(0, rows, expert(y) + y[:, : WIDTH // 2] @ self.stack[k].T)
        return x


class Model(nn.Module):
    """Tokens (rows, time) and routes (rows, blocks) to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, routes: Tensor) -> Tensor:
        x = self.embedding(tokens).mean(1)
        for block, route in zip(self.blocks, routes.T, strict=True):
            x = block(x, route)
        return self.head(self.norm(x))


@dataclass
class Session:
    """One life of the training: ``steps`` more, if it gets so far."""

    ranks: int
    nodes: int
    owned: bool
    reshard: bool
    mirrored: bool  # the owners of another plan
    end: str  # killed in a "step", killed in a "save", or "clean"
    steps: int
    moment: float  # when in the step or the save, as a part of what the last one took


def micro_batches(seed: int, step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """One to three, each of ``ROWS`` rows whatever the ranks are. Three rows in a row use experts or do not."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    for _ in range(1 + int(torch.randint(3, (), generator=generator))):
        tokens = torch.randint(VOCABULARY, (ROWS, 5), generator=generator)
        routes = torch.randint(EXPERTS, (ROWS, 2), generator=generator)
        busy = torch.rand(ROWS // 3, 2, generator=generator) < 0.4
        routes[~busy.repeat_interleave(3, 0)] = -1
        yield tokens[:, :-1], tokens[:, -1], routes


def build(session: Session | None, seed: int) -> tuple[nn.Module, dmuon.Muon, LRScheduler]:
    torch.manual_seed(seed)
    model = Model().double()
    if session is not None and session.owned:
        names = [routing.name for routing in dmuon.MatrixPolicy().route_model(model) if routing.matrices]
        mirrored = {name: k % session.ranks for k, name in enumerate(reversed(names))}
        plan = mirrored if session.mirrored else None
        wrap(model, mesh_of(session.nodes), plan=plan, reshard_after_forward=session.reshard)
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=3e-3, weight_decay=0.1, precision="fp64")
    return model, optimizer, CosineAnnealingLR(optimizer, STEPS)


def train_step(
    model: nn.Module, optimizer: dmuon.Muon, seed: int, step: int, session: Session | None = None
) -> None:
    rank, ranks = (dist.get_rank(), session.ranks) if session else (0, 1)
    owned = session is not None and session.owned
    chance = random.Random(f"{seed} {step}")
    sync_all, clipped, evaluated = chance.random() < 0.5, chance.random() < 0.3, chance.random() < 0.1
    part = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    batches = list(micro_batches(seed, step))
    for k, (tokens, targets, routes) in enumerate(batches):
        if owned:
            dmuon.set_requires_gradient_sync(model, sync_all or k == len(batches) - 1)
        F.cross_entropy(model(tokens[part], routes[part]), targets[part]).backward()
        if evaluated:
            with torch.no_grad():
                model(tokens[part], routes[part])
    if clipped and owned:
        dmuon.clip_grad_norm_(model, 0.5)
    elif clipped:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def live(folder: str, seed: int, session: Session) -> None:
    """Resume, train, save now and then, and be killed perhaps."""
    rank = dist.get_rank()
    pids: list[int] = [0] * session.ranks
    dist.all_gather_object(pids, os.getpid())
    # Other weights than the training began with, lest loading nothing go unseen.
    first = not Path(folder, "begun").exists()
    model, optimizer, schedule = build(session, seed if first else seed + 50)
    step = 0
    if not first:
        extra = dmuon.load_checkpoint(f"{folder}/last", model, optimizer)
        schedule.load_state_dict(extra["schedule"])
        step = extra["step"]

    def save() -> float:
        start = time.monotonic()
        if rank == 0:
            Path(folder, "saving").touch()
        extra = {"step": step, "schedule": schedule.state_dict()}
        dmuon.save_checkpoint(f"{folder}/last", model, optimizer, extra=extra)
        if rank == 0:
            Path(folder, "saving").unlink()
        return time.monotonic() - start

    def kill_all() -> None:
        for pid in (*(pid for pid in pids if pid != os.getpid()), os.getpid()):
            os.kill(pid, signal.SIGKILL)

    save_seconds, step_seconds = save(), 0.0
    if first and rank == 0:
        Path(folder, "begun").touch()
    for lived in itertools.count():
        if step == STEPS or (lived == session.steps and session.end == "clean"):
            break
        if lived == session.steps:
            seconds = step_seconds if session.end == "step" else save_seconds
            if rank == 0:
                threading.Timer(session.moment * seconds, kill_all).start()
            while session.end == "save":
                save()
        start = time.monotonic()
        train_step(model, optimizer, seed, step, session)
        schedule.step()
        step += 1
        step_seconds = time.monotonic() - start
        if random.Random(f"{seed} save {step}").random() < 0.08:
            save_seconds = save()
    save()


def sessions(seed: int) -> Iterator[Session]:
    """Each kind of world, and each end, in every few sessions: by turns, in random order."""
    chance = random.Random(seed)
    worlds = [(4, 1), (4, 1), (4, 2), (3, 1), (2, 1), (1, 1), (1, 0)]  # ranks, nodes
    ends = ["step", "step", "save", "save", "clean"]
    some_worlds: list[tuple[int, int]] = []
    some_ends: list[str] = []
    while True:
        some_worlds = some_worlds or chance.sample(worlds, len(worlds))
        some_ends = some_ends or chance.sample(ends, len(ends))
        ranks, nodes = some_worlds.pop()
        yield Session(
            ranks=ranks,
            nodes=nodes,
            owned=nodes > 0,
            reshard=chance.random() < 0.5,
            mirrored=chance.random() < 0.5,
            end=some_ends.pop(),
            steps=chance.randint(20, 60),
            moment=chance.random(),
        )


def undisturbed(seed: int) -> tuple[nn.Module, dmuon.Muon]:
    model, optimizer, schedule = build(None, seed)
    for step in range(STEPS):
        train_step(model, optimizer, seed, step)
        schedule.step()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: dmuon.Muon) -> dict[str, Tensor]:
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return found


@pytest.mark.slow
@pytest.mark.case(row="A3")
@pytest.mark.case(row="A7")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_long_training_that_is_killed_and_resumed_elsewhere(seed: int, tmp_path: Path) -> None:
    killed = {"step": 0, "save": 0}
    for count, session in enumerate(sessions(seed)):
        assert count < 25, "it does not come to an end"
        try:
            run_ranks(session.ranks, live, str(tmp_path), seed, session)
        except AssertionError as error:
            # Those that are killed a moment later may still report that the others are gone.
            assert "rank 0: died" in str(error), error
            killed["save" if (tmp_path / "saving").exists() else "step"] += 1
            (tmp_path / "saving").unlink(missing_ok=True)
        model, optimizer, _ = build(None, seed + 99)
        if dmuon.load_checkpoint(tmp_path / "last", model, optimizer)["step"] == STEPS:
            break
    assert min(killed.values()) > 0
    found, expected = tensors_of(model, optimizer), tensors_of(*undisturbed(seed))
    assert found.keys() == expected.keys()
    worst = max((found[name] - expected[name]).abs().max().item() for name in expected)
    assert worst < 1e-10
