"""Who owns which matrix: costs in, a plan out. Pure data, equal on every rank."""

from __future__ import annotations

from dmuon.planner.bound import Bound, lower_bound
from dmuon.planner.costs import StepCosts
from dmuon.planner.file import plan_in_file
from dmuon.planner.instance import Costs
from dmuon.planner.items import Item, items_of
from dmuon.planner.make import make_plan, plan_of_owners
from dmuon.planner.plan import Batch, Owners, Plan, given_owners
from dmuon.planner.profiling import Profile, profile

__all__ = [
    "Batch",
    "Bound",
    "Costs",
    "Item",
    "Owners",
    "Plan",
    "Profile",
    "StepCosts",
    "given_owners",
    "items_of",
    "lower_bound",
    "make_plan",
    "plan_in_file",
    "plan_of_owners",
    "profile",
]
