"""Opening the store's file for one operation, and telling what an SQLite error means for it.

A connection lives for one operation. It costs about a millisecond, and leaves nothing that a fork could
inherit, a second thread could share, or a file replaced in the meantime could invalidate.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dmuon.tuning_cache import migrations
from dmuon.tuning_cache.aside import file_identity, folder_lock, set_aside

if TYPE_CHECKING:
    from sqlite_utils import Database

BUSY_SECONDS = 30.0
_SQLITE_BUSY_SECONDS = 2.0  # of one attempt; a fork waits for no longer than an attempt takes

T = TypeVar("T")

# SQLite's locks are the process's: a child forked in the middle of an operation would think it had them too.
guard = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=guard.acquire, after_in_parent=guard.release, after_in_child=guard.release)


class StoreWarning(UserWarning):
    """The store works on, but not as asked: a corrupt file was set aside, or rows stay in memory only."""


class StoreUnavailable(OSError):
    """The store's file cannot be used; the text names it and says why."""


def read(path: Path, action: Callable[[Database], T], default: T) -> T:
    """Run ``action`` in a read transaction on the store at ``path``; ``default`` where there is no store yet.

    Creates nothing. A corrupt file is set aside, and counts as none.

    Raises:
        StoreUnavailable: the file cannot be read.
        ValueError: the file is not a store.
    """
    path = path.resolve()
    return _run(path, lambda: _read_once(path, action, default))


def write(path: Path, action: Callable[[Database], T]) -> T:
    """Run ``action`` in a write transaction on the store at ``path``, made if it is not there.

    The changes are on the disk when this returns. ``action`` may run again when the file is busy.

    Raises:
        StoreUnavailable: the file cannot be written.
        ValueError: the file is not a store.
    """
    path = path.resolve()
    return _run(path, lambda: _write_once(path, action))


def connect(path: Path, options: str) -> Database:
    """A connection to the file with SQLite's URI ``options``, such as ``"mode=ro"``."""
    from sqlite_utils import Database

    connection = sqlite3.connect(
        f"{path.as_uri()}?{options}", uri=True, timeout=_SQLITE_BUSY_SECONDS, isolation_level=None
    )
    return Database(connection, recursive_triggers=False, execute_plugins=False)


def memory() -> Database:
    """An empty store in memory, for any thread."""
    from sqlite_utils import Database

    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db = Database(connection, recursive_triggers=False, execute_plugins=False)
    migrations.migrate(db, Path(":memory:"))
    return db


@contextmanager
def reading(path: Path) -> Iterator[Database]:
    """The existing file at ``path`` in one read transaction, whether or not it can be written."""
    db = connect(path, "mode=rw")
    try:
        try:
            db.execute("PRAGMA schema_version")
        except sqlite3.OperationalError as error:
            if is_corrupt(error) or is_busy(error):
                raise
            # A write-ahead log needs a writable folder even to read. Where nobody can write, nobody can tear.
            db.close()
            db = connect(path, "mode=ro&immutable=1")
        with db.atomic():
            yield db
    finally:
        db.close()


def is_busy(error: sqlite3.Error) -> bool:
    """Another connection holds a lock: trying again may help."""
    return "locked" in str(error)


def is_corrupt(error: sqlite3.Error) -> bool:
    """The file's content is damaged."""
    text = str(error)
    return any(sign in text for sign in ("malformed", "not a database", "Could not decode to UTF-8"))


def _read_once(path: Path, action: Callable[[Database], T], default: T) -> T:
    if file_identity(path) is None:
        return default
    with folder_lock(path.parent, exclusive=False):
        with reading(path) as db:
            version = migrations.schema_version(db, path)
            if version == len(migrations.MIGRATIONS):
                return action(db)
        if version:
            _migrate_for_reading(path)
            with reading(path) as db:
                return action(db)
    return default


def _migrate_for_reading(path: Path) -> None:
    db = connect(path, "mode=rw")
    try:
        migrations.migrate(db, path)
    finally:
        db.close()


def _write_once(path: Path, action: Callable[[Database], T]) -> T:
    path.parent.mkdir(parents=True, exist_ok=True)
    with folder_lock(path.parent, exclusive=False):
        db = connect(path, "mode=rwc")
        try:
            migrations.migrate(db, path)
            _use_write_ahead_log(db)
            db.execute("PRAGMA synchronous = FULL")
            with migrations.immediate(db):
                return action(db)
        finally:
            db.close()


def _use_write_ahead_log(db: Database) -> None:
    """Readers and a writer do not wait for each other then. Some network filesystems refuse: so be it."""
    try:
        db.execute("PRAGMA journal_mode = WAL").fetchone()
    except sqlite3.OperationalError:
        return


def _run(path: Path, attempt: Callable[[], T]) -> T:
    """Try until the file is not busy, and set it aside once if it is corrupt; else it is unavailable."""
    deadline = time.monotonic() + BUSY_SECONDS
    was_corrupt = False
    while True:
        try:
            seen = file_identity(path)
            with guard:
                return attempt()
        except sqlite3.Error as error:
            if is_corrupt(error) and not was_corrupt:
                was_corrupt = True
                _set_aside(path, seen, error)
            elif is_busy(error) and time.monotonic() < deadline:
                time.sleep(random.uniform(0.005, 0.02))
            else:
                raise StoreUnavailable(f"{path}: {error}") from error
        except migrations.NewerSchema as error:
            raise StoreUnavailable(str(error)) from None
        except OSError as error:
            raise StoreUnavailable(f"{path}: {error.strerror or error}") from error


def _set_aside(path: Path, seen: tuple[int, int] | None, cause: sqlite3.Error) -> None:
    try:
        aside = set_aside(path, seen)
    except OSError as error:
        raise StoreUnavailable(f"{path} is corrupt ({cause}) and cannot be set aside: {error}") from error
    if aside is not None:
        message = f"{path} is corrupt ({cause}): moved to {aside}, starting anew"
        warnings.warn(message, StoreWarning, stacklevel=6)
