"""Runs of statements that one closure does faster than many."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptx.machine import Machine


def fuse(machine: Machine) -> None:
    """Replaces closures of ``machine`` where a run of statements can be done at once."""
