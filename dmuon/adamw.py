"""torch's own AdamW on a group of parameters, sharded or not."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dmuon.shards import local


def step_adamw(group: dict[str, Any], states: MutableMapping[Tensor, dict[str, Any]]) -> None:
    """Update the parameters of ``group`` that have a gradient; ``states`` is by parameter."""
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    gradients: list[Tensor] = [parameter.grad for parameter in parameters]
    chosen = [ready(states[parameter], parameter, group["fused"]) for parameter in parameters]
    if group["fused"]:
        # The fused kernels walk memory: what is laid out otherwise than its parameter would be misread.
        gradients = [_laid_out_like(p, g) for p, g in zip(parameters, gradients, strict=True)]
        for parameter, state in zip(parameters, chosen, strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = _laid_out_like(parameter, state[key])
    adamw(
        [local(parameter) for parameter in parameters],
        [local(gradient) for gradient in gradients],
        [local(state["exp_avg"]) for state in chosen],
        [local(state["exp_avg_sq"]) for state in chosen],
        [],
        [state["step"] for state in chosen],
        fused=group["fused"] or None,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def ready(state: dict[str, Tensor], parameter: Tensor, fused: bool) -> dict[str, Tensor]:
    """``state``, with the zeros that a first step begins with if it is empty."""
    if not state:
        # The fused kernels count on the device; the others on the host, to spare launches.
        device = parameter.device if fused else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


def _laid_out_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
