"""The schema, one migration per version, and whether a file is a store at all.

A store carries :data:`APPLICATION_ID` in its header, so that another program's SQLite file is never taken for
one, and its schema version in ``PRAGMA user_version``: the number of migrations it has been through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlite_utils import Database

APPLICATION_ID = int.from_bytes(b"DMuo", "big")


class NewerSchema(Exception):
    """The file was written by a later DMuon, and is left alone."""


def _create_trials(db: Database) -> None:
    text = ("op", "dtype", "device", "coefficients", "backend", "config", "status", "message", "versions")
    integers, reals = ("batch", "m", "n", "samples"), ("error", "tolerance", "median_ms", "spread")
    trials = db.table("trials").create(
        {
            "uid": str,
            **dict.fromkeys((*text, "source_hash"), str),
            **dict.fromkeys(integers, int),
            **dict.fromkeys((*reals, "created_at"), float),
        },
        pk="uid",
        not_null={*text, *integers, "source_hash", "created_at"},
    )
    trials.create_index(["op", "dtype", "device", "coefficients", "m", "n", "batch"])


def _create_claims(db: Database) -> None:
    columns = {"key": str, "owner": str, "expires_at": float}
    db.table("claims").create(columns, pk="key", not_null={"owner", "expires_at"})


def _create_plans(db: Database) -> None:
    columns = {"key": str, "text": str, "created_at": float}
    db.table("plans").create(columns, pk="key", not_null={"text", "created_at"})


MIGRATIONS: tuple[Callable[[Database], None], ...] = (_create_trials, _create_claims, _create_plans)


def schema_version(db: Database, path: Path) -> int:
    """The version of an open store, 0 for an empty file. Call inside a transaction: it takes several reads.

    Raises:
        ValueError: an SQLite file that is not a store.
        NewerSchema: a store of a version that this code does not know.
    """
    application: int = db.execute("PRAGMA application_id").fetchone()[0]
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        if application == version == 0 and not db.table("sqlite_master").count:
            return 0
        raise foreign_file(path)
    if version > len(MIGRATIONS):
        raise NewerSchema(
            f"{path} has schema version {version} and this DMuon knows up to {len(MIGRATIONS)}: "
            "upgrade DMuon, or set DMUON_CACHE to another folder"
        )
    return version


def migrate(db: Database, path: Path) -> None:
    """Bring a store, or an empty file, to the current schema version: one transaction per version."""
    with db.atomic():
        version = schema_version(db, path)
    while version < len(MIGRATIONS):
        with immediate(db):
            version = schema_version(db, path)  # another process may have migrated meanwhile
            if version < len(MIGRATIONS):
                MIGRATIONS[version](db)
                version += 1
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {version}")


@contextmanager
def immediate(db: Database) -> Iterator[None]:
    """A transaction that takes the write lock at its start, so that it can wait for it."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.commit()
    except BaseException:
        db.rollback()
        raise


def foreign_file(path: Path) -> ValueError:
    """The error for a file that belongs to something else."""
    return ValueError(f"{path} is not a DMuon store: it is left as it is; give the store another path")
