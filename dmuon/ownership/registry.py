"""How a model carries its ownership. Light: imports nothing distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from dmuon.ownership.owned import Owned

ATTRIBUTE = "_dmuon_owned"


def ownership_of(model: nn.Module) -> Owned | None:
    """The ownership of ``model``, or of a model that it wraps."""
    for module in model.modules():
        if ATTRIBUTE in module.__dict__:
            owned: Owned = module.__dict__[ATTRIBUTE]
            return owned
    return None


def require_ownership(model: nn.Module) -> Owned:
    """The same; a ValueError where there is none."""
    owned = ownership_of(model)
    if owned is None:
        raise ValueError("the model is not owned: call dmuon.own(model, mesh) first")
    return owned
