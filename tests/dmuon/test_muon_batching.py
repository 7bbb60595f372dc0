"""Which matrices share a Newton–Schulz batch, and that sharing one changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dmuon
import dmuon.batching
import dmuon.matrix_step
from dmuon.batching import BATCH_ELEMENTS, Update, batch_sizes, batches
from dmuon.matrix import Matrix

GROUP = {"coefficients": "polar_express", "precision": "auto", "normuon_beta2": None}


def update_of(index: int, count: int, rows: int = 4, cols: int = 6) -> Update:
    tensor = torch.full((count, rows, cols), float(index))
    tensor += torch.arange(count).view(-1, 1, 1) / 1000
    return Update(tensor, tensor, tensor, Matrix((count, rows, cols), rows, cols, count), GROUP)


@given(count=st.integers(1, 5000), rows=st.integers(1, 20000), cols=st.integers(1, 20000))
def test_sizes_are_whole_bounded_few_and_even(count: int, rows: int, cols: int) -> None:
    sizes = batch_sizes(count, rows, cols)
    fitting = max(1, BATCH_ELEMENTS // (rows * cols))
    assert sum(sizes) == count
    assert max(sizes) <= fitting
    assert max(sizes) - min(sizes) <= 1
    assert (len(sizes) - 1) * fitting < count


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=8), limit=st.integers(1, 12))
def test_every_matrix_is_dealt_once_in_order(counts: list[int], limit: int) -> None:
    updates = [update_of(index, count) for index, count in enumerate(counts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dmuon.batching, "BATCH_ELEMENTS", limit * 24)
        dealt = list(batches(updates))
    assert all(sum(piece.count for piece in batch) <= limit for batch in dealt)
    seen = torch.cat([piece.gradient() for batch in dealt for piece in batch])
    assert torch.equal(seen, torch.cat([update.gradient for update in updates]))


def test_batches_come_in_the_order_of_their_first_matrices() -> None:
    """Two by two: what a batch has to wait for should not come first."""
    updates = [
        update_of(index, 1, *shape) for index, shape in enumerate([(4, 6), (4, 6), (6, 4), (6, 4)] * 2)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dmuon.batching, "BATCH_ELEMENTS", 2 * 24)
        dealt = [[int(piece.gradient()[0, 0, 0]) for piece in batch] for batch in batches(updates)]
    assert dealt == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_only_equal_matrices_share_a_batch() -> None:
    alike = [update_of(0, 1), update_of(1, 2)]
    other = update_of(2, 1)
    different = [
        update_of(3, 1, rows=6, cols=4),
        Update(*(other.parameter.double(),) * 3, other.matrix, GROUP),
        Update(*(other.parameter,) * 3, other.matrix, {**GROUP, "precision": "bf16"}),
        Update(*(other.parameter,) * 3, other.matrix, {**GROUP, "coefficients": "you"}),
    ]
    dealt = list(batches([alike[0], *different, alike[1]]))
    assert sorted(len(batch) for batch in dealt) == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_batches_are_bounded_and_change_no_result(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = [(6, 8), (5, 6, 8), (8, 6), (6, 8)]
    bounded, free = (
        [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes] for _ in range(2)
    )
    for a, b in zip(bounded, free, strict=True):
        b.data.copy_(a.data)
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    dmuon.Muon([{"params": free[:2], "lr": 0.1}, {"params": free[2:], "lr": 0.3}]).step()

    calls: list[int] = []
    run = dmuon.matrix_step.gram_ns

    def noting(G: Tensor, **options: Any) -> Tensor:
        calls.append(G.shape[0])
        return run(G, **options)

    monkeypatch.setattr(dmuon.matrix_step, "gram_ns", noting)
    monkeypatch.setattr(dmuon.batching, "BATCH_ELEMENTS", limit * 48)
    dmuon.Muon([{"params": bounded[:2], "lr": 0.1}, {"params": bounded[2:], "lr": 0.3}]).step()
    assert max(calls) <= limit
    assert sum(calls) == 8
    for a, b in zip(bounded, free, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
