"""Whether all ranks see the weights that their owners hold."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dmuon.ownership.buckets import Bucket
from dmuon.ownership.control import Control
from dmuon.ownership.publisher import Publisher
from dmuon.ownership.registry import require_ownership
from dmuon.ownership.tensor_parallel import shard_dim
from dmuon.shards import local


def check_consistency(model: nn.Module) -> None:
    """Compare the published weights of an owned model on all ranks, bit for bit. Collective.

    Buckets that are not published are, one at a time, and freed again. Call it between steps, or between a backward
    and its step. It copies all owned weights to the host, so it is for looking for faults; ``DMUON_DEBUG=1`` has it
    called after each step.

    Args:
        model: owned.

    Raises:
        ValueError: the model is not owned.
        RuntimeError: a rank sees something else than the owner holds. All ranks raise, and name the parameters and
            the ranks.
    """
    require_ownership(model).check_consistency()


def debugging() -> bool:
    """Whether the environment asks for a check after each step, and for NaN in freed buffers.

    Raises:
        ValueError: ``DMUON_DEBUG`` is neither ``0`` nor ``1``.
    """
    setting = os.environ.get("DMUON_DEBUG", "0")
    if setting not in ("0", "1"):
        raise ValueError(f"DMUON_DEBUG must be 0 or 1, got {setting!r}")
    return setting == "1"


def compare(buckets: Sequence[Bucket], publisher: Publisher, control: Control) -> None:
    """:func:`check_consistency` of ``buckets``."""
    seen: dict[str, tuple[int, str]] = {}
    held: dict[str, str] = {}
    for index, bucket in enumerate(buckets):
        with publisher.published(index):
            for matrix in bucket.matrices:
                seen[matrix.name] = matrix.owner, _digest(matrix.view)
                if matrix.master is not None:
                    held[matrix.name] = _digest(local(matrix.master).detach().to(matrix.view.dtype))
    every = control.gather((seen, held))
    for bucket in buckets:
        for matrix in bucket.matrices:
            # Each tensor-parallel coordinate has an owner of its own.
            right = {rank: has[matrix.name] for rank, (_, has) in enumerate(every) if matrix.name in has}
            found = [other[matrix.name] for other, _ in every]
            wrong = [rank for rank, (owner, digest) in enumerate(found) if digest != right[owner]]
            if not wrong and shard_dim(matrix.parameter) is None and len(set(right.values())) > 1:
                raise RuntimeError(
                    f"bucket {bucket.name!r}: the owners of {matrix.name!r}, the ranks {list(right)}, hold different "
                    "weights, although each has all of it: was one of them written to? They must begin with the same"
                )
            if wrong:
                raise RuntimeError(
                    f"bucket {bucket.name!r}: {matrix.name!r} on the ranks {wrong} is not what its owner, rank "
                    f"{found[wrong[0]][0]}, holds. If the master was written to, owned.refresh() is missing; else the "
                    "copy was written to, or the exchange failed"
                )


def _digest(tensor: Tensor) -> str:
    # A copy: memory that numpy has seen cannot be given back.
    data = tensor.detach().contiguous().view(torch.uint8).cpu().clone().numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()
