"""The optional quack backend, on a stand-in for the package."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from dmuon.kernels.backends import BACKENDS
from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Unsupported


def gemm_symmetric(
    A: torch.Tensor, B: torch.Tensor, C: Any = None, out: Any = None, *, alpha: float, beta: float, **_: Any
) -> torch.Tensor:
    """What quack promises: alpha·A B + beta·C, beta being 1 if nobody says otherwise."""
    result = alpha * (A.float() @ B.float()) + (0 if C is None else beta * C.float())
    return out.copy_(result)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = ModuleType("quack"), ModuleType("quack.gemm_interface")
    package.__spec__ = module.__spec__ = None
    module.gemm_symmetric = gemm_symmetric  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", package)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)


def test_products_and_their_epilogues(installed: None) -> None:
    X = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    C = (X @ X.mT).clone()
    gram = BACKENDS["quack"].build("gram", {})
    out = gram(X, torch.empty_like(C), alpha=0.5, beta=-2.0, C=C, diag=3.0)
    exact = 0.5 * X.double() @ X.mT.double() - 2 * C.double() + 3 * torch.eye(24)
    assert (out - exact).norm() < 1e-2 * exact.norm()
    product = BACKENDS["quack"].build("symmetric_product", {})
    assert (product(C, C, torch.empty_like(C)) - C.double() @ C.double()).norm() < 1e-2 * (C @ C).norm()
    with pytest.raises(Unsupported, match="float32"):
        gram(X.float(), C.float())


def test_it_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    quack = BACKENDS["quack"]
    assert "CUDA" in str(quack.unavailable(torch.device("cpu")))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("dmuon.kernels.backends.quack_backend.arch_of", lambda device: ARCHS["sm_90a"])
    assert quack.unavailable(torch.device("cuda")) == "quack-kernels is not installed"
    assert quack.configs("gram", 4096, 4096, "bf16", ARCHS["sm_90a"]) == []
    monkeypatch.setitem(sys.modules, "quack", None)
    with pytest.raises(Unsupported, match="does not import"):
        quack.build("gram", {})(torch.ones(8, 8).bfloat16(), torch.ones(8, 8).bfloat16())


def test_it_is_offered_where_it_can_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    configs = BACKENDS["quack"].configs
    assert configs("gram", 4096, 8192, "bf16", ARCHS["sm_90a"]) == [{}]
    assert configs("gram", 256, 8192, "bf16", ARCHS["sm_90a"]) == []
    assert configs("gram", 4096, 8192, "bf16", ARCHS["sm_80"]) == []
    assert configs("gram", 4096, 8192, "fp32", ARCHS["sm_90a"]) == []
    with pytest.raises(ValueError, match="no apply"):
        BACKENDS["quack"].check("apply", {})
