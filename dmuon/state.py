"""The optimizer's state: made before it is needed, and checked before any of it is loaded."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dmuon.adamw import ready
from dmuon.groups import OPTIONS
from dmuon.matrix_step import momentum_of
from dmuon.slots import clean

if TYPE_CHECKING:
    from dmuon.ownership.owned import Owned

STATE = {"muon": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}
"""What the state of a parameter holds, by algorithm; AdamW's is torch.optim.AdamW's."""


def fill_state(optimizer: torch.optim.Optimizer, owned: Owned | None, frozen: Container[Tensor] = ()) -> None:
    """Give every trainable parameter the zeros that its first step would begin with, unless it has state.

    ``frozen``: the parameters that are not trainable and are to have state nevertheless.

    Of an owned model, what another rank owns gets an empty state: so every rank has an entry for every parameter, as
    torch's functions for distributed state dicts want it.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            weight = parameter
            if owned is not None and parameter in owned.params:
                weight = owned.masters_of.get(parameter)
                optimizer.state.setdefault(parameter, {})
            if weight is None or not (parameter.requires_grad or parameter in frozen):
                continue
            if group["algorithm"] == "muon":
                momentum_of(weight, optimizer.state[parameter])
            else:
                ready(optimizer.state[parameter], weight, group["fused"])


def split_owned(
    optimizer: torch.optim.Optimizer, owned: Owned, state_dict: dict[str, Any]
) -> tuple[dict[str, Any], dict[Tensor, Tensor]]:
    """A checked state dict without the state of owned parameters, and the momentum of those that this rank owns.

    torch would cast a momentum to the dtype of its parameter, which shows the dtype of published weights.
    """
    state, momenta = dict(state_dict["state"]), {}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=False):
            if parameter in owned.params:
                found = state.pop(index, None)
                if found and parameter in owned.masters_of:
                    momenta[parameter] = found["momentum_buffer"].to(owned.masters_of[parameter])
    return {**state_dict, "state": state}, momenta


def check_loadable(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], owned: Owned | None = None
) -> None:
    """Raise a ValueError that says what is wrong if ``state_dict`` is not of an optimizer like this one."""
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(
            f"the state dict lacks {' and '.join(map(repr, missing))}, it has {sorted(state_dict) or 'nothing'}: "
            "give what the optimizer's own state_dict() returned"
        )
    ours, saved = optimizer.param_groups, state_dict["param_groups"]
    if any(group.get("algorithm") not in STATE for group in saved):
        raise ValueError(
            "the state dict is not a dmuon.Muon's: its groups name no algorithm. "
            "A state of torch.optim.AdamW or torch.optim.Muon cannot be loaded"
        )
    if [group["algorithm"] for group in ours] != [group["algorithm"] for group in saved]:
        raise ValueError(
            f"the optimizer's groups are {[group['algorithm'] for group in ours]}, "
            f"the state dict's {[group['algorithm'] for group in saved]}"
        )
    if all("param_names" in group for group in (*ours, *saved)):
        _check_names(ours, saved)
    for group, other in zip(ours, saved, strict=True):
        lacking = sorted({"params", *OPTIONS[group["algorithm"]]} - other.keys())
        if lacking:
            raise ValueError(f"a {group['algorithm']} group of the state dict lacks {', '.join(lacking)}")
        # Unequal lengths are torch's to report.
        for k, (parameter, index) in enumerate(zip(group["params"], other["params"], strict=False)):
            label = repr(group["param_names"][k]) if "param_names" in group else str(k)
            state = state_dict["state"].get(index)
            _check_state(label, parameter, group["algorithm"], state or {})
            if owned is not None and parameter in owned.masters_of and state is not None and not state:
                raise ValueError(
                    f"the state of parameter {label} was on another rank when this state dict was made: "
                    "save and load with torch.distributed.checkpoint or dmuon.save_checkpoint"
                )


def _check_names(ours: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    here, there = _names(ours), _names(saved)
    wanted, found = set(chain.from_iterable(here)), set(chain.from_iterable(there))
    if wanted != found:
        raise ValueError(
            "the state dict is of other parameters: "
            f"it lacks {sorted(wanted - found) or 'none'} and has {sorted(found - wanted) or 'none'} too many"
        )
    for k, (names, others) in enumerate(zip(here, there, strict=False)):
        if names != others:
            raise ValueError(f"group {k} holds {names}, but {others} in the state dict: the order must agree")


def _names(groups: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    return [[clean(name.removeprefix("module.")) for name in group["param_names"]] for group in groups]


def _check_state(label: str, parameter: Tensor, algorithm: str, state: Mapping[str, Any]) -> None:
    if not state:
        return
    expected = STATE[algorithm]
    if set(state) != expected:
        raise ValueError(f"the saved state of parameter {label} is {sorted(state)}, not {sorted(expected)}")
    for key, value in state.items():
        if key == "step":
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"the saved {key} of parameter {label} is {value!r}, no tensor")
        if value.shape != parameter.shape:
            shapes = f"{tuple(value.shape)}, not {tuple(parameter.shape)}"
            raise ValueError(f"the saved {key} of parameter {label} has shape {shapes}")
        if type(parameter).__name__ == "DTensor" and type(value).__name__ != "DTensor":
            raise ValueError(
                f"the saved {key} of parameter {label} is whole, but the parameter is sharded: load it with "
                "set_optimizer_state_dict(..., options=StateDictOptions(full_state_dict=True))"
            )
