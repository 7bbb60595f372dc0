"""The optimizer's state: made before it is needed, and checked before any of it is loaded."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dmuon.adamw import ready
from dmuon.lr_adjust import check_rule
from dmuon.matrix import Matrix
from dmuon.options import OPTIONS, VARIANTS, check_options
from dmuon.ownership.absent import is_owned
from dmuon.shards import is_shared
from dmuon.slots import clean

if TYPE_CHECKING:
    from dmuon.muon import Muon
    from dmuon.ownership.owned import Owned

STATE = {"muon": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}
"""What the state of a parameter holds, by algorithm; AdamW's is torch.optim.AdamW's."""

SECOND_MOMENT = "second_momentum_buffer"
"""Of NorMuon, what that of a matrix holds beside: for each row a mean of squares, shaped as ``Matrix.column`` has it.

In fp32 or wider, which is a small part of the momentum's memory."""


def state_of(
    weight: Tensor, state: dict[str, Tensor], group: Mapping[str, Any], matrix: Matrix
) -> tuple[Tensor, Tensor | None]:
    """The momentum in ``state``, and the second moment if ``group`` has one; zero at first.

    ``matrix``: any of those in ``weight``.
    """
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    if group["normuon_beta2"] is None:
        state.pop(SECOND_MOMENT, None)
        return state["momentum_buffer"], None
    second, column = state.get(SECOND_MOMENT), matrix.column(weight)
    # A weight may get another memory format, and a state dict may come from one that had another.
    if second is None or (matrix.flat and second.stride() != column.stride()):
        zeros = torch.zeros_like(column, dtype=_dtype_of(SECOND_MOMENT, weight))
        state[SECOND_MOMENT] = zeros if second is None else zeros.copy_(second)
    return state["momentum_buffer"], state[SECOND_MOMENT]


def _dtype_of(key: str, weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32) if key == SECOND_MOMENT else weight.dtype


def fill_state(optimizer: Muon, owned: Owned | None, frozen: Container[Tensor] = ()) -> None:
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
                matrix = optimizer._matrices[parameter][0]
                state_of(weight, optimizer.state[parameter], group, matrix)
            else:
                ready(optimizer.state[parameter], weight, group["fused"])


def split_state(
    optimizer: Muon, owned: Owned | None, state_dict: dict[str, Any]
) -> tuple[dict[str, Any], dict[Tensor, dict[str, Tensor]]]:
    """A checked state dict without what torch must not cast to the dtype of a parameter, and what this rank has of it.

    That is the state of owned parameters, which show the dtype of published weights, and all second moments.
    """
    state, kept = dict(state_dict["state"]), {}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=False):
            found, weight = state.get(index) or {}, parameter
            if owned is not None and parameter in owned.params:
                state.pop(index, None)
                weight = owned.masters_of.get(parameter)
            elif SECOND_MOMENT in found:
                state[index] = {key: value for key, value in found.items() if key != SECOND_MOMENT}
                found = {SECOND_MOMENT: found[SECOND_MOMENT]}
            else:
                continue
            if found and weight is not None:
                kept[parameter] = {
                    key: _part(value, weight).to(weight.device, _dtype_of(key, weight))
                    for key, value in found.items()
                }
    return {**state_dict, "state": state}, kept


def with_variants(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Saved ``groups``, with the options that Muon's did not have yet at the values that mean what was done then."""
    return [{**VARIANTS, **group} if group.get("algorithm") == "muon" else dict(group) for group in groups]


def check_dict(state_dict: object) -> None:
    """Raise a TypeError unless it is a dict."""
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")


def _part(value: Tensor, weight: Tensor) -> Tensor:
    """What of a loaded momentum belongs to an owner's ``weight``, which may be a tensor-parallel shard."""
    if not is_shared(weight):
        return value
    from dmuon.ownership.sharded import shard_of

    return shard_of(value, weight)


def check_loadable(optimizer: Muon, state_dict: Mapping[str, Any], owned: Owned | None = None) -> None:
    """Raise an error that says what is wrong if ``state_dict`` is not of an optimizer like this one.

    Raises:
        ValueError: it is of another optimizer, or an option is out of range or unknown.
        TypeError: an option is of the wrong kind.
    """
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
        check_options(other)
        if group["algorithm"] == "muon":
            check_rule(other["adjust_lr"], optimizer._rules)
            _check_variant(group, other)
        # Unequal lengths are torch's to report.
        for k, (parameter, index) in enumerate(zip(group["params"], other["params"], strict=False)):
            label = repr(group["param_names"][k]) if "param_names" in group else str(k)
            state = state_dict["state"].get(index)
            _check_state(label, state or {}, _expected_shapes(optimizer, parameter, other), parameter)
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


def _check_variant(group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    ours, theirs = group["normuon_beta2"], saved["normuon_beta2"]
    if (ours is None) != (theirs is None):
        raise ValueError(second_moment_apart("state dict", theirs))


def second_moment_apart(source: str, beta2: object) -> str:
    """What to say where ``source``, of this ``normuon_beta2``, has a second moment and the optimizer not, or the other
    way round.
    """
    with_it, without = ("optimizer", source) if beta2 is None else (source, "optimizer")
    return (
        f"the {with_it} has NorMuon's second moment, the {without} has not: build the optimizer with "
        f"normuon_beta2={beta2} to load this, and set it in param_groups then to go on with the other"
    )


def _expected_shapes(
    optimizer: Muon, parameter: Tensor, group: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Of the state that ``group`` gives ``parameter``, by key."""
    shape = tuple(parameter.shape)
    shapes = {key: () if key == "step" else shape for key in STATE[group["algorithm"]]}
    if group.get("normuon_beta2") is not None:
        column = optimizer._matrices[parameter][0].column(torch.empty(shape, device="meta"))
        shapes[SECOND_MOMENT] = tuple(column.shape)
    return shapes


def _check_state(
    label: str, state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], parameter: Tensor
) -> None:
    if not state:
        return
    if set(state) != set(shapes):
        raise ValueError(f"the saved state of parameter {label} is {sorted(state)}, not {sorted(shapes)}")
    for key, value in state.items():
        if key == "step":
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"the saved {key} of parameter {label} is {value!r}, no tensor")
        if tuple(value.shape) != shapes[key]:
            raise ValueError(
                f"the saved {key} of parameter {label} has shape {tuple(value.shape)}, not {shapes[key]}"
            )
        if is_shared(parameter) and not is_owned(parameter) and not is_shared(value):
            raise ValueError(
                f"the saved {key} of parameter {label} is whole, but the parameter is sharded: load it with "
                "set_optimizer_state_dict(..., options=StateDictOptions(full_state_dict=True))"
            )
