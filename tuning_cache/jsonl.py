"""Trials as JSON Lines: one trial per line, UTF-8."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from dmuon.tuning_cache.files import replace_file
from dmuon.tuning_cache.trial import Trial


def write_lines(trials: Iterable[Trial], target: str | os.PathLike[str] | IO[str]) -> int:
    """Write the trials and return how many there were. A file appears whole, or stays what it was."""
    lines = [trial.to_json() + "\n" for trial in trials]
    if not isinstance(target, (str, os.PathLike)):
        target.writelines(lines)
        return len(lines)
    path = Path(target).resolve()
    if path.exists() and not path.is_file():  # a device or a pipe must not be replaced by a file
        with path.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        return len(lines)
    replace_file(path, "".join(lines).encode())
    return len(lines)


def read_lines(source: str | os.PathLike[str] | IO[str]) -> list[Trial]:
    """Read every trial; blank lines are skipped.

    Raises:
        ValueError: a line is not a trial; the text names the file and the line.
        OSError: the file cannot be read.
    """
    if isinstance(source, (str, os.PathLike)):
        with Path(source).open(encoding="utf-8-sig") as file:
            return _parse(file, str(source))
    return _parse(source, getattr(source, "name", "input"))


def _parse(lines: Iterable[str], name: str) -> list[Trial]:
    trials: list[Trial] = []
    number = 1
    try:
        for line in lines:
            if line.strip():
                trials.append(Trial.from_json(line))
            number += 1
    except UnicodeDecodeError as error:
        # Text is decoded in blocks, so the bytes may be some lines further on.
        raise ValueError(f"{name}, line {number} or later: not UTF-8 ({error.reason})") from None
    except ValueError as error:
        raise ValueError(f"{name}, line {number}: {error}") from None
    return trials
