"""Exchanges of several legs: beside the caller, in order, and ended by what fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
from own_models import mesh_of
from own_processes import outcome, run_ranks
from torch import Tensor

from dmuon.ownership.two_level import StreamChain, ThreadChain, TwoLevelRoutes


def test_legs_that_fail_surface_and_end_those_after_them() -> None:
    chain, ran = ThreadChain(2), []

    def fail(x: Tensor) -> Tensor:
        raise ValueError("a leg broke")

    def note(x: Tensor) -> Tensor:
        ran.append(x.item())
        return x + 1

    good = chain.run([note, note], torch.tensor(1))
    bad = chain.run([note, fail], torch.tensor(10))
    late = chain.run([note, note], torch.tensor(20))
    assert good.wait() == 3
    assert outcome(bad.wait) == "ValueError: a leg broke"
    assert outcome(late.wait) == "RuntimeError: an earlier exchange has failed: a leg broke"
    assert bad.done and late.done and 21 not in ran
    assert outcome(ThreadChain(2).run([fail, note], torch.tensor(30)).wait) == "ValueError: a leg broke"


def test_a_first_leg_does_not_wait_for_earlier_second_legs() -> None:
    chain, begun = ThreadChain(2), Event()

    def begin(x: Tensor) -> Tensor:
        begun.set()
        return x

    def wait(x: Tensor) -> Tensor:
        assert begun.wait(20)
        return x

    first = chain.run([lambda x: x, wait], torch.tensor(1))
    second = chain.run([begin, lambda x: x], torch.tensor(2))
    assert (first.wait(), second.wait()) == (1, 2)


def a_rank_dies(kind: str) -> None:
    routes = TwoLevelRoutes(mesh_of(2))
    if dist.get_rank() == 3:
        os._exit(1)
    for _ in range(3):
        getattr(routes, kind)(torch.zeros(8), [2] * 4).wait()


@pytest.mark.parametrize("kind", ["publish", "reduce"])
def test_a_rank_that_dies_ends_the_legs_of_all(kind: str) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(4, a_rank_dies, kind)
    text = str(caught.value)
    assert "rank 3: died" in text and text.count("RuntimeError") >= 3, text


EXIT = """
import sys, time, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from dmuon.ownership.two_level import TwoLevelRoutes
rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
routes = TwoLevelRoutes(init_device_mesh("cpu", (2, 1)))
if how == "leave":
    for _ in range(3):
        pending = routes.publish(torch.zeros(100000), [50000] * 2), routes.reduce(torch.zeros(8), [4] * 2)
elif rank == 0:
    routes.publish(torch.zeros(8), [4] * 2)
    raise ValueError("the script's own")
else:
    time.sleep(3600)
"""


def run_script(tmp_path: Path, how: str) -> tuple[list[subprocess.Popen[str]], str]:
    """Two processes of EXIT; both, and what the first wrote to stderr before it ended."""
    (tmp_path / "script.py").write_text(EXIT)
    command = [sys.executable, str(tmp_path / "script.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), how],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        _, errors = ranks[0].communicate(timeout=120)
        if how == "leave":
            errors += ranks[1].communicate(timeout=120)[1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return ranks, errors


@pytest.mark.slow
def test_legs_under_way_end_with_the_script(tmp_path: Path) -> None:
    ranks, errors = run_script(tmp_path, "leave")
    assert [rank.returncode for rank in ranks] == [0, 0] and "Error" not in errors, errors


@pytest.mark.slow
def test_a_script_that_fails_ends_while_legs_wait_for_others(tmp_path: Path) -> None:
    ranks, errors = run_script(tmp_path, "fail")
    assert ranks[0].returncode != 0 and "ValueError: the script's own" in errors


class Stream:
    """Stands in for torch.cuda.Stream: notes what it waits for."""

    names = iter("abcdefgh")

    def __init__(self, log: list[str]) -> None:
        self.name, self.log = next(self.names), log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        return f"what {self.name} has"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_on_streams_legs_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    current = [Stream(log)]

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)

    def leg(x: Tensor) -> Tensor:
        log.append(f"{current[-1].name} runs on {x.item()}")
        return x + 1

    pending = StreamChain(2).run([leg, leg], torch.tensor(1))
    assert pending.wait() == 3 and [x.item() for x in pending.buffers] == [1, 2, 3]
    assert log == [
        "b waits for a", "b waits for what a has", "b runs on 1",
        "c waits for a", "c waits for what b has", "c runs on 2",
        "a waits for what c has",
    ]  # fmt: skip
