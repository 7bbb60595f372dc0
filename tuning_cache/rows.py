"""Trials as rows of the ``trials`` table. Each function works inside its caller's transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from dmuon.tuning_cache.trial import Trial

if TYPE_CHECKING:
    from sqlite_utils import Database


class Filters(TypedDict, total=False):
    """The values that a trial must have; ``None`` is any."""

    op: str | None
    device: str | None
    dtype: str | None
    batch: int | None
    m: int | None
    n: int | None
    coefficients: str | None
    backend: str | None
    status: str | None


def insert(db: Database, trials: Iterable[Trial]) -> int:
    """Add the trials that are not there yet; return how many that were."""
    before = db.conn.total_changes
    db.table("trials").insert_all(map(_row, trials), ignore=True)
    return db.conn.total_changes - before


def select(db: Database, filters: Filters) -> list[tuple[str, Trial | None]]:
    """The uid and trial of every row that passes the filters, oldest first; ``None``: an invalid row."""
    given = {name: value for name, value in filters.items() if value is not None}
    where = " and ".join(f"{name} = :{name}" for name in given) or None
    rows = db.table("trials").rows_where(where, given, order_by="created_at, rowid")
    return [(row["uid"], _trial(row)) for row in rows]


def delete(db: Database, uids: Sequence[str]) -> int:
    """Remove rows by uid; return how many there were."""
    before = db.conn.total_changes
    db.conn.executemany("delete from trials where uid = ?", [(uid,) for uid in uids])
    return db.conn.total_changes - before


def _row(trial: Trial) -> dict[str, Any]:
    encoded = {"config": json.dumps(trial.config), "versions": json.dumps(trial.versions)}
    return {"uid": trial.uid, **vars(trial), **encoded}


def _trial(row: dict[str, Any]) -> Trial | None:
    values = {name: value for name, value in row.items() if name != "uid"}
    try:
        decoded = {name: json.loads(row[name]) for name in ("config", "versions")}
        return Trial.from_dict({**values, **decoded})
    except (TypeError, ValueError):
        return None
