"""Whole parameters for code that knows of neither owners nor shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from dmuon.ownership.owned import Owned
from dmuon.ownership.runtime import tensors_in
from dmuon.ownership.sharded import shard_of
from dmuon.shards import local

# Questions about a parameter that its placeholder answers as well.
_METADATA = {
    Tensor.dim,
    Tensor.numel,
    Tensor.size,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "device", "requires_grad", "is_leaf", "is_meta", "grad")
    ),
}


class Whole(TorchFunctionMode):
    """Lets code that is not aware of owners and shards see whole parameters, those of one module at a time.

    Args:
        model: owned by ``owned``.
        blank: parameters that have no values yet.

    Attributes:
        used: what has been handed to any function.
    """

    def __init__(self, model: nn.Module, owned: Owned, blank: Iterable[Tensor]) -> None:
        super().__init__()
        self._owned, self._blank = owned, set(blank)
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in owned.parameters.items()}
        self._module: dict[Tensor, str] = {p: name.rpartition(".")[0] for name, p in model.named_parameters()}
        self._whole: dict[Tensor, Tensor] = {}
        self.used: set[Tensor] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        needed = [t for t in tensors if t in self._module and (t in self._names or isinstance(t, DTensor))]
        if any(tensor not in self._whole for tensor in needed):
            self.keep({self._module[tensor] for tensor in needed})
            for tensor in needed:
                if tensor not in self._whole:
                    self._whole[tensor] = self._make(tensor)
        self.used.update(tensors)
        return func(*_replaced(args, self._whole), **_replaced(kwargs, self._whole))

    @torch.no_grad()
    def keep(self, modules: Iterable[str] = ()) -> None:
        """Store what has been written, and drop the whole copies of all but ``modules``."""
        for parameter in [p for p in self._whole if self._module[p] not in modules]:
            whole = self._whole.pop(parameter)
            if isinstance(parameter, DTensor):
                local(parameter).copy_(shard_of(whole, parameter).to_local())

    def _make(self, parameter: Tensor) -> Tensor:
        """``parameter`` whole, with the values that it has; NaN where it has none."""
        name, blank = self._names.get(parameter), parameter in self._blank
        whole = None if name is None else self._owned.masters.get(name)
        self._blank.discard(parameter)
        if whole is None:
            if isinstance(parameter, DTensor) and not blank:
                data = parameter.full_tensor()
            else:
                dtype = parameter.dtype if name is None else self._owned.dtypes[name]
                data = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
                if data.is_floating_point():
                    data.fill_(math.nan)
            whole = nn.Parameter(data, parameter.requires_grad)
        if name is not None and not blank:
            (owner,) = self._owned.plan.owners[name]
            dist.broadcast(whole.detach(), src=owner)
        return whole


def _replaced(value: Any, others: Mapping[Tensor, Tensor]) -> Any:
    """``value`` with some of its tensors replaced by ``others``."""
    if isinstance(value, Tensor):
        return others.get(value, value)
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, others) for each in value)
    if isinstance(value, dict):
        return {key: _replaced(each, others) for key, each in value.items()}
    return value
