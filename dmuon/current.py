"""Whether an optimizer can take a step: has the parameters that its model trains, and gradients that it can use."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmuon.ownership.absent import is_owned

if TYPE_CHECKING:
    from dmuon.ownership.owned import Owned

_LAST = "Build the optimizer last: after dmuon.own, fully_shard, and whatever moves or replaces parameters"


def check_current(
    model: nn.Module | None, groups: Sequence[dict[str, Any]], owned: Owned | None, routed: Container[Tensor]
) -> None:
    """Raise rather than leave alone what only seems to have no gradient.

    Args:
        model: that the optimizer was built from, if any.
        groups: of the optimizer.
        owned: the ownership of the model when the optimizer was built.
        routed: the parameters whose matrices it knows.

    Raises:
        RuntimeError: a group has other names than parameters; a parameter without a gradient has been owned since, or
            is not in the model any more; one of a Muon group is not the one that the optimizer was built with; or an
            owned one that is trainable is in no group.
    """
    for k, group in enumerate(groups):
        names = group.get("param_names", group["params"])
        if len(names) != len(group["params"]):
            raise RuntimeError(
                f"group {k} of the optimizer has {len(group['params'])} params but {len(names)} param_names: "
                "change both alike"
            )
    for group in groups:
        swapped = [k for k, parameter in enumerate(group["params"]) if parameter not in routed]
        if group["algorithm"] == "muon" and swapped:
            found = group["params"][swapped[0]]
            name = group.get("param_names", group["params"])[swapped[0]]
            raise RuntimeError(
                f"parameter {_named(name)} of a Muon group is now another {type(found).__name__} than the optimizer "
                f"was built with, as when accelerate's prepare has sharded it. {_LAST}"
            )
    if owned is not None:
        held = {parameter for group in groups for parameter in group["params"]}
        for name, parameter in owned.parameters.items():
            if parameter.requires_grad and parameter not in held:
                raise RuntimeError(
                    f"owned parameter {name!r} is in no group of the optimizer, which would never update it: add it "
                    "by add_param_group, or freeze it by requires_grad_(False)"
                )
    idle = [
        (name, parameter)
        for group in groups
        for name, parameter in zip(group.get("param_names", group["params"]), group["params"], strict=True)
        if parameter.grad is None and not (owned is not None and parameter in owned.params)
    ]
    for name, parameter in idle:
        if is_owned(parameter):
            raise RuntimeError(
                f"parameter {_named(name)} has been owned since the optimizer was built, which would never update "
                f"it. {_LAST}"
            )
    if model is None or not (gone := _missing(model, idle)):
        return
    from dmuon.ownership.sharded import reshard

    reshard(model)
    if gone := _missing(model, idle):
        raise RuntimeError(
            f"parameter {_named(gone[0])} is not in the model any more: it has been wrapped or replaced since the "
            f"optimizer was built, which would never update it. {_LAST}"
        )


def check_gradients(groups: Sequence[dict[str, Any]]) -> None:
    """Raise a RuntimeError if a parameter of ``groups`` has a sparse gradient."""
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which "
                    "neither Muon nor AdamW can use; build its embedding with sparse=False"
                )


def _missing(model: nn.Module, idle: Sequence[tuple[Any, Tensor]]) -> list[Any]:
    present = set(model.parameters()) if idle else set()
    return [name for name, parameter in idle if parameter not in present]


def _named(name: Any) -> str:
    return repr(name) if isinstance(name, str) else f"of shape {tuple(name.shape)}"
