"""Owned parameters that come from the meta device, until they have values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dmuon.names import listed
from dmuon.ownership.absent import placeholder

if TYPE_CHECKING:
    from dmuon.ownership.owned import Owned


def leave_meta(parameter: nn.Parameter, device: torch.device | str) -> None:
    """Turn a parameter on the meta device into one on ``device`` that has no memory yet; it stays the same object."""
    other = nn.Parameter(placeholder(parameter.shape, parameter.dtype, device), parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]


def require_values(owned: Owned, modules: Iterable[nn.Module]) -> None:
    """Let the first call of any of ``modules`` raise, on every rank, if owned weights never got values."""
    if not owned.unset:
        return

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def check(module: nn.Module, args: Any) -> None:
        mine = {
            name for name, master in owned.masters.items() if name in owned.unset and master.isnan().all()
        }
        found = set().union(*owned.control.gather(mine))
        missing = [name for name in owned.parameters if name in found]
        if missing:
            raise RuntimeError(
                f"{listed(missing)} came from the meta device and never got values: call "
                "dmuon.materialize(model), or load a checkpoint, before the first forward"
            )
        owned.unset.clear()
        for handle in handles:
            handle.remove()

    handles = [module.register_forward_pre_hook(check, prepend=True) for module in dict.fromkeys(modules)]
