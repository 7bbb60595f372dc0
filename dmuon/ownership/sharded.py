"""FSDP's parameters as seen by code that is not FSDP's."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def reshard(model: nn.Module) -> None:
    """Let FSDP's modules show their sharded parameters, which a forward without a backward leaves unsharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def settle(model: nn.Module, tensor_parallel: bool) -> None:
    """:func:`reshard`, and gradients placed as their parameters are. Collective where there is tensor parallelism.

    What FSDP does not have keeps the gradient that autograd left, which may still have to be added up over the ranks.
    """
    reshard(model)
    for parameter in model.parameters() if tensor_parallel else ():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def shard_of(value: Tensor, like: Tensor) -> DTensor:
    """``value``, which every rank has whole or is distributed as ``like`` already, distributed as ``like``.

    Nothing is sent.
    """
    assert isinstance(like, DTensor)
    value = value.detach().to(like.device)
    if isinstance(value, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
