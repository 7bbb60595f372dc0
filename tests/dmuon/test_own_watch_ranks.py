"""Ranks that see other weights than the owners hold are found; buffers outlive the transfers that use them."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, batch, build, difference, loss_of, mesh_of, wrap
from own_processes import outcome, run_ranks
from torch import Tensor

import dmuon
from dmuon.ownership import exchange


def step(model: Any, optimizer: Any, index: int) -> None:
    """On this rank's rows."""
    rank = dist.get_rank()
    tokens, targets = batch(index, 2 * dist.get_world_size())
    rows = slice(2 * rank, 2 * rank + 2)
    loss_of(model(tokens[rows]), targets[rows]).backward()
    optimizer.step()
    optimizer.zero_grad()


def disagreements(reshard: bool) -> dict[str, Any]:
    """What the check says when all is well, when a copy differs on one rank, and when a master has moved alone."""
    model = build()
    owned = wrap(model, mesh_of(), reshard_after_forward=reshard)
    optimizer = dmuon.Muon(model, **HOW)
    step(model, optimizer, 0)
    buckets = owned._publisher._buckets

    def allocated() -> list[str]:
        return [bucket.name for bucket in buckets if bucket.flat.untyped_storage().size()]

    before = allocated()
    well = outcome(lambda: dmuon.check_consistency(model))
    after = allocated()
    step(model, optimizer, 1)
    bucket = next(bucket for bucket in buckets if bucket.name == "blocks.0")
    matrix = bucket.matrices[0]
    with owned._publisher.published(buckets.index(bucket)):
        if dist.get_rank() != matrix.owner:
            bucket.flat[matrix.start] += 1e-9
        differs = outcome(lambda: dmuon.check_consistency(model))
    owned.refresh()
    if matrix.master is not None:
        matrix.master.data.mul_(2)
    written = outcome(lambda: dmuon.check_consistency(model))
    owned.refresh()
    return {
        "kept": before == after,
        "well": well,
        "differs": differs,
        "written": written,
        "refreshed": outcome(lambda: dmuon.check_consistency(model)),
        "name": matrix.name,
        "owner": matrix.owner,
        "unowned": outcome(lambda: dmuon.check_consistency(torch.nn.Linear(2, 2))),
    }


@pytest.mark.parametrize("reshard", [True, False])
def test_a_copy_that_differs_is_named_on_all_ranks(reshard: bool) -> None:
    results = run_ranks(3, disagreements, reshard)
    owner, name = results[0]["owner"], results[0]["name"]
    others = [rank for rank in range(3) if rank != owner]
    for result in results:
        assert result["well"] == result["refreshed"] == "" and result["kept"]
        assert result["differs"].startswith(
            f"RuntimeError: bucket 'blocks.0': {name!r} on the ranks {others} is not what its owner, rank {owner},"
        )
        assert name in result["written"] and "owned.refresh() is missing" in result["written"]
        assert "call dmuon.own(model, mesh) first" in result["unowned"]


def debugged() -> dict[str, Any]:
    """Two steps under DMUON_DEBUG, and a third with a copy that is damaged on its way."""
    invalid = {}
    for setting in ("yes", "", "2"):
        os.environ["DMUON_DEBUG"] = setting
        invalid[setting] = outcome(lambda: dmuon.own(build(), mesh_of()))
    os.environ["DMUON_DEBUG"] = str(dist.get_rank())
    some = outcome(lambda: dmuon.own(build(), mesh_of()))
    os.environ["DMUON_DEBUG"] = "1"
    model = build()
    reference = copy.deepcopy(model)
    owned = wrap(model, mesh_of())
    optimizer, alone = dmuon.Muon(model, **HOW), dmuon.Muon(reference, **HOW)
    for index in range(2):
        step(model, optimizer, index)
        tokens, targets = batch(index, 4)
        loss_of(reference(tokens), targets).backward()
        alone.step()
        alone.zero_grad()
    worst = difference(model, owned, reference)
    poisoned = [bucket.flat.isnan().all().item() for bucket in owned._publisher._buckets[2:]]
    bucket = owned._publisher._buckets[1]
    show = bucket.show

    def damage() -> None:
        if dist.get_rank() == 1:
            bucket.flat[:1] += 1
        show()

    bucket.show = damage
    return {
        "invalid": invalid,
        "some": some,
        "worst": worst,
        "poisoned": poisoned,
        "found": outcome(lambda: step(model, optimizer, 2)),
    }


def test_the_debug_mode_checks_each_step() -> None:
    for result in run_ranks(2, debugged):
        for setting, text in result["invalid"].items():
            assert text == f"ValueError: DMUON_DEBUG must be 0 or 1, got {setting!r}"
        assert "DMUON_DEBUG" in result["some"] and "ranks disagree" in result["some"]
        assert result["worst"] < 1e-12
        assert all(result["poisoned"])
        assert "bucket 'blocks.0': 'blocks.0." in result["found"] and "the ranks [1]" in result["found"]


def by_address(tensor: Any) -> Any:
    """The same memory, without a claim to it."""
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return tensor
    assert tensor.is_contiguous()
    memory = (ctypes.c_byte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class LateWork:
    """A collective that begins when it is waited for, and until then keeps nothing alive but addresses."""

    def __init__(self, run: Callable[[], Any], sizes: list[int], dtype: torch.dtype) -> None:
        self._run, self._sizes, self._dtype, self._over = run, sizes, dtype, False

    def is_completed(self) -> bool:
        return self._over

    def wait(self) -> None:
        if not self._over:
            gc.collect()
            # What has been freed is somebody else's by now.
            others = [torch.full((n,), torch.nan, dtype=self._dtype) for n in self._sizes * 8]
            self._run()
            del others
            self._over = True


def late(collective: Callable[..., Any]) -> Callable[..., Any]:
    def begin(*tensors: Any, async_op: bool = False, **options: Any) -> Any:
        if not async_op:
            return collective(*tensors, **options)
        addresses = [by_address(tensor) for tensor in tensors]
        sizes = [tensor.numel() for tensor in tensors]
        return LateWork(lambda: collective(*addresses, **options), sizes, tensors[0].dtype)

    return begin


def careless(reshard: bool) -> float:
    """Three steps over a network that forgets whose memory it uses; the largest difference from one process."""
    gc.freeze()  # what is there before does not slow down every collection
    model = build()
    reference = copy.deepcopy(model)
    owned = wrap(model, mesh_of(), reshard_after_forward=reshard)
    optimizer, alone = dmuon.Muon(model, **HOW), dmuon.Muon(reference, **HOW)
    distributed: Any = exchange.dist
    for name in ("broadcast", "reduce", "all_to_all_single"):
        setattr(distributed, name, late(getattr(distributed, name)))
    exchange._all_gather_single = late(exchange._all_gather_single)
    exchange._reduce_scatter_single = late(exchange._reduce_scatter_single)
    for index in range(3):
        step(model, optimizer, index)
        dmuon.check_consistency(model)
        ranks = dist.get_world_size()
        tokens, targets = batch(index, 2 * ranks)
        loss_of(reference(tokens), targets).backward()
        alone.step()
        alone.zero_grad()
    return difference(model, owned, reference)


@pytest.mark.case(row="R6")
@pytest.mark.parametrize("reshard", [True, False])
def test_buffers_outlive_their_transfers(reshard: bool) -> None:
    assert all(worst < 1e-12 for worst in run_ranks(2, careless, reshard))
