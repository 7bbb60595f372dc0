"""The owned matrices of one block as one flat buffer that comes and goes as a unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon.ownership.absent import Absent, AbsentParameter, hide, mark_master, placeholder, reveal, same_place
from dmuon.ownership.absent_dtensor import AbsentDTensor
from dmuon.ownership.tensor_parallel import own_local, wrapped
from dmuon.shards import local


@dataclass(eq=False)
class OwnedMatrix:
    """One owned parameter: where it lies in its bucket and what its owner keeps.

    ``holder`` is the module that has it, ``shown`` the tensor that holds what it shows: itself, or what this rank has
    of a DTensor. ``master`` and ``total`` exist on the owner alone. ``unsent`` is this rank's own gradient, ``total``
    the mean over all ranks as far as it has arrived; ``arrived`` says that this rank has had a gradient since the last
    step.
    """

    name: str
    parameter: nn.Parameter
    shown: Tensor
    holder: nn.Module
    owner: int
    start: int
    stop: int
    view: Tensor
    absent: Tensor
    absence: str
    master: nn.Parameter | None = None
    unsent: Tensor | None = None
    total: Tensor | None = None
    arrived: bool = False

    def __post_init__(self) -> None:
        self._versions = self._count_writes()

    def _count_writes(self) -> tuple[int, int]:
        # A DTensor that is written to counts that itself, the tensor within does not.
        return self.parameter._version, self.shown._version

    def check(self) -> None:
        """Raise if somebody has changed the parameter itself, which the owner would never learn.

        Raises:
            RuntimeError: it is another object, has another shape, dtype or device, or was written to.
        """
        found = getattr(self.holder, self.name.rpartition(".")[2], None)
        if found is not self.parameter:
            kind = "nothing" if found is None else f"a {type(found).__name__}"
            raise RuntimeError(
                f"owned parameter {self.name!r} has been replaced by {kind} since dmuon.own: change the model before "
                "dmuon.own, and give fully_shard ignored_params=owned.params"
            )
        if not same_place(self.parameter, self.view, self.shown):
            now = f"{tuple(self.shown.shape)} {self.parameter.dtype} on {self.parameter.device}"
            then = f"{tuple(self.view.shape)} {self.view.dtype} on {self.view.device}"
            raise RuntimeError(
                f"owned parameter {self.name!r} was given other data since dmuon.own: it was {then}, is {now}. "
                "Convert, move and resize the model before dmuon.own; see its compute_dtype for other dtypes"
            )
        if not isinstance(self.parameter, Absent) and self._count_writes() != self._versions:
            raise RuntimeError(
                f"owned parameter {self.name!r} was written to, but holds a copy that the next publication replaces: "
                f"write to owned.masters[{self.name!r}] on rank {self.owner}, then call owned.refresh() on all ranks"
            )

    def collect(self, dtype: torch.dtype) -> None:
        """Take over the gradient that has just accumulated in the parameter.

        Args:
            dtype: in which it will travel, at least in which a DTensor's parts are added up here.
        """
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None:
            return
        if isinstance(gradient, DTensor):
            assert isinstance(self.parameter, DTensor)
            if gradient.placements != self.parameter.placements:
                # Perhaps still to be added up over its mesh.
                gradient = cast(DTensor, gradient.to(torch.promote_types(gradient.dtype, dtype)))
            gradient = gradient.redistribute(placements=self.parameter.placements).to_local()
        self.arrived = True
        if self.unsent is not None:
            wide = torch.promote_types(self.unsent.dtype, torch.float32)
            gradient = self.unsent.to(wide).add_(gradient)
        self.unsent = gradient


class Bucket:
    """The flat buffer of one module's owned matrices, in order of their owners' parts.

    Each parameter shows its part of the buffer while this is published. While it is not, reading the parameter
    raises.

    Args:
        name: of ``module`` in the model; empty for the model itself.
        module: calls of it use the matrices.
        parameters: by full name.
        owners: the rank that owns each.
        order: of the ranks' parts in the buffer.
        rank: this one; it makes masters of what it owns.
        dtype: of the buffer.
        poison: fill the buffer with NaN where otherwise its memory would be given back.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        owners: Mapping[str, int],
        order: Sequence[int],
        rank: int,
        dtype: torch.dtype,
        poison: bool = False,
    ) -> None:
        self.name, self.module, self._poison = name, module, poison
        names = sorted(parameters, key=lambda n: order.index(owners[n]))
        with torch.no_grad():
            values = {n: local(parameters[n]) for n in names}
        self.sizes = [sum(values[n].numel() for n in names if owners[n] == r) for r in order]
        device = next(iter(values.values())).device
        self.flat = torch.empty(sum(self.sizes), dtype=dtype, device=device)
        self.matrices: list[OwnedMatrix] = []
        user = f"module {name!r}" if name else "the model"
        stop = 0
        for each in names:
            parameter = parameters[each]
            start, stop = stop, stop + values[each].numel()
            view = self.flat[start:stop].view(values[each].shape)
            holder = module.get_submodule(each.rpartition(".")[0].removeprefix(name).removeprefix("."))
            absent = placeholder(view.shape, dtype, device)
            why = (
                f"the values of {each!r} are not here: they come while {user} runs. Call {user}, not its parts, or "
                f"read owned.masters[{each!r}] on rank {owners[each]}; give fully_shard ignored_params=owned.params, "
                "and initialise a model from the meta device by dmuon.materialize"
            )
            master = None
            if owners[each] == rank:
                kept = values[each].detach().clone(memory_format=torch.contiguous_format)
                master = nn.Parameter(wrapped(kept, parameter))
                mark_master(master)
            shown = own_local(parameter, view) if isinstance(parameter, DTensor) else parameter
            self.matrices.append(
                OwnedMatrix(
                    each, parameter, shown, holder, owners[each], start, stop, view, absent, why, master
                )
            )
        self.free()

    @property
    def mine(self) -> list[OwnedMatrix]:
        """The matrices that this rank owns, consecutive in the buffer."""
        return [matrix for matrix in self.matrices if matrix.master is not None]

    def contains(self, other: Bucket) -> bool:
        """Whether ``other``'s module is inside this one's."""
        return not self.name or other.name.startswith(f"{self.name}.")

    def check(self) -> None:
        """Raise if a parameter is no longer what the bucket made it; see :meth:`OwnedMatrix.check`."""
        for matrix in self.matrices:
            matrix.check()

    @torch.no_grad()
    def load(self) -> None:
        """Allocate the buffer and write this rank's masters into it. The rest is yet to arrive."""
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        if self._poison:
            self.flat.fill_(math.nan)
        for matrix in self.mine:
            assert matrix.master is not None
            matrix.view.copy_(local(matrix.master))

    def show(self) -> None:
        """Let the parameters see the buffer."""
        for matrix in self.matrices:
            reveal(matrix.parameter, matrix.view, matrix.shown)

    def hide(self) -> None:
        """Let the parameters see nothing; the buffer stays as it is."""
        for matrix in self.matrices:
            if not isinstance(matrix.parameter, Absent):
                kind = AbsentDTensor if isinstance(matrix.parameter, DTensor) else AbsentParameter
                hide(matrix.parameter, matrix.absent, matrix.absence, matrix.shown, kind)

    @torch.no_grad()
    def free(self) -> None:
        """Give the buffer's memory back."""
        self.hide()
        if self._poison:
            self.flat.fill_(math.nan)
        else:
            self.flat.untyped_storage().resize_(0)

    @torch.no_grad()
    def pack(self, dtype: torch.dtype) -> Tensor:
        """The gradients that this rank has not sent yet, laid out as the buffer; zero where there are none."""
        packed = torch.empty(self.flat.numel(), dtype=dtype, device=self.flat.device)
        for matrix in self.matrices:
            part = packed[matrix.start : matrix.stop].view(matrix.view.shape)
            if matrix.unsent is None:
                part.zero_()
            else:
                part.copy_(matrix.unsent)
            matrix.unsent = None
        return packed

    @torch.no_grad()
    def absorb(self, received: Tensor, ranks: int) -> None:
        """Add a mean over ``ranks`` to the totals of this rank's matrices.

        The rows of ``received``, (any, own size), add up to the sum over all of them.
        The sum is in fp32 or wider, whatever the gradients came in.
        """
        wide = torch.promote_types(received.dtype, torch.float32)
        mean = received.sum(0, dtype=wide).div_(ranks)
        mine = self.mine
        first = mine[0].start if mine else 0
        for matrix in mine:
            part = mean[matrix.start - first : matrix.stop - first].view(matrix.view.shape)
            matrix.total = part if matrix.total is None else matrix.total.add_(part)


def blocks_of(
    model: nn.Module, names: Sequence[str], chosen: Sequence[nn.Module] | None = None
) -> dict[str, str]:
    """:func:`block_of` of each parameter; of one that several blocks share, the model itself, which outlives them."""
    homes: dict[Tensor, set[nn.Module]] = {model.get_parameter(name): set() for name in names}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in homes:
            homes[parameter].add(model.get_submodule(block_of(model, name, chosen)))
    shared = {parameter for parameter, modules in homes.items() if len(modules) > 1}
    return {
        name: "" if model.get_parameter(name) in shared else block_of(model, name, chosen) for name in names
    }


def block_of(model: nn.Module, name: str, chosen: Sequence[nn.Module] | None = None) -> str:
    """The name of the module whose calls publish parameter ``name``; empty for the model itself.

    It is the outermost ancestor among ``chosen``, or else the outermost that is an element of an nn.ModuleList,
    nn.ModuleDict or nn.Sequential and can be called.
    """
    path = name.split(".")[:-1]
    parent = model
    for depth, part in enumerate(path, 1):
        child = parent.get_submodule(part)
        listed = isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        callable_ = type(child).forward is not nn.Module.forward
        if any(child is each for each in chosen) if chosen is not None else listed and callable_:
            return ".".join(path[:depth])
        parent = child
    return ""
