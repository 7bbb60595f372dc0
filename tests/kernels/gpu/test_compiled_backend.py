"""Whole iterations on compiled backends, as on a GPU: run_ns, host code and PTX, with the launch alone interpreted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from ptx import Memory, run

import dmuon.kernels.gpu.driver
from dmuon.kernels.backends import BACKENDS
from dmuon.kernels.choose import NSChoice, ProductChoice
from dmuon.kernels.coefficients import polar_express
from dmuon.kernels.gpu.arch import ARCHS, Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported
from dmuon.kernels.gpu.build import build_here
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.products import gram
from dmuon.kernels.reference import polynomial_polar, relative_error, tolerance
from dmuon.kernels.run import run_ns

COMPILED = ("triton", "cute", "tilelang")
build_once = lru_cache(build_here)
launched: list[KernelSpec] = []


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Arch]]:
    """Make CPU tensors pass for tensors of a GPU of the given arch."""
    seen: list[torch.Tensor] = []
    original = Matrices.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[Matrices], tensor: torch.Tensor) -> Matrices:
        seen.append(tensor)
        return original(cls, tensor)

    def prepared(binary: Binary, launch: Launch, device: torch.device) -> Callable[[], None]:
        tensors = {(t.data_ptr(), t.shape, t.stride()): t for t in seen}

        def interpret() -> None:
            launched.append(binary.spec)
            run(binary, launch, Memory.of(*tensors.values()))

        return interpret

    def use(name: str) -> Arch:
        monkeypatch.setattr("dmuon.kernels.backends.compiled.arch_of", lambda device: ARCHS[name])
        return ARCHS[name]

    monkeypatch.setattr(Matrices, "of", classmethod(of))
    monkeypatch.setattr("dmuon.kernels.gpu.load.binary_for", build_once)
    monkeypatch.setattr("dmuon.kernels.gpu.driver.prepared", prepared)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=3)
    )
    for name in COMPILED:
        monkeypatch.setattr(BACKENDS[name], "_built", {})
    launched.clear()
    yield use


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("shape", [(2, 96, 200), (136, 72)], ids=str)
@pytest.mark.parametrize("backend, arch", [("triton", "sm_80"), ("triton", "sm_90a"), ("cute", "sm_80")])
def test_a_whole_iteration_in_the_gram_form(
    on: Callable[[str], Arch], backend: str, arch: str, shape: tuple[int, ...]
) -> None:
    m, n = sorted(shape[-2:])
    product = ProductChoice(backend, BACKENDS[backend].configs("gram", m, n, "fp16", on(arch))[0])
    G = gaussian(*shape)
    choice = NSChoice("gram", (2,), product, product)
    result = run_ns(G, choice, polar_express(), torch.float16, strict=True)
    exact = polynomial_polar(G, polar_express())
    assert relative_error(result, exact).max() < tolerance(torch.float16)
    # Two Gram products; P of each of five steps, R P and P R P of all but the last of each segment.
    assert len(launched) == 2 + 5 + 2 * 3


def test_a_whole_iteration_in_one_launch(on: Callable[[str], Arch]) -> None:
    whole = ProductChoice("triton", BACKENDS["triton"].configs("gram_ns", 24, 80, "bf16", on("sm_80"))[0])
    G = gaussian(3, 80, 24)
    result = run_ns(G, NSChoice("gram", (1, 3), whole=whole), polar_express(), torch.bfloat16, strict=True)
    exact = polynomial_polar(G, polar_express())
    assert relative_error(result, exact).max() < tolerance(torch.bfloat16)
    assert len(launched) == 1


def test_a_launch_is_made_once_and_repeated(
    on: Callable[[str], Arch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs every step must not be specified, looked up and packed every step."""
    product = ProductChoice("triton", BACKENDS["triton"].configs("gram", 24, 40, "fp16", on("sm_80"))[0])
    made: list[Launch] = []
    original = dmuon.kernels.gpu.driver.prepared

    def prepared(binary: Binary, launch: Launch, device: torch.device) -> Callable[[], None]:
        made.append(launch)
        return original(binary, launch, device)

    monkeypatch.setattr("dmuon.kernels.gpu.driver.prepared", prepared)
    X, out = gaussian(24, 40).half(), torch.empty(24, 24, dtype=torch.float16)
    for _ in range(3):
        BACKENDS["triton"].build("gram", product.config)(X, out)
    assert len(made) == 1 and len(launched) == 3


def test_what_a_kernel_cannot_serve_runs_on_torch_and_is_reported_once(on: Callable[[str], Arch]) -> None:
    config = BACKENDS["triton"].configs("gram", 32, 64, "fp16", on("sm_80"))[0]
    product = ProductChoice("triton", config)
    choice = NSChoice("gram", (), product, product)
    G = gaussian(32, 64)
    with pytest.raises(Unsupported):
        run_ns(G, choice, polar_express(), torch.float32, strict=True)
    with pytest.warns(RuntimeWarning, match="triton cannot run gram: .*fp32"):
        result = run_ns(G, choice, polar_express(), torch.float32)
    assert relative_error(result, polynomial_polar(G, polar_express())) < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ns(G, choice, polar_express(), torch.float32)


@pytest.mark.parametrize("backend", COMPILED)
def test_without_a_gpu_a_backend_says_what_it_needs(backend: str) -> None:
    assert BACKENDS[backend].unavailable(torch.device("cpu")) == "it needs a CUDA GPU, not cpu"
    assert BACKENDS[backend].configs("gram", 512, 512, "bf16") == []
    if not torch.cuda.is_available():
        assert "no CUDA GPU" in str(BACKENDS[backend].unavailable(torch.device("cuda")))


@pytest.mark.parametrize("backend", COMPILED)
def test_a_product_on_a_cpu_names_backend_and_reason(backend: str) -> None:
    X = torch.ones(8, 8)
    with pytest.raises(ValueError, match=f"'{backend}' cannot run on cpu: it needs a CUDA GPU"):
        gram(X, backend=backend)
    with pytest.raises(TypeError, match="config must be a mapping"):
        gram(X, backend="torch", config="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not inverse"):
        BACKENDS[backend].build("inverse", {})


@pytest.mark.parametrize("backend", COMPILED)
def test_configurations_from_outside_are_checked(backend: str) -> None:
    for config in ({}, {"kernel": "nothing"}, {"kernel": "symmetric", "bogus": 1}):
        with pytest.raises(ValueError):
            BACKENDS[backend].check("gram", config)
