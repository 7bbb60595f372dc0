"""Models known by name: the published dimensions, as data files beside this module."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def preset_names() -> tuple[str, ...]:
    """The names of the shipped presets, sorted."""
    return tuple(
        sorted(
            file.name[: -len(".json")] for file in files(__package__).iterdir() if file.name.endswith(".json")
        )
    )


def preset_config(name: str) -> tuple[str, dict[str, Any]]:
    """The source of a preset's figures and the configuration itself; ``name`` in any case."""
    preset = json.loads((files(__package__) / f"{name.lower()}.json").read_text(encoding="utf-8"))
    return preset["source"], preset["config"]
