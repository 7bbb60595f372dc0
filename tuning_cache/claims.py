"""Claims: one process works on something while the others see that it does, until it ends or is overdue."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlite_utils import Database


class Claim:
    """A claim held by this process; a context manager that releases it. Made by :meth:`Store.claim`."""

    def __init__(self, key: str, refresh: Callable[[], bool], release: Callable[[], None]) -> None:
        self.key = key
        self._refresh, self._release = refresh, release

    def refresh(self) -> bool:
        """Hold for another ``ttl`` seconds from now. ``False``: it was overdue and is no longer ours."""
        return self._refresh()

    def release(self) -> None:
        """Let go; harmless when the claim is no longer ours."""
        self._release()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def take(db: Database, key: str, owner: str, now: float, expires_at: float) -> bool:
    """Write the claim unless another's is still live at ``now``."""
    before = db.conn.total_changes
    db.execute(
        "insert into claims (key, owner, expires_at) values (:key, :owner, :expires_at) on conflict (key) do "
        "update set owner = :owner, expires_at = :expires_at where claims.expires_at <= :now",
        {"key": key, "owner": owner, "expires_at": expires_at, "now": now},
    )
    return db.conn.total_changes > before


def extend(db: Database, key: str, owner: str, expires_at: float) -> bool:
    """Move the expiry of the owner's claim; ``False`` when it is not the owner's."""
    before = db.conn.total_changes
    db.execute("update claims set expires_at = ? where key = ? and owner = ?", [expires_at, key, owner])
    return db.conn.total_changes > before


def drop(db: Database, key: str, owner: str) -> None:
    """Delete the owner's claim."""
    db.execute("delete from claims where key = ? and owner = ?", [key, owner])


def is_live(db: Database, key: str, now: float) -> bool:
    """Does anybody hold ``key`` at ``now``?"""
    return db.table("claims").count_where("key = ? and expires_at > ?", [key, now]) > 0
