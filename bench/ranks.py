"""Runs a measurement in several processes that find each other through a file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def measure_in_ranks(measure: Callable[..., None], setting: Any, ranks: int) -> Any:
    """What rank 0's ``measure(rank, setting, store, results)`` puts into the queue ``results``.

    Args:
        measure: a module's function; ``store`` is the path for ``init_process_group("…", f"file://{store}")``.
        setting: given to each, pickled.
        ranks: how many processes.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed.
    """
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (setting, str(Path(folder) / "store"), results)
        running = torch.multiprocessing.spawn(measure, arguments, nprocs=ranks, join=False)
        # What is put has to be taken before the process that put it can end.
        while results.empty() and not running.join(timeout=0.2):
            pass
        found = results.get()
        while not running.join():
            pass
    return found
