"""Make a plan: of costs, or of owners that somebody gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from dmuon.planner.assign import counts_of, owners_of
from dmuon.planner.bound import Bound, bound_of
from dmuon.planner.effort import Effort, OutOfTime
from dmuon.planner.greedy import greedy
from dmuon.planner.instance import Costs, Instance
from dmuon.planner.items import Item
from dmuon.planner.plan import FORMAT, Owners, Plan, given_owners
from dmuon.planner.schedule import batches_of
from dmuon.planner.search import Found, improve
from dmuon.tuning_cache import Store

WHOLE = "whole items cannot fill the ranks evenly, in whatever combination"
"""Why a bound is above the even share where no single reason is."""

TOLERANCE = 1e-3
"""A plan this close to its bound is not improved further."""


def make_plan(
    items: Sequence[Item],
    ranks: int,
    costs: Costs,
    *,
    ranks_per_node: int | None = None,
    memory_bytes: int | None = None,
    method: Literal["best", "greedy"] = "best",
    time_limit_s: float = 60.0,
    store: Store | None = None,
) -> Plan:
    """Choose an owner for each of ``items`` among ``ranks``, so that the busiest takes as little time as can be.

    The same for equal input, in every run and on every machine.

    Args:
        items: in the order of the forward (:func:`~dmuon.planner.items_of`).
        ranks: how many can own.
        costs: of batches.
        ranks_per_node: consecutive ranks that share a node, over which a bucket's matrices are spread; None for all.
        memory_bytes: what a rank has for the owned parameters that it keeps (master weights, momentum, gradients)
            and for the working memory of its step; None for no limit.
        method: "greedy" takes the best of several greedy plans; "best" goes on where it leaves a gap.
        time_limit_s: a safeguard. The search ends by itself, after a few seconds at most; on a machine that takes
            longer than this, the plan is the greedy one, and says so.
        store: where a plan that took a search is kept, and is found for equal input and costs.

    Raises:
        ValueError: no rank, no memory, an unknown ``method``, equal names, ``ranks_per_node`` that does not divide
            ``ranks``, ``time_limit_s`` that is no time, or an item that fits the memory of no rank any more.
    """
    instance = Instance(items, ranks, costs, memory_bytes)
    per_node = ranks if ranks_per_node is None else ranks_per_node
    if method not in ("best", "greedy"):
        raise ValueError(f"method must be 'best' or 'greedy', got {method!r}")
    if per_node < 1 or ranks % per_node:
        raise ValueError(f"ranks_per_node must divide the {ranks} ranks, got {per_node}")
    if not time_limit_s >= 0:
        raise ValueError(f"time_limit_s must be a number of seconds, got {time_limit_s!r}")
    bound = bound_of(instance)
    starts = greedy(instance)
    if not starts:
        raise ValueError(_no_room(instance))
    found = Found(starts[0], bound.ms / instance.tick_ms, "greedy")

    def planned(*notes: str) -> Plan:
        least = bound
        if found.bound * instance.tick_ms > bound.ms:
            least = replace(bound, ms=found.bound * instance.tick_ms, reason=bound.reason or WHOLE)
        owners = owners_of(instance, found.assigned, per_node)
        return _plan(instance, owners, least, found.method, notes)

    if method == "greedy" or instance.loads(found.assigned).max() <= found.bound * (1 + TOLERANCE):
        return planned()
    key = instance.key(FORMAT, per_node)
    if store is not None and (kept := _kept(store, key)) is not None:
        return kept
    first = replace(found)
    try:
        improve(instance, starts, found, TOLERANCE, Effort(time_limit_s))
    except OutOfTime:
        found = first  # what else was found depends on the clock
        return planned(f"greedy: the search for a better plan was not done after {time_limit_s:g} s")
    except Exception as error:  # whatever the solver does, there is a plan
        return planned(f"{found.method}: the solver failed ({type(error).__name__}: {error})")
    plan = planned()
    if store is not None:
        store.keep_plan(key, plan.to_json())
    return plan


def plan_of_owners(owners: Plan | Owners, items: Sequence[Item], ranks: int, costs: Costs) -> Plan:
    """The plan in which ``owners`` says who owns what, with these costs.

    Raises:
        ValueError: as :func:`~dmuon.planner.given_owners` does.
    """
    given = given_owners(owners, [item.name for item in items], ranks)
    instance = Instance(items, ranks, costs)
    return _plan(instance, given, bound_of(instance), "given")


def _plan(
    instance: Instance,
    owners: dict[str, tuple[int, ...]],
    bound: Bound,
    method: str,
    notes: Sequence[str] = (),
) -> Plan:
    owned: list[list[Item]] = [[] for _ in range(instance.ranks)]
    for item in instance.items:
        owned[owners[item.name][0]].append(item)
    return Plan(
        owners,
        instance.ranks,
        tuple(batches_of(each, instance.costs) for each in owned),
        float(bound.ms),
        float(bound.share),
        tuple(map(int, instance.memory(counts_of(instance, owners)))),
        method,
        (*([bound.reason] if bound.reason else []), *notes),
    )


def _kept(store: Store, key: str) -> Plan | None:
    text = store.plan(key)
    try:
        return None if text is None else Plan.from_json(text)
    except ValueError:
        return None


def _no_room(instance: Instance) -> str:
    """Name the item that a rank by itself cannot hold, or else the largest of those that all ranks cannot."""
    alone = instance.memory(np.eye(len(instance.kinds), dtype=np.int64))
    largest = int(np.argmax(alone))
    name, limit = instance.kinds[largest][0].name, instance.memory_bytes or 0
    return (
        f"memory_bytes: {name!r} fits on no rank any more: by itself it needs {_mib(int(alone[largest]))}, all items "
        f"together {_mib(int(instance.counts @ instance.kept))}, and {instance.ranks} ranks have {_mib(limit)} each; "
        "give it more memory or more ranks"
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
