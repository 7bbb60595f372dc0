"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write ``content`` beside ``path``, synchronise it to the disk, and let it take the place of ``path``.

    Raises:
        OSError: it cannot be written; the error names ``path``, where nothing has changed.
    """
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise
