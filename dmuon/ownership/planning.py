"""The plan of an owned model: made by the first rank, the same on all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dmuon.autotune import Cost
from dmuon.kernels.precision import precision_name, resolve_precision
from dmuon.ownership.control import Control
from dmuon.planner import (
    Owners,
    Plan,
    StepCosts,
    given_owners,
    items_of,
    make_plan,
    plan_in_file,
    plan_of_owners,
)
from dmuon.planner.instance import Costs
from dmuon.policy import Routing
from dmuon.tuning_cache import Store

PathLike = str | os.PathLike[str]


def plan_together(control: Control, first: bool, make: Callable[[], Plan]) -> Plan:
    """What ``make`` returns on the first rank, on every rank. Collective.

    Only one rank plans: costs come from what was measured, and another machine may know other measurements.

    Raises:
        RuntimeError: the first rank failed, or a rank got another plan.
        Exception: what ``make`` raises, on the first rank.
    """
    made: Plan | Exception | None = None
    if first:
        try:
            made = make()
        except Exception as error:
            made = error
    control.agree(made if isinstance(made, Exception) else {})
    plan: Plan = control.from_first(made)
    control.agree({"plan": plan.hash})
    return plan


def plan_for(
    model: nn.Module,
    mesh: DeviceMesh,
    routings: Sequence[Routing],
    buckets: Mapping[str, str],
    given: Plan | Owners | PathLike | None,
    sharing: int = 1,
) -> Plan:
    """The plan for the matrices of ``model``, by what the user's store knows of this process's device.

    Args:
        buckets: parameter → what it travels with.
        given: the caller's plan or owners, or the file of one, if there is any.
        sharing: how many ranks, at each place of ``mesh``, divide the work among each other.
    """
    if isinstance(given, Plan):
        return given
    sizes = {name: model.get_parameter(name).element_size() for name in buckets}
    # In the order in which buckets are published: what is in no block comes first.
    places = {bucket: place for place, bucket in enumerate(sorted(dict.fromkeys(buckets.values()), key=bool))}
    items = sorted(items_of(routings, buckets, sizes), key=lambda item: places[item.bucket])
    like = torch.empty(0, dtype=model.get_parameter(routings[0].name).dtype, device=mesh.device_type)
    store = Store()
    costs: Costs = StepCosts(store, like.device, precision_name(resolve_precision("auto", like)))
    if sharing > 1:
        costs = _Shared(costs, sharing)

    def make() -> Plan:
        return make_plan(items, mesh.size(), costs, ranks_per_node=_ranks_per_node(mesh), store=store)

    if given is None:
        return make()
    if isinstance(given, (str, os.PathLike)):
        return plan_in_file(given, items, mesh.size(), make)
    return plan_of_owners(given, items, mesh.size(), costs)


@dataclass(frozen=True)
class _Shared:
    """Costs of steps that several ranks divide among each other."""

    costs: Costs
    ranks: int

    def cost(self, rows: int, cols: int, batch: int) -> Cost:
        whole = self.costs.cost(rows, cols, batch)
        return replace(whole, ms=whole.ms / self.ranks)


def given_fact(plan: Plan | Owners | PathLike | None, names: Sequence[str], ranks: int) -> list[object]:
    """What the ranks have to agree on before they take ``plan``.

    Raises:
        ValueError: it is for other names or another number of ranks.
    """
    if plan is None:
        return []
    if isinstance(plan, (str, os.PathLike)):
        return [os.fspath(plan)]
    return list(given_owners(plan, names, ranks).items())


def _ranks_per_node(mesh: DeviceMesh) -> int | None:
    """The size of a shard group, or else what torchrun says, if it divides the ranks."""
    size = mesh.size(1) if mesh.ndim == 2 else int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    return size if size and mesh.size() % size == 0 else None
