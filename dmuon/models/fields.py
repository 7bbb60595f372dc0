"""Checked reading of the fields of a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A file with more is damaged, and listing its layers one by one would not end.
LARGEST = 2**31
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class Fields:
    """The fields of a JSON object; ``where`` names it in errors, every one of which is a ValueError."""

    data: Mapping[str, Any]
    where: str

    def size(self, name: str, default: int | None = None, at_most: int = LARGEST) -> int:
        """A positive integer; a missing or null field is ``default``, an error if that is None."""
        value = self.data.get(name)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.where}: the field {name!r} is missing")
        if type(value) is not int or not 1 <= value <= at_most:
            raise ValueError(f"{self.where}: {name} must be an integer from 1 to {at_most}, got {value!r}")
        return value

    def layers(self, name: str = "num_hidden_layers", default: int | None = None) -> int:
        """A number of layers."""
        return self.size(name, default, at_most=MOST_LAYERS)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean; a missing or null field is ``default``."""
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} must be true or false, got {value!r}")
        return value

    def integers(self, name: str) -> frozenset[int]:
        """A list of integers; a missing or null field is empty."""
        value = self.data.get(name) or []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise ValueError(f"{self.where}: {name} must be a list of integers, got {value!r}")
        return frozenset(value)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.data.get(name) is not None

    def object(self, name: str) -> Fields:
        """A nested object."""
        if not self.has(name):
            raise ValueError(f"{self.where}: the field {name!r} is missing")
        value = self.data[name]
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.where}: {name} must be an object, got {value!r}")
        return Fields(value, f"{self.where}: {name}")
