"""Muon on one device, with AdamW for what is no matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dmuon.batching import Piece, Update, batches
from dmuon.graphs import Replays, replayable
from dmuon.groups import Matrices, check_options, split_group
from dmuon.kernels.coefficients import CoefficientSet, Triple
from dmuon.kernels.gram_ns import gram_ns
from dmuon.lr_adjust import CUSTOM, RULES, AdjustRule, check_rule
from dmuon.ownership.registry import ownership_of
from dmuon.policy import MatrixPolicy
from dmuon.shards import local
from dmuon.slots import slots_of_model
from dmuon.state import check_loadable

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class Muon(torch.optim.Optimizer):
    r"""Muon for matrices, AdamW for everything else.

    For a matrix :math:`W` (fan-out × fan-in) with gradient :math:`G`, momentum :math:`\mu`, learning rate
    :math:`\eta` and weight decay :math:`\lambda`, one step is

    .. math::
        B &\leftarrow \mu B + (1 - \mu) G \\
        U &= \mu B + (1 - \mu) G \text{ with Nesterov momentum, else } B \\
        O &= \mathrm{NS}(U) \approx (U U^\top)^{-1/2}\, U \\
        W &\leftarrow (1 - \eta \lambda)\, W - \eta\, r(\text{rows}, \text{cols})\, O

    NS is a Newton–Schulz iteration: one odd quintic polynomial per step, applied to the singular values of
    :math:`U / \|U\|_F`. O does not depend on the scale of the gradient. :math:`r` is the rule ``adjust_lr``.
    ``coefficients="keller_jordan"`` with ``precision="bf16"`` is what :class:`torch.optim.Muon` does.

    Matrices of equal shape, dtype and device are orthogonalised in one batch, across parameter groups. A step
    needs memory for one batch (:data:`dmuon.batching.BATCH_ELEMENTS` elements at most, or one matrix) and for
    its iteration. On CUDA these stay reserved, and from the third step on iterations are replayed from CUDA graphs
    (``DMUON_GRAPHS=off`` prevents it; a step that is itself being captured uses none). Gradients are only read. A
    parameter whose gradient is None is left alone: no update, no decay, no state.

    The rest is :class:`torch.optim.AdamW`, bit for bit, in its fused form where torch has one.

    Each group of parameters becomes a Muon group, an AdamW group, or one of each, in that order;
    ``group["algorithm"]`` tells them apart and each has its own ``group["lr"]``, so that learning-rate
    schedulers scale both.

    Args:
        model_or_params: a module, whose trainable parameters ``policy`` divides by the layers that hold
            them; or tensors, (name, tensor) pairs, or group dicts, divided by name and shape. A group dict
            may set any of the options below but ``policy`` and ``autotune``, and ``algorithm``: ``"muon"`` or
            ``"adamw"`` for all that it holds. Its ``lr`` is Muon's, unless it holds nothing for Muon.
        lr: Muon's learning rate, a number or a 0-D tensor (read on its device, without a synchronisation).
        weight_decay: decoupled, by the learning rate before ``adjust_lr``.
        momentum: of the exponential moving average, in [0, 1).
        nesterov: look ahead by one momentum step.
        adjust_lr: the factor on the learning rate by a matrix's shape: ``"original"`` √max(1, rows/cols),
            ``"match_rms_adamw"`` 0.2·√max(rows, cols), ``"spectral"`` √(rows/cols), or a function of
            (rows, cols).
        coefficients: of Newton–Schulz: ``"polar_express"``, ``"keller_jordan"``, ``"you"``, a
            :class:`~dmuon.kernels.coefficients.CoefficientSet`, or one (a, b, c) per step.
        precision: of Newton–Schulz: ``"fp64"``, ``"fp32"``, ``"bf16"``, ``"fp16"``, or ``"auto"`` (fp64 for
            fp64 parameters, else fp16 on CUDA and fp32 on a CPU).
        adamw_lr: AdamW's learning rate, a number or a 0-D tensor.
        adamw_betas: AdamW's running-average coefficients.
        adamw_eps: AdamW's term in the denominator.
        adamw_weight_decay: AdamW's weight decay; None for the same as ``weight_decay``.
        policy: which parameters are matrices; None for :class:`~dmuon.policy.MatrixPolicy`'s defaults. An owned
            model (:func:`dmuon.own`) has its own.
        autotune: None leaves the process's choice of kernels as it is; ``"cache"``, ``"jit"`` or ``"off"``
            installs that mode of :mod:`dmuon.autotune` for the whole process.
        maximize: ascend instead of descending; the momentum averages the gradient as it is.

    Raises:
        ValueError: a value out of range, an unknown name, no parameters, a model without a matrix, or a
            parameter that is complex, sharded, on the meta device, no leaf, or given twice.
        TypeError: a value of the wrong kind.

    References:
        Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024,
        https://kellerjordan.github.io/posts/muon. Liu et al., Muon is scalable for LLM training (Moonlight),
        arXiv 2502.16982. Amsel et al., The Polar Express, arXiv 2505.16932.
    """

    def __init__(
        self,
        model_or_params: nn.Module | Params,
        lr: float | Tensor = 0.02,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr: str | AdjustRule = "original",
        coefficients: str | CoefficientSet | Iterable[Triple] = "polar_express",
        precision: str = "auto",
        adamw_lr: float | Tensor = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        policy: MatrixPolicy | None = None,
        autotune: str | None = None,
        maximize: bool = False,
    ) -> None:
        defaults = check_options(
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "adjust_lr": CUSTOM if callable(adjust_lr) else adjust_lr,
                "coefficients": coefficients,
                "precision": precision,
                "adamw_lr": adamw_lr,
                "adamw_betas": adamw_betas,
                "adamw_eps": adamw_eps,
                "adamw_weight_decay": adamw_weight_decay,
                "maximize": maximize,
            }
        )
        if policy is not None and isinstance(model_or_params, nn.Module) and ownership_of(model_or_params):
            raise ValueError("the policy of an owned model is the one that dmuon.own was given")
        self._policy = policy or MatrixPolicy()
        own = {CUSTOM: adjust_lr} if callable(adjust_lr) else {}
        self._rules: Mapping[str, AdjustRule] = {**RULES, **own}
        check_rule(defaults["adjust_lr"], self._rules)
        self._matrices: dict[Tensor, Matrices] = {}
        self._replays = Replays()
        self._owned = ownership_of(model_or_params) if isinstance(model_or_params, nn.Module) else None
        if isinstance(model_or_params, nn.Module):
            model_or_params = self._route(model_or_params)
        elif isinstance(model_or_params, (str, Mapping)) or not isinstance(model_or_params, Iterable):
            raise TypeError(
                "Muon takes a module or an iterable of parameters, (name, parameter) pairs or group dicts, "
                f"got {type(model_or_params).__name__}"
            )
        super().__init__(model_or_params, defaults)
        if not self.param_groups:
            raise ValueError("optimizer got an empty parameter list")
        if autotune is not None:
            from dmuon.autotune import install

            install(mode=autotune)

    def _route(self, model: nn.Module) -> Params:
        """The trainable parameters by name, their matrices noted in ``self._matrices``."""
        if self._owned is not None:
            from dmuon.ownership.routing import groups_of_owned

            groups, self._matrices = groups_of_owned(model, self._owned)
            return groups
        parameters = dict(model.named_parameters())
        slots = slots_of_model(model)
        # Frozen ones are routed too, for when they are thawed and added.
        routings = self._policy.route_slots([replace(slot, trainable=True) for slot in slots])
        self._matrices = {parameters[routing.name]: routing.matrices for routing in routings}
        trained = [routing for slot, routing in zip(slots, routings, strict=True) if slot.trainable]
        if not trained:
            why = "they are all frozen (requires_grad is False)" if slots else "it has none at all"
            raise ValueError(f"the model has no parameter to train: {why}")
        if not any(routing.matrices for routing in trained):
            reasons = Counter(routing.reason for routing in trained)
            found = ", ".join(f"{count} x {reason}" for reason, count in reasons.items())
            raise ValueError(f"the model has no trainable matrix for Muon; it has {found}")
        return [(routing.name, parameters[routing.name]) for routing in trained]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group dict as the constructor takes them; it may become two groups, Muon's and AdamW's.

        Raises:
            ValueError: as the constructor; no group is added then.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        groups, matrices = split_group(param_group, self.defaults, self._matrices, self._policy)
        before = len(self.param_groups)
        try:
            for group in groups:
                if group["algorithm"] == "muon":
                    check_rule(group["adjust_lr"], self._rules)
                chosen = set(group)
                super().add_param_group(group)
                # torch fills in every default; a group shows only what applies to it.
                for key in self.defaults.keys() - chosen:
                    del group[key]
        except BaseException:
            del self.param_groups[before:]
            raise
        self._matrices.update(matrices)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one optimization step.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            RuntimeError: a gradient is sparse; no parameter has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._owned is not None:
            self._owned.finish()
        self._check_gradients()
        updates: list[Update] = []
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                updates += self._advance_momentum(group)
            else:
                self._step_adamw(group)
        for batch in batches(updates):
            self._orthogonal_update(batch)
        if self._owned is not None:
            self._owned.refresh()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; of an owned model also those that are still under way (then collective)."""
        if self._owned is not None:
            self._owned.finish()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned of an optimizer with the same groups and parameters.

        Where both know the parameters' names, these have to agree (but for what DDP and torch.compile put in
        front). To load under other names, rename ``param_names`` in a hook
        (:meth:`~torch.optim.Optimizer.register_load_state_dict_pre_hook`).

        Raises:
            ValueError: the state is of another optimizer or of other parameters; nothing is loaded then.
            TypeError: it is no dict.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        # Registered last, so that it sees what the caller's own hooks have made of the state.
        check = self.register_load_state_dict_pre_hook(self._check_loadable)
        try:
            super().load_state_dict(state_dict)
        finally:
            check.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_policy": self._policy,
            "_rules": self._rules,
            "_matrices": self._matrices,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._replays, self._owned = Replays(), None

    def _check_loadable(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        check_loadable(self, state_dict)
        for group in state_dict["param_groups"]:
            if group["algorithm"] == "muon":
                check_rule(group["adjust_lr"], self._rules)

    def _check_gradients(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which "
                        "neither Muon nor AdamW can use; build its embedding with sparse=False"
                    )

    def _advance_momentum(self, group: dict[str, Any]) -> list[Update]:
        """Fold the gradients into the momentum, decay the weights, and list the matrices to update."""
        updates = []
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            momentum = state["momentum_buffer"]
            gradient = gradient.to(momentum.dtype)
            momentum.lerp_(gradient, 1 - group["momentum"])
            if group["weight_decay"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            updates += [Update(parameter, gradient, momentum, m, group) for m in self._matrices[parameter]]
        return updates

    def _orthogonal_update(self, batch: list[Piece]) -> None:
        """Orthogonalise one batch of equal matrices and move each against its own result."""
        matrix, group, like = batch[0].update.matrix, batch[0].update.group, batch[0].update.momentum
        counts = [piece.count for piece in batch]
        shape, recorded = (sum(counts), matrix.rows, matrix.cols), replayable(like.device)
        empty = self._replays.buffer if recorded else torch.empty
        stack = empty(shape, dtype=like.dtype, device=like.device)
        for piece, target in zip(batch, torch.split(stack, counts), strict=True):
            if piece.update.group["nesterov"]:
                torch.lerp(piece.gradient(), piece.momentum(), piece.update.group["momentum"], out=target)
            else:
                target.copy_(piece.momentum())
        how = {"coefficients": group["coefficients"], "precision": group["precision"]}
        if recorded:
            self._replays.run(tuple(how.values()), stack, lambda stack: gram_ns(stack, **how, out=stack))
        else:
            gram_ns(stack, **how, out=stack)
        for piece, direction in zip(batch, torch.split(stack, counts), strict=True):
            _move(piece.parameter(), direction, piece.update.group, self._factor(piece.update))

    def _factor(self, update: Update) -> float:
        return self._rules[update.group["adjust_lr"]](update.matrix.rows, update.matrix.cols)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        """torch's own AdamW on the group's parameters that have a gradient."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        gradients: list[Tensor] = [parameter.grad for parameter in parameters]
        states = [self._adamw_state(parameter, group["fused"]) for parameter in parameters]
        if group["fused"]:
            # The fused kernels walk memory: what is laid out otherwise than its parameter would be misread.
            gradients = [_laid_out_like(p, g) for p, g in zip(parameters, gradients, strict=True)]
            for parameter, state in zip(parameters, states, strict=True):
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = _laid_out_like(parameter, state[key])
        adamw(
            [local(parameter) for parameter in parameters],
            [local(gradient) for gradient in gradients],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"] or None,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _adamw_state(self, parameter: Tensor, fused: bool) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            # The fused kernels count on the device; the others on the host, to spare launches.
            device = parameter.device if fused else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _move(parameter: Tensor, direction: Tensor, group: dict[str, Any], factor: float) -> None:
    """parameter ∓ lr·factor·direction. ``direction`` is scratch."""
    lr, sign = group["lr"], 1.0 if group["maximize"] else -1.0
    if isinstance(lr, Tensor):
        parameter.add_(direction.mul_(lr * factor), alpha=sign)
    else:
        parameter.add_(direction, alpha=sign * lr * factor)


def _laid_out_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
