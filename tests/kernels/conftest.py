from __future__ import annotations

from collections.abc import Iterator

import pytest

from dmuon.kernels.choose import set_chooser


@pytest.fixture(autouse=True)
def heuristics_only() -> Iterator[None]:
    """What was tuned on this machine must not decide what is tested."""
    previous = set_chooser(None)
    yield
    set_chooser(previous)
