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
