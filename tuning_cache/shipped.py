"""Trials that come with DMuon: ``shipped/*.jsonl``, one file per device."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING

from dmuon.tuning_cache.jsonl import read_lines
from dmuon.tuning_cache.trial import Trial

if TYPE_CHECKING:
    from importlib.abc import Traversable


def shipped_trials(device: str | None = None) -> list[Trial]:
    """The shipped trials of one device key, or of all devices; read from the package at each call.

    Raises:
        ValueError: a shipped file is broken; the text names it and the line.
    """
    folder = _folder()
    if not folder.is_dir():
        return []
    if device is not None:
        entries = [folder / file_name(device)]
    else:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    trials: list[Trial] = []
    for entry in entries:
        if entry.name.endswith(".jsonl") and entry.is_file():
            with entry.open(encoding="utf-8") as file:
                trials += read_lines(file)
    return [trial for trial in trials if device in (None, trial.device)]


def file_name(device: str) -> str:
    """The shipped file of a device key: ``"cuda:NVIDIA H200"`` → ``"cuda-nvidia-h200.jsonl"``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".jsonl"


def _folder() -> Traversable:
    return files("dmuon.tuning_cache") / "shipped"
