"""Checkpoints where the disk is full or read-only, where processes are killed, and where several jobs meet."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, build, mesh_of, wrap
from own_processes import outcome, run_ranks
from own_sessions import train
from torch import nn

import dmuon
from dmuon.ownership import checkpoint_files, checkpoint_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits, mounts and locks as Linux has them")

_context = multiprocessing.get_context("forkserver")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def filled(value: float, width: int = 16) -> nn.Module:
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def value_of(path: Path, width: int = 16) -> float:
    """The one value that all weights and ``extra`` of the checkpoint have."""
    model = filled(-1.0, width)
    extra = dmuon.load_checkpoint(path, model)
    values = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    assert values == {extra["value"]}
    return float(extra["value"])


def test_a_full_disk_keeps_the_checkpoint_before(disk: Path) -> None:
    path = disk / "run"
    dmuon.save_checkpoint(path, filled(1.0), extra={"value": 1.0})
    with pytest.raises(OSError, match=r"No space left on device.*run\.partial") as failure:
        dmuon.save_checkpoint(path, filled(2.0, width=400), extra={"value": 2.0})
    assert failure.value.errno == errno.ENOSPC and len(str(failure.value)) < 200
    assert [entry.name for entry in disk.iterdir()] == ["run"] and value_of(path) == 1.0
    dmuon.save_checkpoint(path, filled(3.0), extra={"value": 3.0})
    assert value_of(path) == 3.0


def test_a_read_only_disk_keeps_the_checkpoint_before(disk: Path) -> None:
    path = disk / "run"
    dmuon.save_checkpoint(path, filled(1.0), extra={"value": 1.0})
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(OSError, match="Read-only file system") as failure:
        dmuon.save_checkpoint(path, filled(2.0), extra={"value": 2.0})
    assert failure.value.errno == errno.EROFS
    assert [entry.name for entry in disk.iterdir()] == ["run"] and value_of(path) == 1.0


def save_beyond_the_limit(path: str, limited: int) -> dict[str, str]:
    """Saves, first with what is owned too large for the disk of rank ``limited``, then only ``extra``, then all."""
    model = build(seed=3)
    wrap(model, mesh_of())
    optimizer = dmuon.Muon(model, **HOW)
    dmuon.save_checkpoint(path, model, optimizer, extra={"step": 0})
    train(model, optimizer, range(1), dist.get_rank(), dist.get_world_size())
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    found = {}
    for what, size in (("tensors", 1 << 10), ("extra", 1 << 20)):
        if dist.get_rank() == limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
        extra = {"step": 1, "large": torch.zeros(1 << 19)}
        found[what] = outcome(lambda: dmuon.save_checkpoint(path, model, optimizer, extra=extra))  # noqa: B023
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        dist.barrier()  # the first rank removes what was written
        found[f"{what} left"] = " ".join(entry.name for entry in Path(path).parent.iterdir())
        other = build(seed=5)
        wrap(other, mesh_of())
        found[f"{what} loaded"] = str(dmuon.load_checkpoint(path, other))
    dmuon.save_checkpoint(path, model, optimizer, extra={"step": 1})
    return found


@pytest.mark.parametrize("limited", [0, 1])
def test_a_rank_that_cannot_write_fails_on_all(limited: int, tmp_path: Path) -> None:
    every = run_ranks(2, save_beyond_the_limit, str(tmp_path / "run"), limited)
    for rank, found in enumerate(every):
        here = (
            "OSError: "
            if rank == limited
            else f"RuntimeError: save_checkpoint failed on rank {limited}: OSError: "
        )
        for what in ("tensors", "extra") if limited == 0 else ("tensors",):
            assert found[what].startswith(f"{here}[Errno {errno.EFBIG}] File too large: "), found
            assert found[f"{what} left"] == "run" and found[f"{what} loaded"] == "{'step': 0}"
    if limited == 1:  # the first rank alone writes extra
        assert [found["extra"] for found in every] == ["", ""]
    model = build(seed=7)
    assert dmuon.load_checkpoint(tmp_path / "run", model, dmuon.Muon(model, **HOW)) == {"step": 1}


def save_again_and_again(path: Path, first: int, last: int, results: Any) -> None:
    torch.set_num_threads(1)
    for k in range(first, last):
        results.put(outcome(lambda: dmuon.save_checkpoint(path, filled(k), extra={"value": float(k)})))  # noqa: B023


@pytest.mark.case(row="A7")
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Each kill comes at another moment of another save; what is loaded is whole and never older than it was."""
    path, before, moments = tmp_path / "run", 0.0, random.Random(0)
    dmuon.save_checkpoint(path, filled(0.0), extra={"value": 0.0})
    for attempt in range(6):
        saved = _context.SimpleQueue()
        arguments = (path, int(before) + 1, int(before) + 10_000, saved)
        process = _context.Process(target=save_again_and_again, args=arguments)
        process.start()
        assert saved.get() == "", attempt
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        value = value_of(path)
        assert value > before
        before = value
    dmuon.save_checkpoint(path, filled(-2.0), extra={"value": -2.0})
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"] and value_of(path) == -2.0


def test_jobs_that_share_a_folder_get_whole_checkpoints_or_errors(tmp_path: Path) -> None:
    path, saves, jobs = tmp_path / "run", 15, 3
    dmuon.save_checkpoint(path, filled(0.0), extra={"value": 0.0})
    results = _context.Queue()
    processes = [
        _context.Process(target=save_again_and_again, args=(path, 1 + 100 * k, 1 + 100 * k + saves, results))
        for k in range(jobs)
    ]
    for process in processes:
        process.start()
    loaded, failed = [], []
    while any(process.is_alive() for process in processes):
        try:
            loaded.append(value_of(path))
        except (OSError, RuntimeError) as error:
            failed.append(str(error))
    outcomes = [results.get(timeout=10) for _ in range(saves * jobs)]
    for process in processes:
        process.join()
    assert loaded and all("load" in text or "No such file" in text for text in failed), failed
    assert set(outcomes) <= {
        "",
        f"RuntimeError: another process is saving to {path}: let each job save to a path of its own",
    }
    assert outcomes.count("") > 1
    assert value_of(path) > 0 and [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_another_process_saving_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with (
        checkpoint_folder.partial(path),
        pytest.raises(RuntimeError, match=r"another process is saving to .*run"),
    ):
        dmuon.save_checkpoint(path, filled(1.0))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("width", [16, 17])
def test_a_checkpoint_replaced_while_it_is_loaded_is_an_error(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "run", checkpoint_files.read
    dmuon.save_checkpoint(path, filled(1.0), extra={"value": 1.0})

    def late(*arguments: Any) -> None:
        dmuon.save_checkpoint(path, filled(2.0, width), extra={"value": 2.0})
        read(*arguments)

    monkeypatch.setattr(checkpoint_files, "read", late)
    with pytest.raises(RuntimeError, match="load"):
        dmuon.load_checkpoint(path, filled(0.0))
