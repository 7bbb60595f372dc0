"""Memory and values for models that were built on the meta device, one module at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dmuon.names import listed
from dmuon.ownership.owned import Owned
from dmuon.ownership.registry import require_ownership
from dmuon.ownership.sharded import reshard
from dmuon.ownership.whole import Whole
from dmuon.shards import local


def materialize(model: nn.Module, init: Callable[[nn.Module], object] | None = None) -> None:
    """Give memory and values to an owned model that was built on the meta device. Collective::

        with torch.device("meta"):
            model = GPT()
        owned = dmuon.own(model, mesh)
        ...  # fully_shard
        torch.manual_seed(0)
        dmuon.materialize(model)

    ``init`` runs on every rank as it would in a single process: it sees each parameter whole and on the device, and
    draws the same random numbers. What it has written stays with the owner, or with FSDP's shards. Whole parameters
    exist for one module at a time, the one whose parameters ``init`` has used last; when it comes back to an earlier
    one, that is sent again. So equal seeds give the weights of a single process, bit for bit.

    To load a checkpoint instead, call ``model.to_empty(device=...)``, which gives owned weights no memory, and load.

    Args:
        model: owned, and as a rule sharded already.
        init: takes the model and writes all parameters and buffers that are on the meta device, such as
            ``lambda model: model.init_weights()`` or ``lambda model: model.apply(init_weights)``. New tensors are on
            the device by default and nothing is recorded for autograd meanwhile. It must do the same on all ranks,
            and may replace buffers but not parameters. None for ``reset_parameters()`` of every module that has it,
            in the order in which ``model.apply`` comes to them.

    Raises:
        ValueError: the model is not owned; nothing in it is on the meta device; the ranks' random states differ, so
            that they would not draw the same numbers; or ``init`` left something out: some of the model has no
            values then.
        RuntimeError: ``init`` failed on another rank.
    """
    owned = require_ownership(model)
    reshard(model)
    empty = [name for name, tensor in _tensors(model).items() if tensor.is_meta]
    if not empty and not owned.unset:
        raise ValueError("nothing of the model is on the meta device: it has its values already")
    device = next(iter(owned.params)).device
    if len(set(owned.control.gather(_random_state(device)))) > 1:
        raise ValueError(
            "the ranks' random states differ: call torch.manual_seed with the same seed on all first"
        )
    if empty:
        # Kept, in case that ``init`` fails and another has to do it all.
        owned.unset.update(empty)
        _allocate(model, device, owned)
    due = {name: tensor for name, tensor in _tensors(model).items() if name in owned.unset}
    whole = Whole(model, owned, due.values())

    def run() -> None:
        with torch.no_grad(), torch.device(device), whole:
            (init or _reset_parameters)(model)
        whole.keep()

    owned.control.together(run, "init")
    found = _tensors(model)
    replaced = [
        n for n, tensor in due.items() if isinstance(tensor, nn.Parameter) and found.get(n) is not tensor
    ]
    if replaced:
        raise ValueError(f"init must write parameters in place, but it replaced {listed(replaced)}")
    if left := [n for n, tensor in due.items() if found.get(n) is tensor and tensor not in whole.used]:
        raise ValueError(
            f"init did not write {listed(left)}: write all that is on the meta device, in an init of your own "
            "where a module has no reset_parameters"
        )
    owned.unset.clear()
    owned.refresh()


@torch.no_grad()
def _allocate(model: nn.Module, device: torch.device, owned: Owned) -> None:
    """Memory for all on the meta device that is not owned. What is elsewhere keeps its values; ties stay."""
    names: dict[Tensor, list[str]] = {}
    for each in (model.named_parameters, model.named_buffers):
        for name, tensor in each(remove_duplicate=False):
            names.setdefault(tensor, []).append(name)
    kept = {
        first: tensor.detach()
        for tensor, (first, *_) in names.items()
        if not tensor.is_meta and first not in owned.parameters
    }
    model.to_empty(device=device)
    after = _tensors(model)
    for name, tensor in kept.items():
        local(after[name]).copy_(local(tensor))
    # FSDP keeps ties; where nothing is sharded yet, each name has got a tensor of its own.
    for first, *others in names.values():
        for other in others:
            module, _, leaf = other.rpartition(".")
            setattr(model.get_submodule(module), leaf, after[first])


def _reset_parameters(model: nn.Module) -> None:
    def reset(module: nn.Module) -> None:
        if callable(method := getattr(module, "reset_parameters", None)):
            method()

    model.apply(reset)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, persistent or not."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _random_state(device: torch.device) -> str:
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])
    return hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()
