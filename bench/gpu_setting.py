"""Where the stages of gpu_suite.py run, and what a stage and a task of it are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from timing import host_us, in_turn, typical_ms

from dmuon.kernels.backends import BACKENDS
from dmuon.tuning_cache import Store

ROUNDS, LIMIT_S = 9, 20.0


@dataclass(frozen=True)
class Setting:
    """Where the stages run, and the store that tuning writes to. On a CPU, all sizes are toys."""

    device: torch.device
    store: Store

    @property
    def toy(self) -> bool:
        return self.device.type == "cpu"

    @property
    def kind(self) -> str:
        return self.device.type

    @property
    def rounds(self) -> int:
        return 2 if self.toy else ROUNDS

    def typical_ms(self, run: Callable[[], object]) -> float:
        return typical_ms(run, self.rounds, self.kind)

    def in_turn(self, runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        return in_turn(runs, self.rounds, LIMIT_S, self.kind)

    def host_us(self, run: Callable[[], object]) -> float:
        return host_us(run, self.kind)

    @property
    def precisions(self) -> tuple[str, ...]:
        return ("bf16",) if self.toy else ("fp16", "bf16")

    @property
    def backends(self) -> list[str]:
        """Those that run here, torch's whole products aside."""
        return [name for name in BACKENDS if name != "torch" and not BACKENDS[name].unavailable(self.device)]


@dataclass(frozen=True)
class Task:
    """One measurement; ``run`` gets the seconds it may take, and returns its results as JSON values."""

    name: str
    run: Callable[[float], dict[str, Any]]


@dataclass(frozen=True)
class Stage:
    """``share``: of the time there is."""

    about: str
    share: float
    tasks: Callable[[Setting], Iterator[Task]]


def short(config: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in config.items())
