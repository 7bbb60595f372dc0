"""Owned training equals training in one process."""

from __future__ import annotations

import pytest
from own_models import Training, assert_equal, train_both
from own_processes import run_ranks


@pytest.mark.parametrize("reshard", [True, False], ids=["zero3", "zero2"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_process(ranks: int, reshard: bool) -> None:
    assert_equal(run_ranks(ranks, train_both, Training(own={"reshard_after_forward": reshard})))
