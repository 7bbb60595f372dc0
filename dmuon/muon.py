"""Muon on one device, with AdamW for what is no matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, overload
from weakref import ref

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from dmuon.adamw import step_adamw
from dmuon.batching import Update
from dmuon.current import check_current, check_gradients
from dmuon.groups import Matrices, route_model, split_group
from dmuon.kernels.coefficients import CoefficientSet, Triple
from dmuon.lr_adjust import CUSTOM, RULES, AdjustRule, check_rule
from dmuon.matrix_step import MatrixStep
from dmuon.options import CheckedOptions, check_options, facts_of
from dmuon.ownership.absent import is_master, is_owned
from dmuon.ownership.registry import ownership_of
from dmuon.policy import MatrixPolicy
from dmuon.rounding import is_due
from dmuon.state import check_dict, check_loadable, fill_state, split_state, state_of, with_variants
from dmuon.update_hooks import UpdateHook

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
        normuon_beta2: NorMuon: divide the rows of O by the roots of their second moments, which are averaged by this
            coefficient in [0, 1), and give it back its norm. 0 knows this step's rows alone; None for Muon.
        cautious_decay: decay only those entries of matrices whose sign is that of the update.
        stochastic_rounding: round bf16 matrices and their momentum up or down at random, so that they are right on
            average; by a generator of its own, seeded from torch's for CPUs at every step that rounds any.

    Raises:
        ValueError: a value out of range, an unknown name, no parameters, a model without a matrix, or a
            parameter that is complex, sharded, on the meta device, no leaf, or given twice.
        TypeError: a value of the wrong kind.

    References:
        Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024,
        https://kellerjordan.github.io/posts/muon. Liu et al., Muon is scalable for LLM training (Moonlight),
        arXiv 2502.16982. Amsel et al., The Polar Express, arXiv 2505.16932. Li et al., NorMuon, arXiv 2510.05491.
        Chen et al., Cautious weight decay, arXiv 2510.12402.
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
        normuon_beta2: float | None = None,
        cautious_decay: bool = False,
        stochastic_rounding: bool = False,
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
                "normuon_beta2": normuon_beta2,
                "cautious_decay": cautious_decay,
                "stochastic_rounding": stochastic_rounding,
            }
        )
        if policy is not None and isinstance(model_or_params, nn.Module) and ownership_of(model_or_params):
            raise ValueError("the policy of an owned model is the one that dmuon.own was given")
        self._policy = policy or MatrixPolicy()
        own = {CUSTOM: adjust_lr} if callable(adjust_lr) else {}
        self._rules: Mapping[str, AdjustRule] = {**RULES, **own}
        check_rule(defaults["adjust_lr"], self._rules)
        self._matrices: dict[Tensor, Matrices] = {}
        self._matrix_step, self._options = MatrixStep(self._rules), CheckedOptions(self._rules)
        self._owned = ownership_of(model_or_params) if isinstance(model_or_params, nn.Module) else None
        self._model: ref[nn.Module] | None = None
        if isinstance(model_or_params, nn.Module):
            self._model = ref(model_or_params)
            model_or_params, self._matrices = self._route(model_or_params)
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

    def _route(self, model: nn.Module) -> tuple[Params, dict[Tensor, Matrices]]:
        """The trainable parameters by name, and the matrices of all."""
        if self._owned is None:
            return route_model(model, self._policy)
        from dmuon.ownership.routing import groups_of_owned

        return groups_of_owned(model, self._owned)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group dict as the constructor takes them; it may become two groups, Muon's and AdamW's.

        Raises:
            ValueError: as the constructor; no group is added then.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        groups, matrices = split_group(param_group, self.defaults, self._matrices, self._policy)
        if self._owned is None and any(is_owned(parameter) or is_master(parameter) for parameter in matrices):
            raise ValueError(
                "some of the parameters are owned, or masters of such: give the optimizer the whole model, "
                "dmuon.Muon(model), and divide its Muon group for options of their own (docs/distributed.md)"
            )
        before = len(self.param_groups)
        try:
            for group in groups:
                if group["algorithm"] == "muon":
                    check_rule(group["adjust_lr"], self._rules)
                    if self._owned is not None:
                        self._owned.check_options(group)
                chosen = set(group)
                super().add_param_group(group)
                # torch fills in every default; a group shows only what applies to it.
                for key in self.defaults.keys() - chosen:
                    del group[key]
        except BaseException:
            del self.param_groups[before:]
            raise
        self._matrices.update(matrices)
        if self._owned is not None:
            # Ranks that own nothing would otherwise be alone without state until the first step.
            fill_state(self, self._owned)

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
            RuntimeError: a gradient is sparse, the model has got other parameters since the optimizer was built, an
                owned matrix is in no group, ranks differ in their options, a CUDA graph would repeat stochastic
                rounding, or torch's GradScaler takes the step of an owned model.
            ValueError, TypeError: an option in ``param_groups`` is none that the constructor would take.

        Nothing has been changed then; of an owned model, all ranks raise.
        """
        if self._step_supports_amp_scaling and hasattr(self, "found_inf"):
            raise RuntimeError(
                "torch's GradScaler can neither unscale the gradients of owned parameters nor see an Inf in them: "
                "use dmuon.GradScaler, or compute in bf16 (compute_dtype of dmuon.own), which needs none"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        model = None if self._model is None else self._model()
        if self._owned is None:
            self._check(model)
        else:
            self._owned.finish("Muon.step", partial(self._check, model))
            self._owned.settle(model)
        if is_due(self.param_groups, self._owned):
            self._matrix_step.rounding.reseed()
        updates: list[Update] = []
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                updates += self._updates_of(group)
            else:
                with record_function("dmuon::adamw"):
                    step_adamw(group, self.state)
        measurements = self._matrix_step.hooks.begin()
        run = partial(self._matrix_step.run, measurements=measurements)
        if self._owned is not None:
            self._owned.move(updates, self._owned.joined(self._matrix_step) or run)
        else:
            with record_function("dmuon::update"):
                for _ in run(updates):
                    pass
        if measurements is not None:
            masters = {} if self._owned is None else self._owned.masters_of
            self._matrix_step.hooks.call(measurements.reports(self.param_groups, self._matrices, masters))
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler hands over what it knows: then an owned model's step notices torch's."""
        return self._owned is not None

    def nonfinite(self) -> int:
        """How many matrices were moved so far by an update with NaN or Inf in it.

        Such an update makes its own weight NaN and no other. They are counted on the device, since the optimizer was
        made; reading the count waits for it. Of an owned model, of what this rank owns.
        """
        return self._matrix_step.nonfinite()

    def register_update_hook(self, hook: UpdateHook, *, orthogonality: bool = False) -> RemovableHandle:
        """Have ``hook`` called after every step with a :class:`~dmuon.update_hooks.MatrixUpdate` of each matrix moved.

        One that raises leaves the step done. Of an owned model, on the matrix's owner; a tensor-parallel one takes
        none. While there are any, torch's operations make the steps that kernels make otherwise. Copies have none.
        The handle's ``remove()`` removes it.

        Args:
            hook: who reads a number from one of the update's tensors waits for the device.
            orthogonality: measure its error, too, at the price of one product for each matrix.

        Raises:
            TypeError: ``hook`` cannot be called, or ``orthogonality`` is no bool.
        """
        if self._owned is not None:
            self._owned.check_hooks()
        return self._matrix_step.hooks.register(hook, orthogonality)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; of an owned model also those that are still under way (then collective)."""
        if self._owned is not None:
            self._owned.zero_grad()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Once there is any state, every trainable parameter has some: zeros if it never had a gradient.

        Of an owned model, each rank has the state of what it owns, and an empty state for what others own.
        """
        if self.state:
            fill_state(self, self._owned)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned of an optimizer with the same groups and parameters.

        Where both know the parameters' names, these have to agree (but for what DDP and torch.compile put in
        front). To load under other names, rename ``param_names`` in a hook
        (:meth:`~torch.optim.Optimizer.register_load_state_dict_pre_hook`).

        Of an owned model, each rank loads the state of what it owns, and ignores what it does not own; state that
        the dict does not have becomes zero. Collective then.

        Raises:
            ValueError: the state is of another optimizer or of other parameters, or an option is out of range;
                nothing is loaded then.
            TypeError: it is no dict, or an option is of the wrong kind.
            RuntimeError: it cannot be loaded on another rank.
        """
        self._on_all_ranks(lambda: check_dict(state_dict))
        kept: dict[Tensor, dict[str, Tensor]] = {}
        # Registered last, so that it sees what the caller's own hooks have made of the state.
        check = self.register_load_state_dict_pre_hook(partial(self._before_load, kept))
        try:
            super().load_state_dict(state_dict)
        finally:
            check.remove()
        for parameter, state in kept.items():
            self.state[parameter].update(state)
        if self._owned is not None:
            fill_state(self, self._owned)

    def __getstate__(self) -> dict[str, Any]:
        if self._owned is not None:
            raise TypeError(
                "the optimizer of an owned model cannot be copied or pickled: use its state_dict()"
            )
        return {
            **super().__getstate__(),
            "_policy": self._policy,
            "_rules": self._rules,
            "_matrices": self._matrices,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # torch calls this on loading a state dict, too.
        if "_matrices" in state:
            self._matrix_step, self._options = MatrixStep(self._rules), CheckedOptions(self._rules)
            self._owned = self._model = None

    def _before_load(
        self, kept: dict[Tensor, dict[str, Tensor]], _: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Check ``state_dict``, and move what torch must not cast from it to ``kept``."""
        if "param_groups" in state_dict:
            state_dict = {**state_dict, "param_groups": with_variants(state_dict["param_groups"])}
        self._on_all_ranks(lambda: check_loadable(self, state_dict, self._owned))
        state_dict, found = split_state(self, self._owned, state_dict)
        kept.update(found)
        return state_dict

    def _on_all_ranks(self, check: Callable[[], None]) -> None:
        """Raise what ``check`` raises; of an owned model on all ranks if it raises on any."""
        if self._owned is None:
            check()
        else:
            self._owned.control.together(check, "load_state_dict")

    def _check(self, model: nn.Module | None) -> dict[str, Any]:
        """Raise unless a step can be taken. Returns what must be equal on all ranks of an owned model."""
        check_current(model, self.param_groups, self._owned, self._matrices)
        check_gradients(self.param_groups)
        self._options.check(self.param_groups, self._owned)
        return {} if self._owned is None else facts_of(self.param_groups)

    def _updates_of(self, group: dict[str, Any]) -> list[Update]:
        """The matrices of a Muon group that are due for an update here."""
        updates = []
        for parameter in group["params"]:
            weight = parameter if self._owned is None else self._owned.masters_of.get(parameter)
            if weight is None or weight.grad is None:
                continue
            matrices = self._matrices[parameter]
            momentum, second = state_of(weight, self.state[parameter], group, matrices[0])
            updates += [Update(weight, weight.grad, momentum, m, group, second) for m in matrices]
        return updates
