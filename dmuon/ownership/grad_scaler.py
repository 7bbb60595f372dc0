"""Loss scaling for models that dmuon and FSDP2 share."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from dmuon.muon import Muon
from dmuon.ownership.owned import Owned
from dmuon.shards import local


class GradScaler(torch.amp.GradScaler):
    """:class:`torch.amp.GradScaler` that also scales for the optimizer of an owned model.

    :meth:`unscale_` brings the gradients of such a model to their owners, which :meth:`step` does where nobody has
    called it; both are collective then. A NaN or Inf in any gradient on any rank skips the step on all ranks, and
    :meth:`update` lowers the scale on all. With any other optimizer it is torch's.

    Args:
        args, kwargs: of :class:`torch.amp.GradScaler`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._views: dict[torch.optim.Optimizer, _View] = {}

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale. Collective of an owned model.

        Raises:
            ValueError: gradients are in fp16.
            RuntimeError: it was called since the last :meth:`update`.
        """
        optimizer = self._view(optimizer)
        if isinstance(optimizer, _View) and self.is_enabled():
            optimizer.refresh()
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Take the optimizer's step unless a gradient on any rank is not finite. Collective of an owned model.

        Returns:
            What the optimizer's step returns; None if it was skipped.
        """
        return super().step(self._view(optimizer), *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Choose the next scale by whether steps were skipped."""
        super().update(new_scale)
        self._views.clear()

    def _view(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """What torch's scaler is to see of it; the same one until the next update, which it is told apart by."""
        if isinstance(optimizer, Muon) and optimizer._owned is not None:
            return cast(
                torch.optim.Optimizer, self._views.setdefault(optimizer, _View(optimizer, optimizer._owned))
            )
        return optimizer


class _View:
    """The optimizer of an owned model, with groups of what has this rank's gradients.

    All of these are whole or local, and ranks agree by themselves: torch's scaler would ask a mesh of each DTensor.
    """

    def __init__(self, optimizer: Muon, owned: Owned) -> None:
        self.step = optimizer.step
        self._optimizer, self._owned = optimizer, owned
        self.param_groups: list[dict[str, Any]] = []

    def refresh(self) -> None:
        if torch.float16 in self._owned.dtypes.values():
            # Raised by all ranks, not by those alone that own such a matrix.
            raise ValueError(
                "gradients of owned parameters in fp16 cannot be unscaled: own an fp32 model with "
                "compute_dtype=torch.float16"
            )
        self._owned.finish()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        weights = [self._owned.masters_of.get(parameter, parameter) for parameter in parameters]
        gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
        bearers = [*map(_bearer, gradients), _bearer(self._witness(gradients))]
        self.param_groups = [{"params": bearers}]

    def _witness(self, gradients: list[Tensor]) -> Tensor:
        """Inf on every rank if any gradient of any rank is not finite, else zero."""
        device = next(iter(self._owned.params)).device
        largest = get_total_norm([gradient for gradient in gradients if gradient.numel()], math.inf)
        bad = self._owned.sum((~largest.isfinite()).to(device, torch.float32))
        return torch.where(bad > 0, math.inf, 0.0).to(torch.float32)


def _bearer(gradient: Tensor) -> Tensor:
    """A tensor whose gradient is ``gradient``; it takes no memory."""
    bearer = gradient.detach()
    bearer.grad = gradient
    return bearer
