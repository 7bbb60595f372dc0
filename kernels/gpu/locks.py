"""A lock between processes that ends with its holder, however that ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # no GPU kernels are built there
    fcntl = None  # type: ignore[assignment]

_POLL_S = 0.05


@contextmanager
def file_lock(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold the lock called ``path``, a file that exists only meanwhile; yields whether it was had.

    It is not when others held it for ``timeout_s``, or where files cannot be made or locked: what it guards must
    then be merely wasteful to do twice.
    """
    descriptor = _acquire(path, time.monotonic() + timeout_s)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with suppress(OSError):
                path.unlink()
            # Closing alone would not do: a child that was forked meanwhile holds the descriptor too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _acquire(path: Path, deadline: float) -> int | None:
    if fcntl is None:
        return None
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, descriptor):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(_POLL_S)
        except OSError:  # some network filesystems have no locks
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the file that was locked is the one that ``path`` names; its last holder may have removed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
