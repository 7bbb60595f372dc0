"""Whether a saved optimizer state fits an optimizer, checked before any of it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dmuon.groups import OPTIONS
from dmuon.slots import clean

STATE = {"muon": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}
"""What the state of a parameter holds, by algorithm; AdamW's is torch.optim.AdamW's."""


def check_loadable(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
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
            _check_state(label, parameter, group["algorithm"], state_dict["state"].get(index, {}))


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
        if key != "step" and value.shape != parameter.shape:
            shapes = f"{tuple(value.shape)}, not {tuple(parameter.shape)}"
            raise ValueError(f"the saved {key} of parameter {label} has shape {shapes}")
