"""The options of parameter groups: which there are, whether their values can be used, and what ranks share of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dmuon.kernels.coefficients import NAMED, Triple, resolve_coefficients
from dmuon.kernels.precision import PRECISIONS
from dmuon.lr_adjust import AdjustRule, check_rule

if TYPE_CHECKING:
    from dmuon.ownership.owned import Owned

SHARED = ("lr", "weight_decay", "maximize")
VARIANTS = {"normuon_beta2": None, "cautious_decay": False, "stochastic_rounding": False}
"""Options that change the update, with the values that leave it alone."""
OPTIONS = {
    "muon": (*SHARED, "momentum", "nesterov", "adjust_lr", "coefficients", "precision", *VARIANTS),
    "adamw": (*SHARED, "betas", "eps", "fused"),
}
"""What a group of each algorithm holds beside ``params``, ``param_names`` and ``algorithm``."""


def check_options(options: Mapping[str, Any], *, synchronize: bool = True) -> dict[str, Any]:
    """Check the known among ``options`` and return all as plain data for state dicts.

    Args:
        options: of the constructor or of a group.
        synchronize: whether to wait for tensors that are not on the CPU; else their values are not looked at.

    Raises:
        ValueError: a value is out of range or unknown.
        TypeError: a value is of the wrong kind.
    """
    plain = dict(options)
    for key in ("lr", "adamw_lr", "weight_decay", "eps", "adamw_eps"):
        if key in options:
            plain[key] = _number(key, options[key], tensor_allowed="lr" in key, synchronize=synchronize)
    if options.get("adamw_weight_decay") is not None:
        plain["adamw_weight_decay"] = _number("adamw_weight_decay", options["adamw_weight_decay"])
    if "momentum" in options:
        plain["momentum"] = _number("momentum", options["momentum"], below=1.0)
    if isinstance(options.get("normuon_beta2"), bool):
        raise TypeError(
            f"normuon_beta2 must be a number in [0, 1), or None for Muon, got {options['normuon_beta2']}"
        )
    if options.get("normuon_beta2") is not None:
        plain["normuon_beta2"] = _number("normuon_beta2", options["normuon_beta2"], below=1.0)
    for key in ("cautious_decay", "stochastic_rounding"):
        if not isinstance(options.get(key, False), bool):
            raise TypeError(f"{key} must be True or False, got {options[key]!r}")
    for key in ("betas", "adamw_betas"):
        if key in options:
            if not isinstance(options[key], Sequence) or len(options[key]) != 2:
                raise ValueError(f"{key} must be two numbers, got {options[key]!r}")
            plain[key] = tuple(_number(key, beta, below=1.0) for beta in options[key])
    precision = options.get("precision", "auto")
    if precision != "auto" and precision not in PRECISIONS:
        raise ValueError(f"precision must be 'auto' or one of {', '.join(PRECISIONS)}, got {precision!r}")
    if "coefficients" in options:
        plain["coefficients"] = _plain_coefficients(options["coefficients"])
    return plain


def check_keys(keys: Iterable[str], known: Iterable[str]) -> None:
    """Raise a ValueError if one of ``keys`` looks like a misspelt one of ``known``.

    As with torch, other keys are the caller's own. Schedulers' ``initial_lr`` and ``base_momentum`` are such.
    """
    known = list(known)
    for key in keys:
        if any(key.endswith(f"_{option}") for option in known):
            continue
        begun = [option for option in known if option.startswith(f"{key.lower()}_")]
        for meant in begun or get_close_matches(key.lower(), known, n=1, cutoff=0.75):
            raise ValueError(f"a parameter group has no option {key!r}: did you mean {meant!r}?")


class CheckedOptions:
    """Checks the options of an optimizer's groups, of which anyone may change any at any time.

    Args:
        rules: what a group's ``adjust_lr`` may name.
    """

    def __init__(self, rules: Mapping[str, AdjustRule]) -> None:
        self._rules = rules
        self._known: list[tuple[Any, ...]] = []

    def check(self, groups: Sequence[dict[str, Any]], owned: Owned | None) -> None:
        """Check what has changed since the last call.

        Raises:
            ValueError, TypeError: as :func:`check_options`, or an option is gone.
        """
        found = [_values(k, group) for k, group in enumerate(groups)]
        if found == self._known:
            return
        plain = [check_options(_options(group), synchronize=False) for group in groups]
        for group in groups:
            if group["algorithm"] == "muon":
                check_rule(group["adjust_lr"], self._rules)
                if owned is not None:
                    owned.check_options(group)
        for group, options in zip(groups, plain, strict=True):
            group.update(options)
        self._known = found


def facts_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What ranks that train one model must have in common in their optimizers' groups, by what to call it.

    The values of tensors are left out, because to read them would be to wait for them.
    """
    facts: dict[str, Any] = {"algorithms of the groups": [group["algorithm"] for group in groups]}
    for k, group in enumerate(groups):
        facts[f"parameters of group {k}"] = list(group.get("param_names", ()))
        for key, value in _options(group).items():
            # Whether a kernel can be fused goes by the memory of a rank's shards.
            if key != "fused":
                facts[f"option {key} of group {k}"] = "a tensor" if isinstance(value, Tensor) else value
    return facts


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in OPTIONS[group["algorithm"]]}


def _values(k: int, group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What to remember of group ``k``; tensors by what they are, not by their values."""
    algorithm = group.get("algorithm")
    if algorithm not in OPTIONS:
        raise ValueError(f"algorithm must be one of {', '.join(OPTIONS)}, got {algorithm!r} in group {k}")
    lacking = [key for key in OPTIONS[algorithm] if key not in group]
    if lacking:
        raise ValueError(f"group {k} of the optimizer lacks {', '.join(lacking)}")
    values = _options(group).values()
    return algorithm, *(id(value) if isinstance(value, Tensor) else value for value in values)


def _number(
    key: str, value: Any, below: float = math.inf, tensor_allowed: bool = False, synchronize: bool = True
) -> Any:
    """``value``, of numpy as Python's, if it is a number from 0 to ``below``."""
    if isinstance(value, Tensor):
        if not tensor_allowed:
            raise TypeError(f"{key} must be a number, got a tensor")
        if value.ndim:
            raise ValueError(f"{key} must be a number or a 0-D tensor, got shape {tuple(value.shape)}")
        if not synchronize and value.device.type != "cpu":
            return value
    elif not isinstance(value, Real):
        raise TypeError(f"{key} must be a number, got {value!r}")
    if not 0.0 <= value < below:
        span = "at least 0 and finite" if below == math.inf else f"in [0, {below:g})"
        raise ValueError(f"{key} must be {span}, got {value}")
    return value if isinstance(value, (int, Tensor)) else float(value)


def _plain_coefficients(spec: Any) -> str | tuple[Triple, ...]:
    resolved = resolve_coefficients(spec)
    named = resolved.name in NAMED and NAMED[resolved.name]() == resolved
    plain: str | tuple[Triple, ...] = resolved.name if named else resolved.steps
    return plain
