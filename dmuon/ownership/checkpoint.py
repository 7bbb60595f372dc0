"""Checkpoints: model, optimizer and values of the training script in one folder, there whole or not at all."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Container, Mapping
from contextlib import ExitStack
from functools import lru_cache, reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from dmuon.muon import Muon
from dmuon.names import listed
from dmuon.options import VARIANTS
from dmuon.ownership import checkpoint_files, checkpoint_folder
from dmuon.ownership.checkpoint_folder import EXTRA
from dmuon.ownership.control import Control
from dmuon.ownership.registry import ownership_of
from dmuon.state import (
    SECOND_MOMENT,
    STATE,
    check_loadable,
    fill_state,
    second_moment_apart,
    with_variants,
)

# Names are compared here, over all ranks. torch would object to a rank that has nothing of a model.
_LENIENT = StateDictOptions(strict=False)

_GROUP = "optimizer.param_groups."


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Muon | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save to the folder ``path``, which it replaces. Collective::

        dmuon.save_checkpoint("run/last", model, optimizer, extra={"step": step, "schedule": schedule.state_dict()})

    The folder is written beside, as ``path.partial``, synchronised to the disk, and renamed only then. Whenever the
    process may die, :func:`load_checkpoint` finds the new checkpoint or the one before. Keep several by several paths.

    What is in it is ``{"model": ..., "optimizer": ...}`` as torch's ``get_state_dict`` returns it, saved by
    :mod:`torch.distributed.checkpoint`, whose own functions read it too; and a file for ``extra``. It says nothing of
    ranks, mesh or plan, nor of whether the model was owned at all. A parameter that never had a gradient has zeros
    for its state. One function with a mapping for all else, because a checkpoint that is made of several calls can
    come apart.

    Args:
        path: a folder on a file system that all ranks see. It may hold a checkpoint, and nothing else.
        model: owned, otherwise distributed, or neither.
        optimizer: of ``model``; None saves weights alone.
        extra: values that ``torch.load(weights_only=True)`` accepts: numbers, strings, tensors, and lists, tuples and
            dicts of these. The first rank's are saved.

    Raises:
        FileExistsError: ``path`` is or holds something else.
        TypeError: ``extra`` is no mapping or holds what it must not, or the optimizer is no :class:`Muon`.
        ValueError: the optimizer is not the model's.
        OSError: this rank cannot write there, or the disk is full.
        RuntimeError: another rank failed, or another process is saving to ``path``.

    Whatever is raised, ``path`` is as it was, and ``path.partial`` is gone.
    """
    path, ranks = Path(path).absolute(), _ranks(model)
    with ExitStack() as stack:

        def prepare() -> dict[str, Any]:
            _pack(extra, None)
            state = _state_of(model, optimizer)
            if _is_first():
                stack.enter_context(checkpoint_folder.partial(path))
            return state

        state = ranks.together(prepare, "save_checkpoint")
        save_id = checkpoint_files.write(checkpoint_folder.partial_of(path), state)

        def commit() -> None:
            if _is_first():
                checkpoint_folder.finish(path, _pack(extra, save_id))

        ranks.together(commit, "save_checkpoint")


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Muon | None = None,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Load what :func:`save_checkpoint` saved, in place. Collective. Returns ``extra``.

    The ranks, the mesh, the plan and the kind of distribution may all be others. Names and shapes are compared before
    anything changes.

    Args:
        path: as it was given to :func:`save_checkpoint`.
        model: to load into.
        optimizer: of ``model``; None leaves the saved state unread.
        strict: every name of the model and the optimizer must be in the checkpoint, and the other way round. If
            False, what both have is loaded and the rest stays as it is; the options of the optimizer's groups are
            loaded if the groups hold the same parameters. In either case, options that Muon did not have yet are
            taken for what leaves the update alone.

    Raises:
        FileNotFoundError: there is no checkpoint, on all ranks; a script that resumes by itself can begin anew.
        TypeError: the optimizer is no :class:`Muon`.
        ValueError: a name is missing or too many, a shape or the groups differ, or the optimizer is not the model's.
        OSError, RuntimeError: a file cannot be read or is damaged, on this rank or on another, or the checkpoint was
            replaced meanwhile. Then the model may have been loaded in part.
    """
    ranks = _ranks(model)
    found = ranks.from_first(
        ranks.together(lambda: _open(Path(path).absolute()) if _is_first() else None, "load_checkpoint")
    )
    if found is None:
        raise FileNotFoundError(f"there is no checkpoint at {os.fspath(path)}")
    folder, metadata, opened = found

    def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
        saved = metadata.state_dict_metadata
        state = _state_of(model, optimizer, saved)
        for k, group in enumerate(state["optimizer"]["param_groups"] if optimizer is not None else ()):
            for key in VARIANTS:
                if f"{_GROUP}{k}.{key}" not in saved:
                    group.pop(key, None)
        return state, _unpack(folder, metadata)

    state, extra = ranks.together(prepare, "load_checkpoint")
    _check_names(state, metadata, ranks, strict)
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        ours = state["optimizer"].pop("param_groups")
        groups = copy.deepcopy(ours)
        _take_tensors(groups, metadata)
        checkpoint_files.read(folder, {"optimizer": {"param_groups": groups}}, strict)
        groups = with_variants(groups)
        if not ranks.together(lambda: _groups_fit(optimizer, groups, strict), "load_checkpoint"):
            groups = ours
    checkpoint_files.read(folder, state, strict)
    ranks.together(lambda: _check_kept(folder, opened), "load_checkpoint")
    if state["model"]:
        set_model_state_dict(model, state["model"], options=_LENIENT)
    else:
        # torch would leave this rank out of what the others do together.
        model.load_state_dict({}, strict=False)
    if optimizer is not None:
        # Not torch's set_optimizer_state_dict, which drops the state of frozen parameters.
        whole = optimizer.state_dict()
        for group, saved in zip(whole["param_groups"], groups, strict=True):
            group.update({key: saved[key] for key in saved if key not in ("params", "param_names")})
        optimizer.load_state_dict(whole)
    return extra


class _Alone(Control):
    """A single process, without a process group."""

    def __init__(self) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def from_first(self, value: Any) -> Any:
        return value


def _ranks(model: nn.Module) -> Control:
    owned = ownership_of(model)
    if owned is not None:
        return owned.control
    return _world(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else _Alone()


@lru_cache(maxsize=1)
def _world(group: dist.ProcessGroup) -> Control:
    return Control(dist.get_process_group_ranks(group))


def _is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _state_of(model: nn.Module, optimizer: Muon | None, saved: Container[str] = ()) -> dict[str, Any]:
    """This rank's part, in the very tensors of model and optimizer. Frozen parameters have state if it is ``saved``."""
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=_LENIENT)}
    if optimizer is not None:
        if not isinstance(optimizer, Muon):
            raise TypeError(f"optimizer must be a dmuon.Muon, got {type(optimizer).__name__}")
        known = set(model.parameters())
        if not all(parameter in known for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                "the optimizer holds parameters that the model does not have: is it another model's?"
            )
        owned = ownership_of(model)
        # Before torch asks: it would make a first step where there is no state at all.
        fill_state(optimizer, owned)
        found: Any = get_optimizer_state_dict(model, optimizer, options=_LENIENT)
        kept = {
            parameter
            for group, named in zip(optimizer.param_groups, found["param_groups"], strict=True)
            for parameter, name in zip(group["params"], named["params"], strict=True)
            if any(f"optimizer.state.{name}.{key}" in saved for key in STATE[group["algorithm"]])
        }
        fill_state(optimizer, owned, frozen=kept)
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_LENIENT)
    return state


def _check_names(state: dict[str, Any], metadata: Metadata, ranks: Control, strict: bool) -> None:
    """Compare what all ranks have with what is saved of the parts that ``state`` has."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state)
    flat = planner.state_dict  # by the names on the disk
    saved = {name: v for name, v in metadata.state_dict_metadata.items() if name.split(".")[0] in state}
    # One byte for each saved name, as an integer, instead of every rank's names to every rank.
    here = int.from_bytes(bytes(name in flat for name in saved), "big")
    every = ranks.gather((here, sorted(flat.keys() - saved.keys())))
    somewhere = reduce(or_, (mask for mask, _ in every)).to_bytes(len(saved), "big")
    missing = sorted({name for _, names in every for name in names})
    unexpected = sorted(name for name, found in zip(saved, somewhere, strict=True) if not found)
    ranks.together(lambda: _refuse(flat, saved, missing, unexpected, strict), "load_checkpoint")


def _take_tensors(groups: list[dict[str, Any]], metadata: Metadata) -> None:
    """Have room for options that were saved as tensors and are numbers here, as a learning rate may be."""
    for k, group in enumerate(groups):
        for key, value in group.items():
            entry = metadata.state_dict_metadata.get(f"{_GROUP}{k}.{key}")
            if isinstance(entry, TensorStorageMetadata) and not isinstance(value, Tensor):
                group[key] = torch.empty(entry.size, dtype=entry.properties.dtype)


def _refuse(
    flat: Mapping[str, Any], saved: Mapping[str, Any], missing: list[str], unexpected: list[str], strict: bool
) -> None:
    if strict and (missing or unexpected):
        raise ValueError(f"{_reason(missing, unexpected)}; strict=False loads what both have")
    for name in flat.keys() & saved.keys():
        entry, value = saved[name], flat[name]
        tensors = isinstance(entry, TensorStorageMetadata) and isinstance(value, Tensor)
        if tensors and entry.size != value.shape:
            raise ValueError(
                f"{name} is {tuple(entry.size)} in the checkpoint, but {tuple(value.shape)} here"
            )


def _reason(missing: list[str], unexpected: list[str]) -> str:
    """Why a checkpoint is refused that lacks some names and has others too many."""
    reasons, names = [], [*missing, *unexpected]
    second = [name for name in names if name.endswith(f".{SECOND_MOMENT}")]
    # Of a whole group that one side has not, the algorithm is among the names.
    apart = tuple(name.removesuffix("algorithm") for name in names if name.endswith(".algorithm"))
    added = [name for name in names if name.startswith(_GROUP) and not name.startswith(apart)]
    if len(second) + len(added) < len(names):
        reasons.append(
            f"the checkpoint is of another model or optimizer: it lacks {listed(missing) or 'none'} and has "
            f"{listed(unexpected) or 'none'} too many"
        )
    if second:
        reasons.append(second_moment_apart("checkpoint", None if second[0] in missing else "as it was saved"))
    if added:
        when, where = ("after", "checkpoint's") if added[0] in missing else ("before", "optimizer's")
        keys = sorted({name.removeprefix(_GROUP).split(".")[1] for name in added})
        reasons.append(
            f"the {where} groups lack {listed(keys)}: build the learning-rate scheduler {when} loading"
        )
    return "; ".join(reasons)


def _groups_fit(optimizer: Muon, groups: list[dict[str, Any]], strict: bool) -> bool:
    try:
        check_loadable(optimizer, {"state": {}, "param_groups": groups})
    except ValueError:
        if strict:
            raise
        return False
    return True


def _open(path: Path) -> tuple[Path, Metadata, tuple[int, ...] | None] | None:
    folder = checkpoint_folder.find(path)
    if folder is None:
        return None
    opened = checkpoint_folder.identity(folder)
    return folder, checkpoint_files.read_index(folder), opened


def _check_kept(folder: Path, opened: tuple[int, ...] | None) -> None:
    if _is_first() and checkpoint_folder.identity(folder) != opened:
        raise RuntimeError(
            f"the checkpoint at {folder} was replaced while it was loaded: load again, and do not use the model before"
        )


def _unpack(folder: Path, metadata: Metadata) -> dict[str, Any]:
    if not (folder / EXTRA).exists():
        return {}
    packed = torch.load(folder / EXTRA, map_location="cpu", weights_only=True)
    # torch's own functions may have saved to the folder since.
    extra: dict[str, Any] = packed["extra"] if packed["save_id"] == checkpoint_files.save_id(metadata) else {}
    return extra


def _pack(extra: Mapping[str, Any] | None, save_id: str | None) -> bytes:
    if not isinstance(extra, (Mapping, type(None))):
        raise TypeError(f"extra must be a mapping, got {type(extra).__name__}")
    buffer = io.BytesIO()
    try:
        torch.save({"save_id": save_id, "extra": dict(extra or {})}, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise TypeError(
            f"extra must hold numbers, strings, tensors and containers of these: {error}"
        ) from error
    return buffer.getvalue()
