from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dmuon.kernels.choose import set_chooser


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine would make tiny products slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def heuristics_only() -> Iterator[None]:
    """What was tuned on this machine must not decide what is tested."""
    previous = set_chooser(None)
    yield
    set_chooser(previous)
