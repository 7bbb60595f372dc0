"""The folder of a checkpoint, which takes the place of an older one as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dmuon.tuning_cache.aside import folder_lock
from dmuon.tuning_cache.files import replace_file

EXTRA = "extra.pt"
"""The file beside those of :mod:`torch.distributed.checkpoint`."""


def partial_of(path: Path) -> Path:
    """Where a checkpoint is written before it gets to ``path``."""
    return path.with_name(path.name + ".partial")


def find(path: Path) -> Path | None:
    """The checkpoint at ``path``, or the one that :func:`replace` had moved away when it was interrupted."""
    return next((folder for folder in (path, _old(path)) if (folder / ".metadata").is_file()), None)


@contextmanager
def partial(path: Path) -> Iterator[None]:
    """An empty folder at ``partial_of(path)``, for this process alone. It is gone afterwards, moved or not.

    Raises:
        FileExistsError: there is something at ``path`` that is no checkpoint and must not be replaced.
        RuntimeError: another process is saving to ``path``.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; a checkpoint is a folder")
    for entry in path.iterdir() if path.exists() else ():
        if entry.name not in (".metadata", EXTRA) and entry.suffix != ".distcp":
            raise FileExistsError(
                f"{path} holds {entry.name!r}, which is no part of a checkpoint and would be lost: choose another path"
            )
    folder = partial_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with folder_lock(path.parent, exclusive=True):
            if folder.exists():
                _remove_unless_locked(folder, path)
            folder.mkdir()
            # The system drops it with the process, however that ends.
            stack.enter_context(folder_lock(folder, exclusive=True))
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def finish(path: Path, extra: bytes) -> None:
    """Add the file of extra values to the folder at ``partial_of(path)`` and let it take the place of ``path``."""
    folder, old = partial_of(path), _old(path)
    replace_file(folder / EXTRA, extra)
    _synchronize(folder)
    with folder_lock(path.parent, exclusive=True):
        if path.exists():
            _remove(old)
            path.rename(old)
        folder.rename(path)
        _synchronize(path.parent)
        _remove(old)


def identity(folder: Path) -> tuple[int, ...] | None:
    """What tells the checkpoint in ``folder`` from one that later takes its place; None where there is none."""
    try:
        status = (folder / ".metadata").stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _remove_unless_locked(folder: Path, path: Path) -> None:
    try:
        with folder_lock(folder, exclusive=True, seconds=0):
            shutil.rmtree(folder)
    except TimeoutError:
        raise RuntimeError(
            f"another process is saving to {path}: let each job save to a path of its own"
        ) from None


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _synchronize(folder: Path) -> None:
    """Make what was created and renamed in ``folder`` outlast a power cut, where folders can be synchronised."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
