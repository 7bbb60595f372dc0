"""A GPU's stand-in for the optimizer's steps in kernels, and what they should come to."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from muon_reference import muon_step
from ptx import Memory, run
from test_graphs import Recorder
from torch import Tensor, nn

import dmuon
from dmuon.graphs import Replays
from dmuon.kernels.choose import NSChoice
from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch
from dmuon.kernels.gpu.build import build_here

build_once = lru_cache(build_here)


def alive() -> list[Tensor]:
    """All tensors made since ``gc.freeze``, as a GPU would find them at their addresses."""
    found = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return [t for t in found if t.device.type == "cpu" and t.layout == torch.strided and t.numel()]


class Gpu:
    """Makes the optimizer take CPU tensors for a GPU's: launches are interpreted, graphs re-run what they recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.recorder = Recorder()
        self.launched: list[KernelSpec] = []

    def use(self, arch: str = "sm_80", *, graphs: bool = True) -> Gpu:
        patch = self._patch.setattr
        patch("dmuon.fused_step.step_arch", lambda device: ARCHS[arch])
        patch("dmuon.kernels.backends.compiled.arch_of", lambda device: ARCHS[arch])
        patch("dmuon.kernels.gpu.load.binary_for", build_once)
        patch("dmuon.kernels.gpu.driver.prepared", self._prepared)
        if graphs:
            patch("dmuon.fused_step.replayable", lambda device: True)
            patch("dmuon.matrix_step.Replays", lambda: Replays(self.recorder))
        return self

    def choose(self, choice: NSChoice) -> None:
        self._patch.setattr("dmuon.fused_step.choose_ns", lambda *_: choice)

    def _prepared(self, binary: Binary, launch: Launch, device: torch.device) -> Callable[[], None]:
        def interpret() -> None:
            self.launched.append(binary.spec)
            run(binary, launch, Memory.of(*alive()), seed=len(self.launched))

        return interpret


def muon(*groups: dict[str, Any], precision: str = "fp16", **options: Any) -> dmuon.Muon:
    options = {"coefficients": "keller_jordan", "precision": precision, **options}
    return dmuon.Muon([{"algorithm": "muon", **group} for group in groups], **options)


class Oracle:
    """The weights of some matrices in fp64, by an SVD."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach().double().numpy().copy()
        self.momentum = np.zeros_like(self.weight)

    def step(self, gradient: Tensor, *, maximize: bool = False, **options: Any) -> None:
        decay = options["lr"] * options["weight_decay"]
        kept = (1 - decay) * self.weight
        moved, self.momentum = muon_step(self.weight, gradient.double().numpy(), self.momentum, **options)
        self.weight = 2 * kept - moved if maximize else moved

    def error(self, weight: Tensor, length: float) -> float:
        """Relative to a step of ``length``, in the Frobenius norm of an orthogonal matrix of this shape."""
        difference = np.linalg.norm(weight.detach().double().numpy() - self.weight)
        return float(difference / (length * np.sqrt(min(self.weight.shape))))
