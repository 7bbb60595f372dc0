"""What ``state_dict`` and ``load_state_dict`` of an owned model deal in: masters, never published copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon.ownership.buckets import OwnedMatrix
from dmuon.ownership.sharded import reshard, shard_of
from dmuon.shards import local

if TYPE_CHECKING:
    from dmuon.ownership.owned import Owned


class StateDicts:
    """Hooks on ``model`` and on each of its modules that has parameters.

    A rank's state dict has the masters of what it owns, detached, under the names that the parameters have, and no
    entry for what others own. To :mod:`torch.distributed.checkpoint`, a plain tensor that only one rank has is that
    rank's to save and to load, so that owners, ranks and meshes may differ between the two.

    ``load_state_dict`` takes such a dict, or one with whole plain tensors on every rank: an owner takes its masters
    and the others skip them; what FSDP has sharded is cut to its shards. It is collective. Keys that any rank lacks
    or has too many, and shapes that do not fit on any, are reported on all.
    """

    def __init__(self, model: nn.Module, owned: Owned, matrices: Sequence[OwnedMatrix]) -> None:
        self._model, self._owned = model, owned
        self._loading, self._errors = False, list[str]()
        self.listing = False
        """Whether state dicts are to have the :class:`OwnedMatrix` itself, on all ranks, in place of its weight."""
        by_parameter = {matrix.parameter: matrix for matrix in matrices}
        root: Any = model
        root.register_load_state_dict_pre_hook(self._begin)
        # Any, because torch has not typed how hooks are registered.
        module: Any
        for module in model.modules():
            parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            held = {leaf: by_parameter[p] for leaf, p in parameters.items() if p in by_parameter}
            if held:
                # torch marks the hook, which a bound method would not take.
                module.register_state_dict_post_hook(partial(self._put, held))
            if parameters:
                settled: list[str] = []
                module.register_load_state_dict_pre_hook(partial(self._take, held, settled))
                module.register_load_state_dict_post_hook(partial(self._settle, settled, bool(held)))
        root.register_load_state_dict_post_hook(self._end)

    def _put(
        self, held: Mapping[str, OwnedMatrix], module: nn.Module, state: dict[str, Any], prefix: str, _: Any
    ) -> None:
        for leaf, matrix in held.items():
            if self.listing:
                state[prefix + leaf] = matrix
            elif matrix.master is not None:
                state[prefix + leaf] = matrix.master.detach()
            else:
                state.pop(prefix + leaf, None)

    def _begin(
        self, module: nn.Module, state: Any, prefix: str, _: Any, strict: bool, *lists: list[str]
    ) -> None:
        self._loading, self._errors = True, lists[-1]
        reshard(self._model)

    @torch.no_grad()
    def _take(
        self,
        held: Mapping[str, OwnedMatrix],
        settled: list[str],
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        _: Any,
        strict: bool,
        *lists: list[str],
    ) -> None:
        """Write the masters of ``module``, and take their entries away from torch, which would write to parameters."""
        if not self._loading:
            # A module of the model is loaded on its own.
            reshard(self._model)
        settled.clear()
        for leaf, matrix in held.items():
            key = prefix + leaf
            value = state.pop(key, None)
            # torch's set_model_state_dict fills what the caller left out with the model's own parameters.
            absent = value is None or value is matrix.parameter
            if not absent:
                lists[-1].extend(_write(matrix, key, value))
            if matrix.master is None or not absent:
                settled.append(key)
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + leaf)
            if isinstance(parameter, DTensor) and _is_whole(value) and value.shape == parameter.shape:
                state[prefix + leaf] = shard_of(value, parameter)

    def _settle(self, settled: list[str], owning: bool, module: nn.Module, incompatible: Any) -> None:
        missing = incompatible.missing_keys
        missing[:] = [key for key in missing if key not in settled]
        if owning and not self._loading:
            self._owned.refresh()

    def _end(self, module: nn.Module, incompatible: Any) -> None:
        ours = (incompatible.missing_keys, incompatible.unexpected_keys, self._errors)
        self._loading, self._errors = False, []
        for theirs in self._owned.control.gather(ours):
            for mine, others in zip(ours, theirs, strict=True):
                mine += [entry for entry in others if entry not in mine]
        self._owned.refresh()


def _write(matrix: OwnedMatrix, key: str, value: Any) -> list[str]:
    """Copy ``value`` to the master if that is here. Returns what is wrong with it, whether it is here or not."""
    master = matrix.master
    if not _is_whole(value) and not _alike(value, matrix.parameter):
        return [
            f"{key} is owned by one rank and loads from a whole plain tensor, not from a {type(value).__name__}."
        ]
    if value.shape != matrix.parameter.shape:
        return [
            f"size mismatch for {key}: {tuple(value.shape)}, but the model has {tuple(matrix.parameter.shape)}."
        ]
    if isinstance(master, DTensor):
        local(master).copy_(local(shard_of(value, master)))
    elif master is not None:
        master.copy_(value)
    return []


def _alike(value: object, parameter: nn.Parameter) -> bool:
    """Whether both are parts of DTensors that are divided alike over the same ranks."""
    return (
        isinstance(value, DTensor)
        and isinstance(parameter, DTensor)
        and value.device_mesh == parameter.device_mesh
        and value.placements == parameter.placements
    )


def _is_whole(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)
