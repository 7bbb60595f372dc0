"""Whole iterations on compiled backends, as on a GPU: run_ns, host code and PTX, with the launch alone interpreted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ptx import Memory, run

import dmuon.kernels.gpu.driver
from dmuon.kernels.backends import BACKENDS
from dmuon.kernels.choose import NSChoice, ProductChoice
from dmuon.kernels.coefficients import CoefficientSet, polar_express
from dmuon.kernels.gpu.arch import ARCHS, Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported
from dmuon.kernels.gpu.build import build_here
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.triton_kernels.symmetric import SYMMETRIC
from dmuon.kernels.products import gram
from dmuon.kernels.reference import polynomial_polar, relative_error, tolerance
from dmuon.kernels.run import run_ns, working_memory

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
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4)
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


TILES = {"kernel": "symmetric", "block": 64, "block_k": 32, "warps": 4, "stages": 3, "group": 8}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What working memory holds at first must not matter."""

    def memory(*args: Any, **kwargs: Any) -> torch.Tensor:
        return working_memory(*args, **kwargs).fill_(torch.nan)

    monkeypatch.setattr("dmuon.kernels.run.working_memory", memory)


def triton(**more: Any) -> ProductChoice:
    return ProductChoice("triton", TILES | more)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_an_iteration_by_lower_halves_is_that_with_mirrors_bit_for_bit(
    on: Callable[[str], Arch], arch: str
) -> None:
    on(arch)
    G, lower = gaussian(136, 72), (triton(lower="write"), triton(lower="both"))
    results = [
        run_ns(G, NSChoice("gram", (2,), *products), polar_express(), torch.float16, strict=True)
        for products in (lower, (triton(), triton()))
    ]
    exact = polynomial_polar(G, polar_express())
    assert relative_error(results[0], exact) < tolerance(torch.float16)
    assert torch.equal(*results)
    # Mirrors are written of the five P alone, which multiply what is not symmetric.
    half = launched[: len(launched) // 2]
    assert sum(not spec.options["write_lower"] for spec in half) == 5
    assert len(half) == 2 + 5 + 2 * 3


@pytest.mark.usefixtures("poisoned")
def test_the_standard_form_by_lower_halves(on: Callable[[str], Arch]) -> None:
    on("sm_80")
    G, steps = gaussian(72, 96), CoefficientSet("two", polar_express().steps[:2], "two:2")
    choice = NSChoice("standard", (), triton(lower="write"), triton(lower="both"))
    result = run_ns(G, choice, steps, torch.float16, strict=True)
    assert relative_error(result, polynomial_polar(G, steps)) < tolerance(torch.float16)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("lost", ["symmetric_product", "gram"])
def test_torch_gets_whole_operands_where_it_steps_in_for_lower_halves(
    on: Callable[[str], Arch], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    on("sm_80")
    served = SYMMETRIC.spec

    def spec(call: Any, *others: Any) -> KernelSpec:
        if call.op == lost:
            raise Unsupported(f"no {lost} today")
        return served(call, *others)

    monkeypatch.setattr(SYMMETRIC, "spec", spec)
    G, choice = gaussian(72, 136), NSChoice("gram", (2,), triton(lower="write"), triton(lower="both"))
    with pytest.warns(RuntimeWarning, match=f"triton cannot run {lost}: no {lost} today"):
        result = run_ns(G, choice, polar_express(), torch.float16)
    assert relative_error(result, polynomial_polar(G, polar_express())) < tolerance(torch.float16)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_an_iteration_with_divided_tiles(on: Callable[[str], Arch], arch: str) -> None:
    """On four multiprocessors, the last two of a matrix's six tiles are."""
    on(arch)
    G, choice = gaussian(136, 264), NSChoice("gram", (2,), triton(splits=3), triton(splits=2))
    result = run_ns(G, choice, polar_express(), torch.float16, strict=True)
    assert relative_error(result, polynomial_polar(G, polar_express())) < tolerance(torch.float16)
    products = 2 + 5 + 2 * 3
    kernels = [spec.module.rpartition(".")[2] for spec in launched]
    assert kernels == ["symmetric_kernel", "sums_kernel"] * products


def test_complete_waves_have_nothing_to_add_up(on: Callable[[str], Arch]) -> None:
    on("sm_80")
    X, out = gaussian(2, 136, 72).half(), torch.empty(2, 136, 136, dtype=torch.float16)
    BACKENDS["triton"].build("gram", TILES | {"splits": 3})(X, out)
    torch.testing.assert_close(out.double(), X.double() @ X.double().mT, rtol=1e-3, atol=1e-3)
    assert len(launched) == 1


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
