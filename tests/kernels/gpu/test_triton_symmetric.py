"""The Triton kernel of symmetric products: its PTX run by the interpreter, its mathematics by Triton's own."""

from __future__ import annotations

from math import isqrt
from typing import Any

import pytest
import torch
from ptx import Memory, run
from ptx.mutate import survivors
from triton_products import (
    call_of,
    check_resources,
    compiled,
    execute,
    fill,
    interpret,
    matrices,
    sass,
    symmetric_case,
)

from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary, Unsupported
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.triton_kernels.symmetric import FIELDS, OPTIONAL, SYMMETRIC

pytest.importorskip("triton")

SMALL = {"block": 32, "block_k": 32, "warps": 4, "stages": 3, "group": 2}
MIDDLE = {"block": 64, "block_k": 32, "warps": 4, "stages": 4, "group": 1}
LARGE = {"block": 128, "block_k": 32, "warps": 8, "stages": 3, "group": 8}


def check(
    op: str,
    config: dict[str, Any],
    arch: str,
    *sizes: int,
    seeds: tuple[int | None, ...] = (None, 1),
    **options: Any,
) -> None:
    case = symmetric_case(op, *sizes, **options)
    for seed in seeds:
        case.begin()
        report = execute(SYMMETRIC, case.call, config, arch, case.tensors, seed)
        case.verify(seed)
        assert report.stored == [0] * (len(case.tensors) - 1) + [case.out.numel() * case.out.itemsize]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("op", "config", "batch", "m", "n", "options"),
    [
        ("gram", SMALL, 2, 104, 72, {}),
        ("gram", SMALL, 1, 8, 8, {"dtype": "fp16", "out_dtype": "fp16", "added": "C"}),
        ("gram", MIDDLE, 1, 136, 40, {"by_columns": True, "out_dtype": "fp32", "added": "out"}),
        ("symmetric_product", MIDDLE, 1, 136, 136, {"added": "out"}),
        ("symmetric_product", MIDDLE, 2, 72, 72, {"by_columns": True, "added": "C"}),
    ],
)
def test_products_are_exact_on_integers(
    op: str, config: dict[str, Any], batch: int, m: int, n: int, options: dict[str, Any], arch: str
) -> None:
    check(op, config, arch, batch, m, n, **options)


def test_lines_of_any_length_and_alignment() -> None:
    check("gram", SMALL, "sm_80", 2, 37, 51, padding=0, added="out")
    check("gram", SMALL, "sm_80", 1, 1, 1, padding=3, seeds=(None,))
    check("gram", SMALL, "sm_80", 1, 35, 20, padding=0, by_columns=True, seeds=(None,))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("out_dtype", ["fp16", "bf16", "fp32"])
def test_products_of_all_dtypes_and_tiles(arch: str, dtype: str, out_dtype: str) -> None:
    dtypes: dict[str, Any] = {"dtype": dtype, "out_dtype": out_dtype}
    for config, sizes in ((SMALL, (8, 24, 40, 96)), (MIDDLE, (64, 200)), (LARGE, (120, 264))):
        for m in sizes:
            for by_columns in (False, True):
                check(
                    "gram",
                    config,
                    arch,
                    2,
                    m,
                    40,
                    by_columns=by_columns,
                    added="out",
                    seeds=(None, 1, 2),
                    **dtypes,
                )
                check(
                    "symmetric_product",
                    config,
                    arch,
                    1,
                    m,
                    m,
                    by_columns=by_columns,
                    seeds=(None, 3),
                    **dtypes,
                )
    for m, n in ((37, 51), (64, 3), (5, 64), (1, 100)):
        check("gram", SMALL, arch, 2, m, n, padding=0, added="C", **dtypes)
        check("gram", SMALL, arch, 2, m, n, padding=1, by_columns=True, added="C", **dtypes)


def test_what_is_not_finite_spreads_as_in_a_full_product() -> None:
    X = fill(matrices(1, 72, 40, "bf16"), 1)
    X[0, 3, 5], X[0, 70, 1] = torch.inf, torch.nan
    out = matrices(1, 72, 72, "bf16")
    execute(SYMMETRIC, call_of("gram", X, None, None, out, 1.0), SMALL, "sm_80", [X, out], 1)
    expected = X.double() @ X.double().mT
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.to(out.dtype).nan_to_num())


def test_c_is_not_read_where_beta_is_zero() -> None:
    X, C, out = fill(matrices(1, 40, 40, "bf16"), 1), matrices(1, 40, 40, "bf16"), matrices(1, 40, 40, "bf16")
    C.fill_(torch.nan)
    report = execute(SYMMETRIC, call_of("gram", X, None, C, out, 1.0, 0.0), SMALL, "sm_80", [X, C, out], None)
    assert torch.equal(out, (X.double() @ X.double().mT).to(out.dtype))
    assert report.loaded[1] == 0


def test_the_product_of_operands_that_do_not_commute_is_symmetric_bit_by_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    A, B, out = (matrices(1, 72, 72, "fp16") for _ in range(3))
    for operand in (A, B):
        values = torch.randn(operand.shape, generator=generator)
        operand.copy_(values + values.mT)
    call = call_of("symmetric_product", A, B, None, out, 1.0)
    for seed in (None, 1):
        execute(SYMMETRIC, call, SMALL, "sm_80", [A, B, out], seed)
        assert torch.equal(out, out.mT)
        lower = (A.double() @ B.double()).tril()
        torch.testing.assert_close(out.double().tril(), lower, rtol=2**-10, atol=1e-3)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_only_tiles_on_and_below_the_diagonal_are_multiplied(arch: str) -> None:
    X, C, out = (
        fill(matrices(1, 256, 64, "bf16"), 1),
        matrices(1, 256, 256, "bf16"),
        matrices(1, 256, 256, "bf16"),
    )
    call = call_of("gram", X, None, C.zero_(), out, 1.0, 1.0)
    report = execute(SYMMETRIC, call, MIDDLE, arch, [X, C, out], None)
    assert report.flops <= 2 * 256 * 256 * 64 * 5 / 8
    # C is read from the tiles on and below the diagonal alone.
    assert report.loaded[1] == 256 * 256 * 2 * 5 // 8


@pytest.mark.parametrize("group", [1, 2, 8, 32])
@pytest.mark.parametrize("side", [1, 2, 3, 7, 8, 9, 30])
def test_every_tile_is_computed_once_in_bands(side: int, group: int) -> None:
    from triton_tiles import tiles_of

    rows, columns = tiles_of(torch.arange(side * (side + 1) // 2), side, group)
    seen = list(zip(rows.tolist(), columns.tolist(), strict=True))
    assert sorted(seen) == [(i, j) for i in range(side) for j in range(i + 1)]
    bands = rows // group
    assert torch.equal(bands, bands.sort().values)
    # Left of the diagonal's triangle, a band is walked column by column.
    left = columns < bands * group
    assert all(bool((columns[left & (bands == band)].diff() >= 0).all()) for band in bands.unique())


@pytest.mark.parametrize("group", [1, 8])
def test_tiles_are_exact_up_to_two_to_the_31(group: int) -> None:
    from triton_tiles import tiles_of

    side, index = 65535, [65535 * 65536 // 2 - 1]
    for row in (2, 255, 4095, 4096, 46340, 46341, 65528, 65534):
        index += [row * (row + 1) // 2 + k for k in (-2, -1, 0, 1, 2)]
    rows, columns = tiles_of(torch.tensor(index), side, group)
    for place, i, j in zip(index, rows.tolist(), columns.tolist(), strict=True):
        first = (isqrt(8 * place + 1) - 1) // 2 // group * group
        height, local = min(group, side - first), place - first * (first + 1) // 2
        beyond = local - first * height
        row = (isqrt(8 * max(beyond, 0) + 1) - 1) // 2
        expected = (
            (local % height, local // height) if beyond < 0 else (row, first + beyond - row * (row + 1) // 2)
        )
        assert (i, j) == (first + expected[0], expected[1])


@pytest.mark.slow
def test_offsets_beyond_two_to_the_31() -> None:
    # Memory that is never touched costs nothing.
    far = 2**31 + 64
    X = fill(torch.empty(far + 4096, dtype=torch.bfloat16).as_strided((2, 40, 24), (far, 64, 1)), 1)
    out = torch.empty(far + 4096, dtype=torch.bfloat16).as_strided((2, 40, 40), (far, 48, 1))
    execute(SYMMETRIC, call_of("gram", X, None, None, out, 1.0), SMALL, "sm_80", [X, out], 1)
    assert torch.equal(out, (X.double() @ X.double().mT).to(out.dtype))
    X = fill(torch.empty(290 << 23, dtype=torch.bfloat16).as_strided((1, 290, 24), (0, 1 << 23, 1)), 1)
    out = matrices(1, 290, 290, "bf16")
    execute(SYMMETRIC, call_of("gram", X, None, None, out, 1.0), SMALL, "sm_80", [X, out], None)
    assert torch.equal(out, (X.double() @ X.double().mT).to(out.dtype))


def check_mathematics() -> None:
    """To be run where Triton interprets kernels."""
    from dmuon.kernels.gpu.triton_kernels.symmetric_kernel import symmetric

    for op, m, n, by_columns, padding in (
        ("gram", 72, 40, False, 8),
        ("gram", 37, 51, True, 0),
        ("symmetric_product", 40, 40, False, 1),
    ):
        square = op != "gram"
        # fp16, since the interpreter multiplies the bits of bf16 operands.
        A = fill(matrices(2, m, n, "fp16", by_columns=by_columns, padding=padding), 1, symmetric=square)
        B = fill(matrices(2, m, n, "fp16", padding=padding), 2, symmetric=True) if square else None
        C, out = (fill(matrices(2, m, m, "fp32", padding=padding), 3, symmetric=True) for _ in range(2))
        call = call_of(op, A, B, C, out, 2.0, 3.0, -5.0)
        binary: Any = None
        options = SYMMETRIC.spec(call, SMALL, ARCHS["sm_80"]).options
        constexprs = {
            name.upper(): options[name]
            for name in ("by_rows", "block", "block_k", "read_lower", "write_lower", "split")
        }
        tensors = [tensor for tensor in (A, B, C, out) if tensor is not None]
        interpret(symmetric, SYMMETRIC.launch(call, SMALL, binary, 1), constexprs, *tensors)
        product = A.double() @ (A.mT if B is None else B).double()
        lower = 2 * product + 3 * C.double() - 5 * torch.eye(m, dtype=torch.float64)
        assert torch.equal(out.double(), lower.tril() + lower.tril(-1).mT)


@pytest.mark.parametrize(
    ("arch", "config", "kinds", "every"),
    [
        ("sm_80", SMALL, ("zero fill",), 2),
        ("sm_90a", SMALL, ("copy wait", "zero fill"), 2),
        ("sm_90a", MIDDLE, ("copy wait", "wgmma wait", "proxy fence"), 1),
    ],
)
def test_faults_are_noticed(arch: str, config: dict[str, Any], kinds: tuple[str, ...], every: int) -> None:
    X, out = fill(matrices(1, 72, 104, "bf16"), 1), matrices(1, 72, 72, "bf16")
    call = call_of("gram", X, None, None, out, 1.0)
    expected = (X.double() @ X.double().mT).to(out.dtype)

    def verify(binary: Binary) -> None:
        for seed in (None, 1, 2):
            out.fill_(torch.nan)
            launch = SYMMETRIC.launch(call, config, binary, 1)
            run(binary, launch, Memory.of(X, out), seed=seed, max_steps=200_000)
            assert torch.equal(out, expected)

    lived = survivors(compiled(SYMMETRIC.spec(call, config, ARCHS[arch])), verify, *kinds, every=every)
    assert not lived, "\n".join(map(str, lived))


def resources_of(
    config: dict[str, Any],
    arch: str,
    out_dtype: str,
    *,
    op: str = "gram",
    by_columns: bool = False,
    padding: int = 8,
) -> Binary:
    size = 64 if padding else 63
    X = matrices(1, size, size, "bf16", by_columns=by_columns, padding=padding)
    out = matrices(1, size, size, out_dtype, padding=padding)
    call = call_of(op, X, None if op == "gram" else X, out, out)
    return check_resources(SYMMETRIC.spec(call, config, ARCHS[arch]), config)


def test_hopper_multiplies_by_warpgroup_and_spills_nothing() -> None:
    text = sass(resources_of(LARGE, "sm_90a", "fp32"))
    assert "HGMMA" in text and "HMMA" not in text
    assert "STG.E.128" in text and "STG.E.64" not in text


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nothing_is_spilled_in_any_configuration(arch: str) -> None:
    for config in SYMMETRIC.configs("gram", 4096, 4096, "bf16", ARCHS[arch]):
        for by_columns in (False, True):
            for out_dtype in ("fp32", "bf16") if config["stages"] == 3 else ("fp32",):
                resources_of(config, arch, out_dtype, by_columns=by_columns)
    for config in SYMMETRIC.configs("gram", 4095, 4095, "bf16", ARCHS[arch]):
        for by_columns in (False, True):
            resources_of(config, arch, "fp32", by_columns=by_columns, padding=0)
    for config in SYMMETRIC.configs("symmetric_product", 4096, 4096, "bf16", ARCHS[arch]):
        if "lower" in config:
            for out_dtype in ("fp32", "bf16"):
                resources_of(config, arch, out_dtype, op="symmetric_product")


@pytest.mark.parametrize("arch", list(ARCHS))
def test_configurations_offered(arch: str) -> None:
    for op in ("gram", "symmetric_product"):
        for m, n in ((16, 64), (500, 4096), (4096, 4096), (37, 51)):
            offered = SYMMETRIC.configs(op, m, n, "bf16", ARCHS[arch])
            assert offered
            for config in offered:
                SYMMETRIC.check(op, config)
            assert all(config["block"] < 2 * max(m, 32) for config in offered)
    assert SYMMETRIC.configs("apply", 64, 64, "bf16", ARCHS[arch]) == []
    assert SYMMETRIC.configs("gram", 64, 64, "fp32", ARCHS[arch]) == []


def test_what_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="block_k must be at most block with lower='both', got 64"):
        SYMMETRIC.check("symmetric_product", SMALL | {"block_k": 64, "lower": "both"})
    with pytest.raises(ValueError, match="lower must be one of read, write, both, got True"):
        SYMMETRIC.check("gram", SMALL | {"lower": True})
    with pytest.raises(ValueError, match=r"'write' alone for gram, .* got 'read'"):
        SYMMETRIC.check("gram", SMALL | {"lower": "read"})
    with pytest.raises(ValueError, match="splits does not go with lower='read'"):
        SYMMETRIC.check("symmetric_product", SMALL | {"lower": "read", "splits": 2})
    with pytest.raises(ValueError, match=r"splits must be one of 2, .*, got 5"):
        SYMMETRIC.check("gram", SMALL | {"splits": 5})
    S = matrices(1, 16, 16, "bf16", by_columns=True)
    with pytest.raises(Unsupported, match="needs contiguous rows"):
        SYMMETRIC.spec(call_of("symmetric_product", S, S, None, S), SMALL | {"lower": "both"}, ARCHS["sm_80"])
    with pytest.raises(ValueError, match=r"block must be one of .*, got 48"):
        SYMMETRIC.check("gram", SMALL | {"block": 48})
    with pytest.raises(ValueError, match=r"has .*'block'.*got \['tile'\]"):
        SYMMETRIC.check("gram", {"tile": 3})
    with pytest.raises(ValueError, match="got op 'apply'"):
        SYMMETRIC.check("apply", SMALL)
    with pytest.raises(Unsupported, match=r"bytes of shared memory, sm_86 has 101376"):
        resources_of({"block": 128, "block_k": 128, "warps": 8, "stages": 6, "group": 8}, "sm_86", "bf16")
    with pytest.raises(Unsupported, match="multiples of 8 elements"):
        resources_of(LARGE, "sm_80", "bf16", padding=0)
    X, out = matrices(1, 16, 16, "bf16"), matrices(1, 16, 16, "bf16")
    call = call_of("gram", X, None, None, out)
    for part, message in (
        ({"dtype": "fp32"}, "operands must all be fp16 or all bf16"),
        ({"column_stride": 2, "row_stride": 64}, "rows or columns must be contiguous"),
        ({"row_stride": 1 << 25}, "at most"),
    ):
        changed = Matrices(**{**vars(call.A), **part})
        with pytest.raises(Unsupported, match=message):
            SYMMETRIC.spec(type(call)("gram", changed, None, None, call.out), SMALL, ARCHS["sm_80"])
    huge = Matrices(**{**vars(call.out), "batch": 1 << 20, "rows": 4096, "columns": 4096, "row_stride": 4096})
    binary: Any = None
    with pytest.raises(Unsupported, match="more than a grid holds"):
        SYMMETRIC.launch(type(call)("gram", huge, None, None, huge), SMALL, binary, 132)


def test_fields_are_those_of_every_configuration() -> None:
    offered = SYMMETRIC.configs("gram", 4096, 4096, "fp16", ARCHS["sm_90a"])
    assert all(set(config) - set(OPTIONAL) == set(FIELDS) for config in offered)
    assert {config["block"] for config in offered} == {32, 64, 128}
