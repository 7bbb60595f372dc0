"""Steps made in kernels: the optimizer's very launches run by the PTX interpreter, with torch's products between."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from muon_helpers import gradient_like, parameter
from muon_reference import muon_step
from ptx import Memory, run
from test_graphs import Recorder
from torch import Tensor, nn

import dmuon
import dmuon.fused_step
from dmuon.batching import Update
from dmuon.graphs import Replays
from dmuon.kernels import step as step_module
from dmuon.kernels.backends.compiled import TRITON
from dmuon.kernels.choose import NSChoice, ProductChoice
from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported
from dmuon.kernels.gpu.build import build_here
from dmuon.lr_adjust import RULES

pytest.importorskip("triton")

build_once = lru_cache(build_here)
TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}
"""Of a whole step, relative to its length."""


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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    step_module._prepared.cache_clear()
    monkeypatch.setattr(TRITON, "_built", {})
    gc.freeze()
    yield Gpu(monkeypatch)
    gc.unfreeze()
    step_module._prepared.cache_clear()


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


@pytest.mark.case(row="P3")
@pytest.mark.case(row="P4")
@pytest.mark.case(row="T6")
@pytest.mark.parametrize(
    ("arch", "precision", "dtype"),
    [("sm_80", "fp16", torch.float32), ("sm_90a", "bf16", torch.float32), ("sm_80", "fp16", torch.bfloat16)],
)
def test_steps_equal_those_by_an_svd(gpu: Gpu, arch: str, precision: str, dtype: torch.dtype) -> None:
    """Two groups with options of their own share batches; experts; tall and wide; the rate changes between replays."""
    gpu.use(arch)
    first, second = (parameter(24, 40, seed=k, dtype=dtype) for k in range(2))
    tall, experts = parameter(40, 24, seed=2, dtype=dtype), parameter(3, 24, 40, seed=3, dtype=dtype)
    groups: list[dict[str, Any]] = [
        {"params": [first, tall], "lr": 0.1, "weight_decay": 0.5, "momentum": 0.9, "adjust_lr": "original"},
        {
            "params": [second, experts],
            "lr": torch.tensor(0.2),
            "weight_decay": 0.0,
            "momentum": 0.5,
            "maximize": True,
            "adjust_lr": "match_rms_adamw",
        },
    ]
    optimizer = muon(*groups, precision=precision)
    weights = {weight: group for group in optimizer.param_groups for weight in group["params"]}
    oracles = {
        weight: [Oracle(matrix) for matrix in weight.view(-1, *weight.shape[-2:])] for weight in weights
    }
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.param_groups[1]["lr"].fill_(0.2 / (step + 1))
        for k, (weight, group) in enumerate(weights.items()):
            weight.grad = None if (step, k) == (1, 0) else gradient_like(weight, seed=10 * step + k)
            if weight.grad is None:
                continue
            for oracle, gradient in zip(
                oracles[weight], weight.grad.view(-1, *weight.shape[-2:]), strict=True
            ):
                oracle.step(
                    gradient,
                    lr=float(group["lr"]),
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                    factor=RULES[group["adjust_lr"]](*weight.shape[-2:]),
                    maximize=group["maximize"],
                )
        optimizer.step()
    rounding = 2 * 2.0**-8 * 4 if dtype == torch.bfloat16 else 0.0
    for weight, group in weights.items():
        length = 0.1 * RULES[group["adjust_lr"]](*weight.shape[-2:])
        for oracle, matrix in zip(oracles[weight], weight.view(-1, *weight.shape[-2:]), strict=True):
            scale = np.linalg.norm(oracle.weight) / (length * np.sqrt(min(oracle.weight.shape)))
            assert oracle.error(matrix, length) < 5 * TOLERANCE[precision] + rounding * scale
    assert gpu.recorder.replayed >= 2 and optimizer.nonfinite() == 0
    assert {spec.module.rpartition(".")[2] for spec in gpu.launched} == {
        "prepare_kernel",
        "guard_kernel",
        "apply_kernel",
    }
