"""Where the store lives."""

from __future__ import annotations

import os
from pathlib import Path

DATABASE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
FILE_NAME = "tuning.db"


def default_path() -> Path:
    """The store's file: ``$DMUON_CACHE`` where set, else ``tuning.db`` in the user's cache folder.

    ``DMUON_CACHE`` names a folder, or a file when it ends in ``.db``, ``.sqlite`` or ``.sqlite3``. Nothing is
    created.
    """
    override = os.environ.get("DMUON_CACHE")
    if not override:
        from platformdirs import user_cache_path

        return user_cache_path("dmuon", appauthor=False) / FILE_NAME
    path = Path(override).expanduser()
    if path.suffix in DATABASE_SUFFIXES and not path.is_dir():
        return path
    return path / FILE_NAME
