"""A plan in a file that a training script keeps, from start to start."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from dmuon.planner.items import Item
from dmuon.planner.plan import Plan


def plan_in_file(
    path: str | os.PathLike[str], items: Sequence[Item], ranks: int, make: Callable[[], Plan]
) -> Plan:
    """The plan in ``path`` if it is for ``items`` and ``ranks``; else what ``make`` returns, which takes its place.

    A run that is resumed on as many ranks keeps its plan; one resumed on others is planned anew, and says so.

    Raises:
        ValueError: the file is there and holds no plan: it is left alone.
        OSError: it cannot be read or written.
    """
    note = []
    try:
        plan = Plan.load(path)
    except FileNotFoundError:
        pass
    else:
        if plan.ranks == ranks and plan.owners.keys() == {item.name for item in items}:
            return plan
        whose = f"{plan.ranks} ranks" if plan.ranks != ranks else "other parameters"
        note = [f"planned anew: {os.fspath(path)} was for {whose}"]
    made = make()
    made = replace(made, notes=(*made.notes, *note))
    made.save(path)
    return made
