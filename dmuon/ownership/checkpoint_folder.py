"""The folder of a checkpoint, which takes the place of an older one as a whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

EXTRA = "extra.pt"
"""The file beside those of :mod:`torch.distributed.checkpoint`."""


def partial_of(path: Path) -> Path:
    """Where a checkpoint is written before it gets to ``path``."""
    return path.with_name(path.name + ".partial")


def find(path: Path) -> Path | None:
    """The checkpoint at ``path``, or the one that :func:`replace` had moved away when it was interrupted."""
    return next((folder for folder in (path, _old(path)) if (folder / ".metadata").is_file()), None)


def start(path: Path) -> None:
    """Make an empty folder at ``partial_of(path)``.

    Raises:
        FileExistsError: there is something at ``path`` that is no checkpoint and must not be replaced.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; a checkpoint is a folder")
    for entry in path.iterdir() if path.exists() else ():
        if entry.name not in (".metadata", EXTRA) and entry.suffix != ".distcp":
            raise FileExistsError(
                f"{path} holds {entry.name!r}, which is no part of a checkpoint and would be lost: choose another path"
            )
    _remove(partial_of(path))
    partial_of(path).mkdir(parents=True)


def finish(path: Path, extra: bytes) -> None:
    """Add the file of extra values to the folder at ``partial_of(path)`` and let it take the place of ``path``."""
    partial, old = partial_of(path), _old(path)
    with (partial / EXTRA).open("wb") as file:
        file.write(extra)
        file.flush()
        os.fsync(file.fileno())
    _synchronize(partial)
    if path.exists():
        _remove(old)
        path.rename(old)
    partial.rename(path)
    _synchronize(path.parent)
    _remove(old)


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old")


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
