"""Scenarios in several real processes, with a time-out: a hang fails instead of blocking."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The server imports once; each process is then a fork of it that has done nothing else yet.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "dmuon.muon", "dmuon.ownership.gradients", "dmuon.autotune"]
)

TIMEOUT = 60.0


def run_ranks(ranks: int, scenario: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """What ``scenario(*args)`` returns on each of ``ranks`` processes with gloo between them.

    Raises:
        AssertionError: a rank raised, died or did not end in time; with the traceback of each that raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            receiver, sender = _context.Pipe(duplex=False)
            store = str(Path(folder) / "store")
            process = _context.Process(target=_rank, args=(sender, rank, ranks, store, scenario, args))
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        results: list[tuple[bool, Any]] = []
        try:
            results = [_receive(pipe, timeout) for pipe in pipes]
        finally:
            for process in processes:
                process.join(0 if len(results) < ranks else 5)
                if process.is_alive():
                    process.kill()
                    process.join()
    failed = {rank: result for rank, (good, result) in enumerate(results) if not good}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
    return [result for _, result in results]


def outcome(work: Callable[[], Any]) -> str:
    """The exception that ``work`` raises, as "type: message"; empty if none."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _receive(pipe: Any, timeout: float) -> tuple[bool, Any]:
    if not pipe.poll(timeout):
        return False, f"not done after {timeout:g} s"
    try:
        result: tuple[bool, Any] = pipe.recv()
    except EOFError:
        return False, "died"
    return result


def _rank(
    pipe: Any, rank: int, ranks: int, store: str, scenario: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT / 2)
        )
        pipe.send((True, scenario(*args)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        pipe.send((False, traceback.format_exc()))
    # Some builds abort now and then when the interpreter ends with gloo loaded; the result is what counts.
    os._exit(0)
