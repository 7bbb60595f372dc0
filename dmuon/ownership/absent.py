"""Parameters whose values are elsewhere: their metadata can be had, reading them raises."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_METADATA: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name) for name in ("size", "dim", "ndimension", "numel", "nelement", "stride")),
        *(getattr(Tensor, name) for name in ("storage_offset", "element_size", "__len__")),
        *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex", "get_device", "is_shared")),
        *(getattr(Tensor, name) for name in ("requires_grad_", "retain_grad", "register_hook")),
        *(getattr(Tensor, name) for name in ("register_post_accumulate_grad_hook", "is_set_to")),
        *(getattr(Tensor, name) for name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")),
        *(torch.numel, torch.is_floating_point, torch.is_complex, torch.result_type),
        *(torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
        torch._has_compatible_shallow_copy_type,  # nn.Module.to and the like ask it
        Tensor.data_ptr,  # accelerate tells parameters apart by it
    }
)
"""Functions that read no values. What they make is an ordinary tensor."""

_ALIASES: frozenset[Any] = frozenset(
    # By a view of a parameter others find the node that accumulates its gradient.
    {Tensor.view_as, Tensor.expand_as}
    | {Tensor.detach, torch.detach, Tensor.view, Tensor.permute, Tensor.transpose, Tensor.narrow}
)
"""Functions that read no values, and whose result has none either."""

_MOVES: frozenset[Any] = frozenset(
    {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.type, Tensor.contiguous}
    | {Tensor.half, Tensor.bfloat16, Tensor.float, Tensor.double}
)
"""Functions that return the tensor itself where nothing is to be done."""


class Absent(Tensor):
    """A tensor whose values must not be read.

    Attributes:
        _absence: why not, and what to do.
        _present: the class of what is not absent.
        _alias: that of what functions return which alias it.
    """

    _absence: str
    _present: type[Tensor]
    _alias: type[Absent]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.empty_like:  # as nn.Module.to_empty calls it: what has no values needs no memory
            return _empty_like(*args, **(kwargs or {}))
        # Properties come as the methods of their descriptors.
        is_property = type(func).__name__ == "method-wrapper"
        if not is_property and func not in _METADATA and func not in _ALIASES and func not in _MOVES:
            raise RuntimeError(_find(args, kwargs)._absence)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _MOVES:
            if result is not args[0]:
                raise RuntimeError(
                    "an owned model cannot be converted or moved: do that before dmuon.own, and see its compute_dtype "
                    f"for mixed precision. {_find(args, kwargs)._absence}"
                )
        elif isinstance(result, Tensor) and (func in _ALIASES or (is_property and _is_view(func))):
            _become(result, cls._alias, _find(args, kwargs)._absence)
        return result

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return (
                f"<{type(self).__name__} {tuple(self.shape)} {self.dtype} on {self.device}: {self._absence}>"
            )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(f"an owned model cannot be copied: copy it before dmuon.own. {self._absence}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"an absent parameter cannot be pickled. {self._absence}")


class AbsentTensor(Absent):
    """What ``data`` and ``detach`` give of an absent parameter."""


class AbsentParameter(Absent, nn.Parameter):
    """A parameter for as long as it is absent. Its class is set and taken back, as torch does with lazy ones."""


AbsentTensor._present, AbsentTensor._alias = Tensor, AbsentTensor
AbsentParameter._present, AbsentParameter._alias = nn.Parameter, AbsentTensor


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """NaN without memory: what reads it below Python, where nothing can raise, spoils the loss for all to see."""
    return torch.full((), math.nan, dtype=dtype, device=device).expand(shape)


def hide(
    parameter: nn.Parameter,
    values: Tensor,
    why: str,
    shown: Tensor | None = None,
    kind: type[Absent] = AbsentParameter,
) -> None:
    """Let ``parameter`` show the placeholder ``values`` and refuse to be read.

    Args:
        parameter: present.
        values: see :func:`placeholder`.
        why: it cannot be read, and what to do.
        shown: the tensor that holds what it shows, where it is a DTensor; None for itself.
        kind: its class meanwhile.
    """
    (parameter if shown is None else shown).data = values
    _become(parameter, kind, why)


def reveal(parameter: nn.Parameter, values: Tensor, shown: Tensor | None = None) -> None:
    """Make it an ordinary parameter again that shows ``values``."""
    if isinstance(parameter, Absent):
        parameter.__class__ = type(parameter)._present  # type: ignore[assignment]
    (parameter if shown is None else shown).data = values


def is_owned(parameter: Tensor) -> bool:
    """Whether it has ever been absent."""
    return "_absence" in parameter.__dict__


def mark_master(parameter: Tensor) -> None:
    """Note that it is what an owner keeps."""
    parameter._dmuon_master = True  # type: ignore[attr-defined]


def is_master(parameter: Tensor) -> bool:
    """Whether it is what an owner keeps of an owned parameter."""
    return "_dmuon_master" in parameter.__dict__


def same_place(parameter: Tensor, values: Tensor, shown: Tensor | None = None) -> bool:
    """Whether ``parameter``, by the tensor ``shown``, shows just ``values``; while it is absent, whether it would."""
    shown = parameter if shown is None else shown
    with torch._C.DisableTorchFunctionSubclass():
        alike = (
            shown.shape == values.shape
            and parameter.dtype == shown.dtype == values.dtype
            and parameter.device == shown.device == values.device
        )
        if isinstance(parameter, Absent):
            return alike and not any(shown.stride())
        return alike and shown.data_ptr() == values.data_ptr()


def _become(tensor: Tensor, kind: type[Absent], why: str) -> None:
    tensor.__class__ = kind
    tensor._absence = why  # type: ignore[attr-defined]


def _empty_like(like: Absent, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    empty = placeholder(like.shape, dtype or like.dtype, like.device if device is None else device)
    _become(empty, AbsentTensor, like._absence)
    return empty


def _find(args: Sequence[Any], kwargs: dict[str, Any] | None) -> Absent:
    """The absent tensor among the arguments, in lists of them too."""
    values = [*args, *(kwargs or {}).values()]
    while values:
        value = values.pop(0)
        if isinstance(value, Absent):
            return value
        if isinstance(value, (list, tuple)):
            values += value
    raise AssertionError("called without an absent tensor")


def _is_view(getter: Any) -> bool:
    """Whether a property gives the tensor itself in another form, unlike its gradient."""
    return getter.__self__.__name__ in ("data", "T", "mT", "H", "mH", "real", "imag")
