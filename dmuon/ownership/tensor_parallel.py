"""A tensor-parallel mesh axis beside the data-parallel ranks that own.

The ranks are a grid: each tensor-parallel coordinate has all data-parallel ranks, and owns its own shards by one and
the same plan. So the ranks that own the shards of one matrix are a tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dmuon.ownership.absent import placeholder
from dmuon.ownership.control import Control
from dmuon.ownership.exchange import Exchange
from dmuon.ownership.routes import Grid, exchanges
from dmuon.ownership.statistics import Statistics
from dmuon.shards import local


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that share this rank's part of the data.

    Attributes:
        mesh: of one dimension.
        exchange: among its ranks, in a process group of its own.
    """

    mesh: DeviceMesh
    exchange: Exchange

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.exchange.size

    @torch.no_grad()
    def equalize(self, weights: Iterable[Tensor]) -> None:
        """Let those of ``weights`` that every rank has whole be the first rank's. Collective."""
        for weight in weights:
            if shard_dim(weight) is None:
                dist.broadcast(local(weight), group_src=0, group=self.exchange.group)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over the ranks, in place."""
        dist.all_reduce(value, group=self.exchange.group)
        return value


def make_tensor_parallel(
    mesh: DeviceMesh, grids: Sequence[Grid], statistics: Statistics, timeout: timedelta | None
) -> TensorParallel:
    """Collective over all ranks.

    Args:
        mesh: of one dimension.
        grids: of all its coordinates.
        statistics: counts what is moved.
        timeout: of the group's collectives.
    """
    columns = [list(column) for column in zip(*map(_flat, grids), strict=True)]
    (exchange,) = exchanges([columns], ["tensor"], mesh.device_type, {}, statistics, timeout)
    return TensorParallel(mesh, exchange)


def is_distributed(model: object) -> bool:
    """Whether any parameter is a DTensor."""
    return isinstance(model, nn.Module) and any(isinstance(p, DTensor) for p in model.parameters())


def tensor_mesh_of(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    """The mesh over which parameters of ``model`` are sharded already, beside the data-parallel ``mesh``.

    Raises:
        ValueError: there are several, it is not of one dimension, or they have more than this rank in common.
    """
    found: dict[DeviceMesh, str] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            common = sorted({*_ranks(parameter.device_mesh)} & {*_ranks(mesh)})
            if len(common) > 1:
                raise ValueError(
                    f"parameter {name!r} is sharded already: call dmuon.own before fully_shard, and with a mesh of "
                    f"the data-parallel axes alone; its mesh and dmuon.own's both have the ranks {common}"
                )
            found.setdefault(parameter.device_mesh, name)
    (tensor_mesh, first), *others = found.items()
    if others:
        raise ValueError(
            f"the parameters {first!r} and {others[0][1]!r} are sharded over two meshes, {tensor_mesh} and "
            f"{others[0][0]}: dmuon.own takes one tensor-parallel axis, and the same for all parameters"
        )
    if tensor_mesh.ndim > 1:
        raise ValueError(
            f"parameter {first!r} is sharded over {tensor_mesh.ndim} mesh dimensions, {tensor_mesh}: dmuon.own takes "
            "one tensor-parallel axis; parallelize_module with that alone, and fully_shard after dmuon.own"
        )
    for each, whose in ((mesh, "mesh"), (tensor_mesh, "the tensor-parallel mesh")):
        ranks = _ranks(each)
        if ranks != sorted(ranks):
            raise ValueError(f"{whose} must hold its ranks in ascending order, got {ranks}")
    return tensor_mesh


def check_swappable(name: str, parameter: nn.Parameter) -> None:
    """Raise a ValueError if :func:`own_local` would fail or lose something of a DTensor parameter."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ValueError(
            f"parameter {name!r} has gradient hooks, which ownership of a tensor-parallel parameter would drop: "
            "register them after dmuon.own"
        )
    other = wrapped(placeholder(local(parameter).shape, parameter.dtype, parameter.device), parameter)
    try:
        for _ in ("there", "and back"):
            torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(
            f"parameter {name!r} is still referred to, as by the outputs of a forward, a view or a weak reference: "
            f"drop these, or call dmuon.own right after parallelize_module ({error})"
        ) from error


def check_layout(name: str, parameter: nn.Parameter) -> None:
    """Raise a ValueError if the ranks hold ``parameter`` in a way that :func:`shares` does not describe."""
    if not isinstance(parameter, DTensor):
        return
    (placement,) = parameter.placements
    if type(placement) not in (Shard, Replicate):
        raise ValueError(
            f"parameter {name!r} is placed as {placement}, but only Shard and Replicate can be owned: redistribute "
            "it, or exclude it by the policy"
        )
    dim = shard_dim(parameter)
    if dim is not None:
        begin, end = shares(parameter.shape[dim], parameter.device_mesh.size())[
            parameter.device_mesh.get_local_rank()
        ]
        expected = [*parameter.shape[:dim], end - begin, *parameter.shape[dim + 1 :]]
        found = list(parameter.to_local().shape)
        if found != expected:
            raise ValueError(
                f"parameter {name!r} has a shard of {found} on this rank where distribute_tensor puts {expected}: "
                "only its way to divide a dimension can be owned"
            )


def shard_dim(tensor: Tensor) -> int | None:
    """The dimension over which a tensor-parallel group divides ``tensor``; None where each of its ranks has all."""
    placement = tensor.placements[0] if isinstance(tensor, DTensor) else Replicate()
    return placement.dim % tensor.ndim if isinstance(placement, Shard) else None


def shares(length: int, ranks: int) -> list[tuple[int, int]]:
    """The part of a dimension that each rank has, as :func:`torch.distributed.tensor.distribute_tensor` divides it."""
    chunk = -(-length // ranks)
    return [(min(rank * chunk, length), min((rank + 1) * chunk, length)) for rank in range(ranks)]


def grids_of(control: Control, mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> list[Grid]:
    """The data-parallel ranks of each tensor-parallel coordinate, in its order. Collective.

    Raises:
        ValueError: the two meshes do not span a grid of all ranks; on all ranks.
    """
    every = control.gather((_grid(mesh), _ranks(tensor_mesh)))
    grids = [every[rank][0] for rank in every[0][1]]
    flat = list(map(_flat, grids))
    columns = [list(column) for column in zip(*flat, strict=False)]
    for rank, (grid, ranks) in enumerate(every):
        if grid not in grids or ranks not in columns or rank not in _flat(grid) or rank not in ranks:
            raise ValueError(
                f"the data-parallel mesh and the tensor-parallel one must span a grid of all ranks, but rank {rank} "
                f"has {_flat(grid)} and {ranks} where rank 0 has {flat[0]} and {every[0][1]}: slice both from one "
                'mesh, as init_device_mesh(device, (dp, tp), mesh_dim_names=("shard", "tp"))'
            )
    return grids


def own_local(parameter: nn.Parameter, view: Tensor) -> Tensor:
    """Let a DTensor parameter show ``view``, and return the tensor whose ``data`` it shows.

    It stays the same object. A DTensor that is no Parameter gives out its local tensor itself, so the parameter gets
    the contents of one. It is made of ``view``, because torch.compile expects of it the storage offset that it was made
    with.
    """
    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        other = wrapped(view.data, parameter)  # of data, whose version is not the buffer's
        shown = local(other)
    other.requires_grad_(parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    return shown


def wrapped(part: Tensor, like: Tensor) -> Tensor:
    """``part`` as this rank's part of a DTensor like ``like``; as it is if that is none."""
    if not isinstance(like, DTensor):
        return part
    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=stride
    )


def _ranks(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def _grid(mesh: DeviceMesh) -> Grid:
    grid: Grid = mesh.mesh.view(-1, mesh.size(-1)).tolist()
    return grid


def _flat(grid: Grid) -> list[int]:
    return [rank for row in grid for rank in row]
