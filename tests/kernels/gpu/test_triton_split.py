"""Symmetric products in Triton whose last tiles are divided along the inner dimension: both launches, on their PTX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ptx import Memory, run
from ptx.mutate import survivors
from ptx.report import Report
from torch import Tensor
from triton_products import call_of, check_resources, compiled, fill, matrices, sass, symmetric_case

from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.family import ProductFamily
from dmuon.kernels.gpu.triton_kernels.sums import SUMS
from dmuon.kernels.gpu.triton_kernels.symmetric import SYMMETRIC

pytest.importorskip("triton")

SMALL = {"block": 32, "block_k": 32, "warps": 4, "stages": 3, "group": 2, "splits": 2}
MIDDLE = {"block": 64, "block_k": 32, "warps": 4, "stages": 3, "group": 1, "splits": 3}

Change = Callable[[ProductFamily, Binary], Binary]


def execute(
    call: ProductCall,
    config: dict[str, Any],
    arch: str,
    tensors: list[Tensor],
    *,
    multiprocessors: int,
    seed: int | None = None,
    change: Change = lambda family, binary: binary,
) -> list[Report]:
    """Both launches; nothing but the elements of ``tensors`` and the parts may be touched."""
    scratch = torch.full(SYMMETRIC.parts(call, config, multiprocessors), torch.nan)
    call = replace(call, scratch=Matrices.of(scratch))
    reports = []
    for family in (SYMMETRIC, SUMS):
        binary = change(family, compiled(family.spec(call, config, ARCHS[arch])))
        launch = family.launch(call, config, binary, multiprocessors)
        reports.append(run(binary, launch, Memory.of(*tensors, scratch), seed=seed, max_steps=200_000))
    return reports


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("op", "config", "batch", "m", "n", "multiprocessors", "options"),
    [
        # Of six tiles all, of twenty the last two, of ten four: in two matrices; with a part that gets nothing.
        ("gram", MIDDLE, 1, 136, 200, 132, {"added": "C"}),
        ("gram", SMALL, 2, 104, 72, 9, {"dtype": "fp16", "added": "out"}),
        ("gram", SMALL | {"splits": 4}, 1, 104, 72, 6, {"by_columns": True, "out_dtype": "fp32"}),
        ("symmetric_product", MIDDLE, 1, 136, 136, 4, {"added": "out"}),
    ],
)
def test_products_are_exact_on_integers(
    op: str,
    config: dict[str, Any],
    batch: int,
    m: int,
    n: int,
    multiprocessors: int,
    options: dict[str, Any],
    arch: str,
) -> None:
    check(op, config, arch, batch, m, n, multiprocessors, **options)


def test_lines_of_any_length_and_alignment() -> None:
    check("gram", SMALL, "sm_80", 2, 37, 51, 4, padding=0, added="out")
    check("gram", SMALL, "sm_80", 1, 1, 1, 132, padding=3)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_products_of_all_dtypes_and_tiles(arch: str) -> None:
    large = {"block": 128, "block_k": 32, "warps": 8, "stages": 3, "group": 8, "splits": 2}
    kinds = ((SMALL, 40, "bf16", "fp32"), (MIDDLE, 200, "fp16", "fp16"), (large, 264, "bf16", "bf16"))
    for config, m, dtype, out_dtype in kinds:
        options: dict[str, Any] = {"dtype": dtype, "out_dtype": out_dtype}
        for by_columns in (False, True):
            check("gram", config, arch, 1, m, 136, 7, added="C", by_columns=by_columns, **options)
        check("symmetric_product", config, arch, 2, m, m, 7, added="out", **options)


def check(
    op: str,
    config: dict[str, Any],
    arch: str,
    batch: int,
    m: int,
    n: int,
    multiprocessors: int,
    **options: Any,
) -> None:
    case = symmetric_case(op, batch, m, n, **options)
    for seed in (None, 1):
        case.begin()
        execute(case.call, config, arch, case.tensors, multiprocessors=multiprocessors, seed=seed)
        case.verify(seed)


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90a"])
def test_every_run_has_the_same_bits(arch: str) -> None:
    X, out = matrices(1, 136, 264, "fp16"), matrices(1, 136, 136, "fp32")
    X.copy_(torch.randn(X.shape, generator=torch.Generator().manual_seed(0)))
    call, results = call_of("gram", X, None, None, out, 1.0), []
    for seed in (None, 1, 2, 3):
        execute(call, MIDDLE, arch, [X, out.fill_(torch.nan)], multiprocessors=4, seed=seed)
        results.append(out.clone())
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(out, out.mT)
    torch.testing.assert_close(out.double(), X.double() @ X.double().mT, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_dividing_adds_no_arithmetic(arch: str) -> None:
    """And every part is written once and read once, but for what lies above the diagonal."""
    X, out = fill(matrices(1, 128, 384, "bf16"), 1), matrices(1, 128, 128, "bf16")
    call = call_of("gram", X, None, None, out, 1.0)
    product, sums = execute(call, MIDDLE, arch, [X, out], multiprocessors=2)
    assert product.flops == 2 * 3 * 64 * 64 * 384
    tile, parts = 64 * 64 * 4, 3
    assert product.stored[2] == parts * tile and product.stored[1] == 2 * 128 * 128 - 2 * 64 * 64
    assert sums.loaded[2] == parts * tile * 3 // 4 and sums.stored[1] == 2 * 64 * 64


def test_the_lower_half_alone() -> None:
    config = MIDDLE | {"lower": "write"}
    X, out = fill(matrices(1, 136, 200, "bf16"), 1), matrices(1, 136, 136, "bf16")
    expected = (X.double() @ X.double().mT).to(out.dtype)
    call = call_of("gram", X, None, None, out, 1.0)
    execute(call, config, "sm_80", [X, out.fill_(torch.nan)], multiprocessors=132)
    assert torch.equal(out.tril(), expected.tril())
    assert bool(out[:, :64, 64:].isnan().all() and out[:, 64:128, 128:].isnan().all())


@pytest.mark.parametrize(
    ("arch", "kinds"),
    [
        pytest.param("sm_80", ("zero fill",), marks=pytest.mark.slow),
        ("sm_90a", ("copy wait", "wgmma wait", "proxy fence")),
    ],
)
def test_faults_are_noticed(arch: str, kinds: tuple[str, ...]) -> None:
    X, out = fill(matrices(1, 72, 328, "bf16"), 1), matrices(1, 72, 72, "bf16")
    expected = (X.double() @ X.double().mT).to(out.dtype)
    call = call_of("gram", X, None, None, out, 1.0)

    def verify(mutant: Binary) -> None:
        for seed in (None, 1, 2):
            execute(
                call,
                MIDDLE,
                arch,
                [X, out.fill_(torch.nan)],
                multiprocessors=2,
                seed=seed,
                change=lambda family, binary: mutant if family is SYMMETRIC else binary,
            )
            assert torch.equal(out, expected)

    binary = compiled(SYMMETRIC.spec(call, MIDDLE, ARCHS[arch]))
    lived = survivors(binary, verify, *kinds, every=2)
    assert not lived, "\n".join(map(str, lived))


def test_the_sums_use_wide_accesses_and_spill_nothing() -> None:
    out = matrices(1, 128, 128, "bf16")
    for arch in ("sm_80", "sm_90a"):
        spec = SUMS.spec(call_of("gram", out, None, None, out), MIDDLE, ARCHS[arch])
        text = sass(check_resources(spec, {"warps": spec.options["warps"]}))
        assert "LDG.E.128" in text
