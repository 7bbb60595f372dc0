"""Files that are there whole, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dmuon.tuning_cache.files import replace_file


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    replace_file(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as caught:
        patch.setattr(os, "fsync", full)
        replace_file(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_the_error_names_the_file_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        replace_file(tmp_path / "none" / "x", b"")
    assert caught.value.filename == str(tmp_path / "none" / "x")
