"""The whole model in one place, for programs that know nothing of owners and shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from dmuon.ownership.buckets import OwnedMatrix
from dmuon.ownership.owned import Owned
from dmuon.ownership.registry import ownership_of


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of the whole model on rank 0: plain contiguous CPU tensors, no two of which share memory.

    Collective; one parameter at a time travels and is whole on any device. A plain PyTorch model loads the result, and
    ``safetensors.torch.save_file`` takes it::

        weights = dmuon.full_state_dict(model)
        if dist.get_rank() == 0:
            safetensors.torch.save_file(weights, "model.safetensors")

    Args:
        model: owned, sharded by FSDP2, or neither.

    Returns:
        Name → tensor in its own dtype (an owned matrix in that of its master), in the order of the model, without what
        DDP and torch.compile add to names. Empty on the other ranks.
    """
    owned = ownership_of(model)
    if owned is not None:
        owned.state_dicts.listing = True
    try:
        state = get_model_state_dict(model, options=StateDictOptions(strict=False))
    finally:
        if owned is not None:
            owned.state_dicts.listing = False
    first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    whole: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, OwnedMatrix):
            assert owned is not None
            value = _from_owner(value, owned)
        elif isinstance(value, DTensor):
            value = value.full_tensor()
        if first:
            whole[name] = _copied(value) if isinstance(value, Tensor) else value
    return whole


def _from_owner(matrix: OwnedMatrix, owned: Owned) -> Tensor | None:
    """The whole master of ``matrix``, on its owner and on rank 0."""
    master = matrix.master
    if isinstance(master, DTensor):
        master = master.full_tensor()
    if matrix.owner == 0:
        return master
    if master is not None:
        # Beside rank 0, the one that has its tensor-parallel coordinate.
        if 0 in owned.routes.order:
            owned.control.send_to_first(master.detach().cpu())
        return None
    if owned.routes.rank == 0:
        like = torch.empty(matrix.parameter.shape, dtype=owned.dtypes[matrix.name], device="cpu")
        return owned.control.receive(like, matrix.owner)
    return None


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
