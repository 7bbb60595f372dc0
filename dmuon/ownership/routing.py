"""What an optimizer on this rank updates of an owned model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon.matrix import Matrix
from dmuon.ownership.owned import Owned
from dmuon.ownership.sharded import reshard


def groups_of_owned(
    model: nn.Module, owned: Owned
) -> tuple[list[dict[str, Any]], dict[Tensor, tuple[Matrix, ...]]]:
    """A Muon group of all owned parameters, an AdamW group of the rest, and the matrices of the owned ones.

    All ranks get the same groups, whatever they own: a change to a group means the same everywhere, and whoever
    looks a parameter of the model up in the optimizer finds it. The owner alone updates it and has its state.

    Raises:
        ValueError: nothing of the model is sharded, so that nobody would reduce the gradients of the rest.
    """
    reshard(model)
    rest = [(n, p) for n, p in model.named_parameters() if p not in owned.params and p.requires_grad]
    if rest and owned.plan.ranks > 1 and not any(_sharded(p, owned) for _, p in rest):
        raise ValueError(
            f"nobody reduces the gradients of the parameters that are not owned, such as {rest[0][0]!r}: "
            "call fully_shard(module, mesh=mesh, ignored_params=owned.params) on the blocks and the model first"
        )
    names, parameters = list(owned.parameters), list(owned.parameters.values())
    groups: list[dict[str, Any]] = [{"params": parameters, "param_names": names, "algorithm": "muon"}]
    if rest:
        groups.append({"params": rest, "algorithm": "adamw"})
    return groups, {parameter: owned.matrices[name] for name, parameter in owned.parameters.items()}


def _sharded(parameter: Tensor, owned: Owned) -> bool:
    """Whether FSDP has it, and not a tensor-parallel mesh alone."""
    group = owned.tensor_parallel
    return isinstance(parameter, DTensor) and (group is None or parameter.device_mesh != group.mesh)
