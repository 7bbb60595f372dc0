"""What an optimizer on this rank updates of an owned model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dmuon.matrix import Matrix
from dmuon.ownership.gradients import reshard
from dmuon.ownership.owned import Owned


def groups_of_owned(
    model: nn.Module, owned: Owned
) -> tuple[list[dict[str, Any]], dict[Tensor, tuple[Matrix, ...]]]:
    """A Muon group of the masters on this rank, an AdamW group of what is FSDP's, and the masters' matrices.

    All ranks get the same groups, if need be empty ones: a change to a group then means the same everywhere.

    Raises:
        ValueError: nothing of the model is sharded, so that nobody would reduce the gradients of the rest.
    """
    reshard(model)
    rest = [(n, p) for n, p in model.named_parameters() if p not in owned.params and p.requires_grad]
    if rest and owned.plan.ranks > 1 and not any(type(p).__name__ == "DTensor" for _, p in rest):
        raise ValueError(
            f"nobody reduces the gradients of the parameters that are not owned, such as {rest[0][0]!r}: "
            "call fully_shard(module, mesh=mesh, ignored_params=owned.params) on the blocks and the model first"
        )
    names, masters = list(owned.masters), list(owned.masters.values())
    groups: list[dict[str, Any]] = [{"params": masters, "param_names": names, "algorithm": "muon"}]
    if rest:
        groups.append({"params": rest, "algorithm": "adamw"})
    return groups, {master: owned.matrices[name] for name, master in owned.masters.items()}
