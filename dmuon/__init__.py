"""Distributed Muon at the cost of AdamW. Everything here loads on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmuon.muon import Muon as Muon
    from dmuon.policy import MatrixPolicy as MatrixPolicy
    from dmuon.report import describe as describe

__version__ = "0.1.0"

_EXPORTS = {"Muon": "dmuon.muon", "MatrixPolicy": "dmuon.policy", "describe": "dmuon.report"}

__all__ = ["MatrixPolicy", "Muon", "__version__", "describe"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
