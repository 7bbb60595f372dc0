"""Who owns which matrix: costs in, a plan out. Pure data, equal on every rank."""

from __future__ import annotations

from dmuon.planner.plan import Plan, given_plan, greedy_plan, matrix_costs

__all__ = ["Plan", "given_plan", "greedy_plan", "matrix_costs"]
