"""Gradient accumulation and clipping for models that dmuon and FSDP2 share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuon.ownership.registry import ownership_of
from dmuon.shards import local


def set_requires_gradient_sync(model: nn.Module, flag: bool) -> None:
    """Whether the backwards that follow reduce gradients, owned and FSDP's alike; else they add up locally.

    Set it to False for all micro-batches of a step but the last, and to True before the last one's forward. Of a model
    that is not owned it is FSDP's alone, and nothing where that has no part in it.
    """
    owned = ownership_of(model)
    if owned is not None:
        owned.set_requires_gradient_sync(flag)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(flag, recurse=False)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their common norm is at most ``max_norm``. Collective.

    Args:
        model: if owned, its gradients are those of the owners' masters, of FSDP's shards and of the parameters that
            neither has, which count as equal on all ranks. One that is not owned is
            :func:`torch.nn.utils.clip_grad_norm_`'s.
        max_norm: positive.

    Returns:
        The norm before, a scalar on the model's device, equal on all ranks; of an owned model in fp64. Nothing waits
        for it.

    Raises:
        ValueError: ``max_norm`` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    owned = ownership_of(model)
    if owned is None:
        plain = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return plain.full_tensor() if isinstance(plain, DTensor) else plain
    owned.finish("clip_grad_norm_")
    owned.settle(model)
    masters = [master.grad for master in owned.masters.values() if master.grad is not None]
    sharing = owned.tensor_parallel.size if owned.tensor_parallel else 1
    rest = [p.grad for p in model.parameters() if p not in owned.params and p.grad is not None]
    device = next(iter(owned.params)).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in masters:
        total += _squares(local(gradient)) / _copies(gradient, sharing)
    for gradient in rest:
        total += _squares(local(gradient)) / _copies(gradient, owned.routes.size * sharing)
    norm = owned.sum(total).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in map(local, (*masters, *rest)):
        gradient.mul_(factor.to(gradient.dtype))
    return norm


def _copies(gradient: Tensor, ranks: int) -> int:
    """On how many of ``ranks`` each element is: on all that no mesh divides it over."""
    if isinstance(gradient, DTensor):
        for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
            ranks //= 1 if placement.is_replicate() else size
    return ranks


def _squares(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.square()
