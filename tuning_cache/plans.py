"""Plans of who owns which matrix, as text by a key of all that they depend on. Inside the caller's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlite_utils import Database

KEPT = 100
"""The newest stay."""


def find(db: Database, key: str) -> list[str]:
    """The plan of ``key``, or nothing."""
    return [row["text"] for row in db.table("plans").rows_where("key = ?", [key])]


def keep(db: Database, key: str, text: str, now: float) -> None:
    """Put a plan in the place of any of ``key``, and let the oldest go."""
    db.table("plans").insert({"key": key, "text": text, "created_at": now}, replace=True)
    db.execute(
        "delete from plans where key not in (select key from plans order by created_at desc, rowid desc limit ?)",
        [KEPT],
    )
