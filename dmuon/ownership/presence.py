"""Whether a model still has its owned parameters, and nobody but its own optimizer updates them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dmuon.ownership.absent import is_owned


class Presence:
    """Notices owned parameters that have left the model with the module that has them.

    Args:
        model: that was owned.
        parameters: name → owned parameter.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._links = _links(model, parameters)

    def check(self) -> None:
        """Look for them; the way is known, so it costs a look-up for each module.

        Raises:
            RuntimeError: the model has some of the parameters no more.
        """
        if all(getattr(parent, part, None) is child for parent, part, child in self._links):
            return
        found = {p: name for name, p in self._model.named_parameters() if p in self._names}
        for parameter, name in self._names.items():
            if parameter not in found:
                raise RuntimeError(
                    f"owned parameter {name!r} is not in the model any more, so what is there in its place would not "
                    "be trained: replace modules before dmuon.own"
                )
        # Modules have been wrapped: torch.compile and activation checkpointing may do that.
        self._links = _links(self._model, found.values())


@cache
def refuse_other_optimizers() -> None:
    """From now on, have any torch optimizer but Muon raise at a step over owned parameters, which it would not move."""
    register_optimizer_step_pre_hook(_refuse_owned)


def _refuse_owned(optimizer: Any, args: Any, kwargs: Any) -> None:
    from dmuon.muon import Muon

    if isinstance(optimizer, Muon):
        return  # it knows by itself
    for group in optimizer.param_groups:
        for k, parameter in enumerate(group["params"]):
            if is_owned(parameter):
                name = repr(group["param_names"][k]) if "param_names" in group else tuple(parameter.shape)
                raise RuntimeError(
                    f"{type(optimizer).__name__} cannot update owned parameters, such as {name}: their gradients are "
                    "with their owners. Use dmuon.Muon(model), which updates all parameters, or leave them out: "
                    "[p for p in model.parameters() if p not in owned.params]"
                )


def _links(model: nn.Module, names: Iterable[str]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Parent, name and child of all modules on the way to the parameters ``names``."""
    links: dict[tuple[nn.Module, str], nn.Module] = {}
    for name in names:
        parent = model
        for part in name.split(".")[:-1]:
            child = links[parent, part] = parent.get_submodule(part)
            parent = child
    return [(parent, part, child) for (parent, part), child in links.items()]
