"""What :func:`dmuon.own` refuses."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon.ownership.absent import is_owned
from dmuon.ownership.registry import ownership_of
from dmuon.ownership.tensor_parallel import check_layout, check_swappable, is_distributed
from dmuon.policy import Routing


def check_mesh(mesh: DeviceMesh, alone: bool) -> None:
    """Raise unless ``mesh`` is one of data-parallel ranks; ``alone``: of all ranks."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh (init_device_mesh makes one), got {type(mesh).__name__}")
    if mesh.ndim > 2:
        raise ValueError(f"mesh must have one dimension or two (replicate, shard), got {mesh.ndim}")
    ranks = mesh.mesh.flatten().tolist()
    if alone and ranks != list(range(dist.get_world_size())):
        raise ValueError(
            f"mesh must hold the ranks 0 to {dist.get_world_size() - 1} of the process group in ascending order, "
            f"got {ranks}; beside a tensor-parallel axis, parallelize_module comes before dmuon.own"
        )


def check_model(model: nn.Module, mesh: DeviceMesh, buckets: Sequence[nn.Module] | None) -> None:
    """Raise unless ``model`` can be owned, and ``buckets`` are in it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    modules = set(model.modules())
    for bucket in buckets or ():
        if bucket not in modules:
            raise ValueError(f"buckets must be modules of the model, got another {type(bucket).__name__}")
    if ownership_of(model) is not None:
        raise ValueError("the model is owned already: call dmuon.own once")
    distributed = is_distributed(model)
    for name, parameter in model.named_parameters():
        if is_owned(parameter):
            raise ValueError(
                f"parameter {name!r} is owned already: call dmuon.own once, with the whole model"
            )
        if distributed and parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device: give a tensor-parallel model its values before dmuon.own "
                "(model.to_empty, then its initialisation)"
            )
        if parameter.device.type not in (mesh.device_type, "meta"):
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, but the mesh is on {mesh.device_type}"
            )
        if parameter.grad is not None:
            raise ValueError(f"parameter {name!r} has a gradient already: call dmuon.own before training")


def check_plain(model: nn.Module, routings: Sequence[Routing]) -> None:
    """Raise unless the parameters of ``routings`` can be owned."""
    for routing in routings:
        parameter = model.get_parameter(routing.name)
        if isinstance(parameter, DTensor):
            check_layout(routing.name, parameter)
            check_swappable(routing.name, parameter)
        elif type(parameter) is not nn.Parameter:
            raise ValueError(
                f"parameter {routing.name!r} is a {type(parameter).__name__}, but only a plain nn.Parameter can be "
                "owned, or a DTensor: convert it, or exclude it by the policy"
            )
