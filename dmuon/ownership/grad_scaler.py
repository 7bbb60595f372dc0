"""Loss scaling for models that dmuon and FSDP2 share."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from dmuon.muon import Muon
from dmuon.ownership.owned import Owned
from dmuon.shards import local
from dmuon.state import check_dict


class GradScaler(torch.amp.GradScaler):
    """:class:`torch.amp.GradScaler` that also scales for the optimizer of an owned model.

    :meth:`unscale_` brings the gradients of such a model to their owners, which :meth:`step` does where nobody has
    called it; both are collective then. A NaN or Inf in any gradient on any rank skips the step on all ranks, and
    :meth:`update` lowers the scale on all. Ranks that do not have the same scaler raise, all of them, before a weight
    moves. With any other optimizer it is torch's.

    Args:
        args, kwargs: of :class:`torch.amp.GradScaler`.

    Raises:
        ValueError: the scale to begin with is not positive, or not finite in fp32.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_scale("init_scale", self.get_scale())
        self._views: dict[torch.optim.Optimizer, _View] = {}

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale. Collective of an owned model.

        Raises:
            ValueError: gradients are in fp16.
            RuntimeError: it was called since the last :meth:`update`; or the ranks' scalers differ, or some have none.
        """
        super().unscale_(self._view(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Take the optimizer's step unless a gradient on any rank is not finite. Collective of an owned model.

        Returns:
            What the optimizer's step returns; None if it was skipped.

        Raises:
            RuntimeError: the ranks' scales differ; no weight has moved.
        """
        view = self._view(optimizer)
        result = super().step(view, *args, **kwargs)
        if isinstance(view, _View) and self.is_enabled():
            # Torch's scaler has waited for the device by now.
            view.check_scales()
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Choose the next scale by whether steps were skipped."""
        super().update(new_scale)
        self._views.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, on all ranks the same.

        Raises:
            TypeError: it is no dict.
            ValueError: it lacks a key, or its scale is not positive, or not finite in fp32.
            RuntimeError: it is of a scaler that was not enabled.
        """
        check_dict(state_dict)
        lacking = sorted(self.state_dict().keys() - state_dict.keys())
        if state_dict and lacking:
            raise ValueError(f"the state dict of a GradScaler lacks {', '.join(lacking)}")
        if state_dict and self.is_enabled():
            _check_scale("scale", state_dict["scale"])
        super().load_state_dict(state_dict)

    def _facts(self) -> dict[str, Any]:
        """What must be equal on all ranks beside the scale, which may be on a device: that is compared there."""
        return {
            "scaler's growth_factor": self.get_growth_factor(),
            "scaler's backoff_factor": self.get_backoff_factor(),
            "scaler's growth_interval": self.get_growth_interval(),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_views": {}}

    def _view(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """What torch's scaler is to see of it; the same one until the next update, which it is told apart by."""
        if not isinstance(optimizer, Muon) or optimizer._owned is None:
            return optimizer
        view = self._views.setdefault(optimizer, _View(self, optimizer, optimizer._owned))
        return cast(torch.optim.Optimizer, view)


class _View:
    """The optimizer of an owned model, with groups of what has this rank's gradients.

    All of these are whole or local, and ranks agree by themselves: torch's scaler would ask a mesh of each DTensor.
    """

    def __init__(self, scaler: GradScaler, optimizer: Muon, owned: Owned) -> None:
        self.step = optimizer.step
        self._scaler, self._optimizer, self._owned = scaler, optimizer, owned
        self._scales: Tensor | None = None

    @cached_property
    def param_groups(self) -> list[dict[str, Any]]:
        """Torch's scaler reads them to unscale, when it has found that it may. Collective."""
        if torch.float16 in self._owned.dtypes.values():
            # Raised by all ranks, not by those alone that own such a matrix.
            raise ValueError(
                "gradients of owned parameters in fp16 cannot be unscaled: own an fp32 model with "
                "compute_dtype=torch.float16"
            )
        self._owned.finish("GradScaler.unscale_", self._scaler._facts)
        self._owned.end_accumulation()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        weights = [self._owned.masters_of.get(parameter, parameter) for parameter in parameters]
        gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
        bearers = [*map(_bearer, gradients), _bearer(self._witness(gradients))]
        return [{"params": bearers}]

    def check_scales(self) -> None:
        """Raise on all ranks unless they have the same scale."""
        scales = [] if self._scales is None else self._scales.tolist()
        for rank, scale in enumerate(scales):
            if scale != scales[0]:
                raise RuntimeError(
                    f"ranks disagree on the scale: rank 0 has {scales[0]:g}, rank {rank} has {scale:g}. No weight has "
                    "moved; every rank must load the same state and give GradScaler.update the same new_scale"
                )

    def _witness(self, gradients: list[Tensor]) -> Tensor:
        """Inf on every rank if any gradient of any rank is not finite or the scales differ, else zero."""
        device = next(iter(self._owned.params)).device
        largest = get_total_norm([gradient for gradient in gradients if gradient.numel()], math.inf)
        # A place for each rank's scale: their sum is exact.
        found = torch.zeros(1 + dist.get_world_size(), dtype=torch.float32, device=device)
        found[0] = ~largest.isfinite()
        found[1 + dist.get_rank()] = self._scaler.scale(torch.ones((), device=device))
        found = self._owned.sum(found)
        self._scales = found[1:]
        bad = (found[0] > 0) | (self._scales != self._scales[0]).any()
        return torch.where(bad, math.inf, 0.0).to(torch.float32)


def _check_scale(name: str, scale: Any) -> None:
    if not isinstance(scale, (int, float)) or not 0 < scale <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name} must be positive and finite in fp32, got {scale!r}")


def _bearer(gradient: Tensor) -> Tensor:
    """A tensor whose gradient is ``gradient``; it takes no memory."""
    bearer = gradient.detach()
    bearer.grad = gradient
    return bearer
