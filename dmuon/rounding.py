"""Stochastic rounding from fp32 to bf16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dmuon.ownership.owned import Owned

_HIGH_HALF = -(1 << 16)
"""The bits of an fp32 number that bf16 has, too."""


class StochasticRounding:
    """Rounds to one of the two neighbours in bf16, the nearer one more often, so that the mean is exact.

    The random numbers are its own: of owned models, ranks would else draw more or less from torch's generators, by
    what they own, and no longer agree on what they draw from these together.
    """

    def __init__(self) -> None:
        self._seed = 0
        self._generators: dict[torch.device, torch.Generator] = {}

    def reseed(self) -> None:
        """Take a seed from torch's generator for CPUs, which :func:`torch.manual_seed` sets; once a step.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph of the step would round by the same random numbers at every replay: "
                "set stochastic_rounding=False, or take the step outside of the graph"
            )
        self._seed = int(torch.randint(1 << 62, (), device="cpu"))
        self._generators.clear()

    def write(self, source: Tensor, target: Tensor) -> None:
        """Round ``source`` (fp32) to ``target`` (bf16) of the same shape. NaN and Inf stay what they are."""
        device = source.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        bits = torch.randint(
            1 << 16, source.shape, dtype=torch.int32, device=device, generator=self._generators[device]
        )
        # The carry out of the low half rounds away from zero.
        bits.add_(source.view(torch.int32)).bitwise_and_(_HIGH_HALF)
        # A GPU's NaN has all bits set: with the carry it would be zero.
        target.copy_(torch.where(source.isnan(), source, bits.view(torch.float32)))


def is_due(groups: Iterable[Mapping[str, Any]], owned: Owned | None) -> bool:
    """Whether a step rounds anything, here or, of an owned model, on another rank."""
    rounding = [group for group in groups if group.get("stochastic_rounding")]
    if not rounding:
        return False
    dtypes = {} if owned is None else {owned.parameters[name]: dtype for name, dtype in owned.dtypes.items()}
    return any(
        dtypes.get(parameter, parameter.dtype) == torch.bfloat16
        for group in rounding
        for parameter in group["params"]
    )
