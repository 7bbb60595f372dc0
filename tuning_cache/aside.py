"""Moving a corrupt store out of the way while other processes may be doing the same."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dmuon.tuning_cache.migrations import APPLICATION_ID, foreign_file
from dmuon.tuning_cache.paths import DATABASE_SUFFIXES

try:
    import fcntl
except ImportError:  # Windows does not let a file that is in use be renamed, which is protection enough
    fcntl = None  # type: ignore[assignment]

LOCK_SECONDS = 30.0
_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100


@contextmanager
def folder_lock(folder: Path, *, exclusive: bool, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the folder's advisory lock: shared while a store in it is open, exclusive to set one aside.

    Renaming an SQLite file under a connection that is just opening would pair it with another file's log.

    Raises:
        TimeoutError: not had within ``seconds``.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _flock(descriptor, folder, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, seconds)
        yield
    finally:
        os.close(descriptor)


def _flock(descriptor: int, folder: Path, kind: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{folder} is locked by another process") from None
            time.sleep(random.uniform(0.005, 0.02))
        except OSError:  # some network filesystems lock no folders; file_identity still guards the rename
            return


def file_identity(path: Path) -> tuple[int, int] | None:
    """What tells this file from one that later takes its name; ``None`` when there is none."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def set_aside(path: Path, seen: tuple[int, int] | None) -> Path | None:
    """Rename a corrupt store, and its logs with it, to a name with the time in it; return that name.

    ``seen`` is the :func:`file_identity` of the file that was found corrupt. When another process has
    moved it already, nothing is done and ``None`` is returned.

    Raises:
        ValueError: the file is another program's SQLite file, or not named as a database at all.
        OSError: the folder is not writable.
    """
    with folder_lock(path.parent, exclusive=True):
        if seen is None or file_identity(path) != seen:
            return None
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
        whole_header = len(header) == _HEADER_BYTES and header.startswith(_MAGIC)
        if whole_header and int.from_bytes(header[68:72], "big") != APPLICATION_ID:
            raise foreign_file(path)
        if not whole_header and path.suffix not in DATABASE_SUFFIXES:
            raise foreign_file(path)
        aside = _free_name(path)
        # The file itself goes last: until then, whoever opens the path still finds it corrupt.
        for suffix in ("-journal", "-wal", "-shm", ""):
            log = Path(f"{path}{suffix}")
            if log.exists():
                log.rename(f"{aside}{suffix}")
        return aside


def _free_name(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside, number = Path(f"{path}.corrupt-{stamp}"), 1
    while aside.exists():
        number += 1
        aside = Path(f"{path}.corrupt-{stamp}-{number}")
    return aside
