"""The store of trials: what the rest of DMuon uses."""

from __future__ import annotations

import math
import os
import sqlite3
import time
import uuid
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, TypeVar

from dmuon.tuning_cache import claims, database, jsonl, migrations, plans, rows
from dmuon.tuning_cache.aside import file_identity
from dmuon.tuning_cache.claims import Claim
from dmuon.tuning_cache.database import StoreUnavailable, StoreWarning
from dmuon.tuning_cache.paths import FILE_NAME, default_path
from dmuon.tuning_cache.rows import Filters
from dmuon.tuning_cache.trial import Trial

if TYPE_CHECKING:
    from sqlite_utils import Database
    from typing_extensions import Unpack

T = TypeVar("T")


@dataclass(frozen=True)
class Health:
    """The state of a store. ``integrity`` is ``"ok"`` or what SQLite found, ``problem`` what bars its use.

    ``schema_version`` and ``rows`` are those of the file, ``None`` and 0 where it is absent or unreadable.
    ``in_memory``: this process's own new trials are not on the disk.
    """

    path: Path
    exists: bool
    writable: bool
    schema_version: int | None
    rows: int
    size_bytes: int
    integrity: str
    problem: str | None
    in_memory: bool


class Store:
    """Every trial ever made, in one SQLite file that any number of processes and threads use at once.

    Constructing a store and reading from it create nothing. When the file cannot be used — a full disk, a
    read-only folder, a schema from a later DMuon — one :class:`StoreWarning` says so, and from then on this
    object keeps what it is given in memory, on top of the rows it can still read. A corrupt file is renamed,
    with a :class:`StoreWarning`, and a new one begun. With ``strict=True`` an unusable file raises
    :class:`StoreUnavailable` instead.

    Raises:
        ValueError: ``path`` is a folder, or (at its first use) a file that is not a store.
    """

    def __init__(self, path: Path | str | None = None, *, strict: bool = False) -> None:
        self.path = default_path() if path is None else Path(path).expanduser()
        if _is_folder(self.path):
            raise ValueError(f"store path {self.path} is a folder: name a file, as {self.path / FILE_NAME}")
        self._strict = strict
        self._memory: Database | None = None
        self._file_is_readable = True
        self._warned_of_invalid_rows = False

    def record(self, trials: Iterable[Trial]) -> None:
        """Keep the trials, all or none. They are on the disk when this returns, or this store is in memory.

        A trial that is there already (same problem, configuration, kernel source, time) is not added again.
        """
        trials = list(trials)
        if trials:
            self._write(lambda db: rows.insert(db, trials))

    def trials(self, **filters: Unpack[Filters]) -> list[Trial]:
        """The trials that have all the values given, oldest first.

        Filters: ``op``, ``device``, ``dtype``, ``batch``, ``m``, ``n``, ``coefficients``, ``backend``,
        ``status``; any other raises TypeError.
        """
        if unknown := set(filters) - set(Filters.__annotations__):
            raise TypeError(f"trials are not filtered by {', '.join(sorted(unknown))}")
        pairs = self._read(lambda db: rows.select(db, filters))
        trials = [trial for _, trial in pairs if trial is not None]
        if len(trials) < len(pairs) and not self._warned_of_invalid_rows:
            self._warned_of_invalid_rows = True
            invalid = len(pairs) - len(trials)
            _warn(f"{self.path}: skipping {invalid} rows that are not valid trials; prune drops them")
        return trials

    def prune(
        self,
        *,
        keep: Callable[[Trial], bool] | None = None,
        older_than_s: float | None = None,
    ) -> int:
        """Delete trials that ``keep`` refuses, those older than ``older_than_s`` seconds, and invalid rows.

        Returns how many were deleted.
        """
        before = -math.inf if older_than_s is None else time.time() - older_than_s
        doomed = [
            uid
            for uid, trial in self._read(lambda db: rows.select(db, {}))
            if trial is None or trial.created_at < before or (keep is not None and not keep(trial))
        ]
        return self._write(lambda db: rows.delete(db, doomed)) if doomed else 0

    def claim(self, key: str, ttl: float) -> Claim | None:
        """Claim ``key`` for ``ttl`` seconds; ``None`` when somebody holds a live claim on it.

        A holder that dies loses its claim when its ``ttl`` is over; one that works longer calls
        :meth:`Claim.refresh`.
        """
        if not key or not 0 < ttl < math.inf:
            raise ValueError(f"a claim needs a key and a positive ttl in seconds, got {key!r}, {ttl!r}")
        owner = uuid.uuid4().hex

        def take(db: Database) -> bool:
            now = time.time()
            return claims.take(db, key, owner, now, now + ttl)

        def refresh() -> bool:
            return self._write(lambda db: claims.extend(db, key, owner, time.time() + ttl))

        def release() -> None:
            self._write(lambda db: claims.drop(db, key, owner))

        return Claim(key, refresh, release) if self._write(take) else None

    def claimed(self, key: str) -> bool:
        """Does anybody, this process included, hold a live claim on ``key``?"""
        return any(self._read(lambda db: [claims.is_live(db, key, time.time())]))

    def plan(self, key: str) -> str | None:
        """The plan that :meth:`keep_plan` was given under ``key``; ``None`` if there is none."""
        return next(iter(self._read(lambda db: plans.find(db, key))), None)

    def keep_plan(self, key: str, text: str) -> None:
        """Keep a plan, in the place of any with the same key. The newest
        :data:`~dmuon.tuning_cache.plans.KEPT` stay."""
        self._write(lambda db: plans.keep(db, key, text, time.time()))

    def export_jsonl(self, target: str | os.PathLike[str] | IO[str], **filters: Unpack[Filters]) -> int:
        """Write the trials that pass the filters of :meth:`trials` as JSON Lines; return how many.

        A file is replaced whole, or not at all. Raises OSError when it cannot be written.
        """
        return jsonl.write_lines(self.trials(**filters), target)

    def import_jsonl(self, source: str | os.PathLike[str] | IO[str]) -> int:
        """Record every trial of a JSON Lines file, or none; return how many were not there yet.

        Raises:
            ValueError: a line is not a valid trial; the text names the line.
            OSError: the file cannot be read.
        """
        trials = jsonl.read_lines(source)
        return self._write(lambda db: rows.insert(db, trials)) if trials else 0

    def health(self) -> Health:
        """Examine the whole file, changing nothing. For people: it reads every page. Never raises."""
        exists, version, count, size, integrity, problem = False, None, 0, 0, "ok", None
        try:
            exists = file_identity(self.path) is not None
            if exists:
                size = self.path.stat().st_size
                with database.guard, database.reading(self.path.resolve()) as db:
                    version = migrations.schema_version(db, self.path)
                    integrity = "; ".join(row[0] for row in db.execute("PRAGMA integrity_check(3)"))
                    count = db.table("trials").count if version else 0
        except (sqlite3.Error, OSError) as error:
            integrity = str(error)
        except (ValueError, migrations.NewerSchema) as error:
            problem = str(error)
        if integrity != "ok":
            problem = f"{self.path} cannot be used: {integrity}"
        return Health(
            path=self.path,
            exists=exists,
            writable=_is_writable(self.path),
            schema_version=version,
            rows=count,
            size_bytes=size,
            integrity=integrity,
            problem=problem,
            in_memory=self._memory is not None,
        )

    def close(self) -> None:
        """Drop what is held in memory. Rows on the disk need no closing."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, action: Callable[[Database], list[T]]) -> list[T]:
        found: list[T] = []
        if self._file_is_readable:
            try:
                found = database.read(self.path, action, default=[])
            except StoreUnavailable as error:
                self._file_is_readable = False
                self._degrade(error)
        if self._memory is not None:
            with database.guard:
                found = found + action(self._memory)
        return found

    def _write(self, action: Callable[[Database], T]) -> T:
        if self._memory is None:
            try:
                return database.write(self.path, action)
            except StoreUnavailable as error:
                self._degrade(error)
        assert self._memory is not None
        with database.guard, migrations.immediate(self._memory):
            return action(self._memory)

    def _degrade(self, error: StoreUnavailable) -> None:
        if self._strict:
            raise error
        if self._memory is None:
            self._memory = database.memory()
            _warn(f"{error}. Trials of this process are kept in memory only")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a folder on the way may not be entered: the first use says so
        return False


def _is_writable(path: Path) -> bool:
    """Whether the file could be written or, with its missing folders, made."""
    while not os.access(path, os.F_OK) and path != path.parent:
        path = path.parent
    return os.access(path, os.W_OK)


def _warn(message: str) -> None:
    warnings.warn(message, StoreWarning, stacklevel=4)
