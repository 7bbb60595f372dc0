"""The Triton kernel of apply: its PTX run by the interpreter, its mathematics by Triton's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ptx import Memory, run
from ptx.mutate import survivors
from triton_products import (
    beyond,
    call_of,
    check_resources,
    compiled,
    execute,
    fill,
    in_interpreter,
    interpret,
    matrices,
    sass,
)

from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary, Unsupported
from dmuon.kernels.gpu.triton_kernels.apply import APPLY

pytest.importorskip("triton")

SMALL = {"block_m": 32, "block_n": 64, "block_k": 32, "warps": 4, "stages": 3, "group": 2}
MIDDLE = {"block_m": 64, "block_n": 64, "block_k": 32, "warps": 4, "stages": 4, "group": 1}
LARGE = {"block_m": 128, "block_n": 256, "block_k": 64, "warps": 8, "stages": 3, "group": 8}


def check(
    config: dict[str, Any],
    arch: str,
    batch: int,
    m: int,
    n: int,
    *,
    dtype: str = "bf16",
    out_dtype: str = "bf16",
    tall: bool = False,
    turned: str = "",
    padding: int = 8,
    added: str = "",
    seeds: tuple[int | None, ...] = (None, 1),
) -> None:
    """Integers, so that the result is exact.

    X and out have contiguous columns if ``tall``, and operands named in ``turned`` the other layout. ``added`` is
    "" for no C, "C", or "out" for C in the result's place.
    """
    by_columns = {"Q": "Q" in turned, **{name: tall != (name in turned) for name in "XCo"}}
    Q = fill(matrices(batch, m, m, dtype, by_columns=by_columns["Q"], padding=padding), 1)
    X = fill(matrices(batch, m, n, dtype, by_columns=by_columns["X"], padding=padding), 2)
    separate = fill(matrices(batch, m, n, out_dtype, by_columns=by_columns["C"], padding=padding), 3)
    out = matrices(batch, m, n, out_dtype, by_columns=by_columns["o"], padding=padding)
    C = {"": None, "C": separate, "out": out}[added]
    beta = -3.0 if added else 0.0
    expected = (2 * (Q.double() @ X.double()) + beta * separate.double()).to(out.dtype)
    around = beyond(out)
    call = call_of("apply", Q, X, C, out, 2.0, beta)
    for seed in seeds:
        out.copy_(separate if added == "out" else torch.full_like(out, torch.nan))
        report = execute(APPLY, call, config, arch, [Q, X, separate, out], seed)
        assert torch.equal(out, expected), (seed, (out.double() - expected.double()).abs().max())
        assert torch.equal(beyond(out), around)
        assert report.stored == [0, 0, 0, out.numel() * out.itemsize]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("config", "batch", "m", "n", "options"),
    [
        (MIDDLE, 2, 72, 136, {"added": "C"}),
        (SMALL, 1, 40, 104, {"dtype": "fp16", "out_dtype": "fp32", "added": "out"}),
        (MIDDLE, 1, 72, 136, {"tall": True, "out_dtype": "fp32", "added": "out"}),
    ],
)
def test_results_are_exact_on_integers(
    config: dict[str, Any], batch: int, m: int, n: int, options: dict[str, Any], arch: str
) -> None:
    check(config, arch, batch, m, n, **options)


def test_layouts_mix() -> None:
    check(SMALL, "sm_80", 1, 40, 72, turned="QC", added="C")
    check(SMALL, "sm_80", 1, 40, 72, turned="X", seeds=(None,))


def test_lines_of_any_length_and_alignment() -> None:
    check(SMALL, "sm_80", 2, 37, 51, padding=0, added="out")
    check(SMALL, "sm_80", 1, 1, 5, padding=3, seeds=(None,))


def test_a_wide_tile_is_finished_in_quarters() -> None:
    check(LARGE, "sm_90a", 1, 136, 264, added="out", seeds=(None,))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("out_dtype", ["fp16", "bf16", "fp32"])
def test_results_in_all_dtypes_and_tiles(arch: str, dtype: str, out_dtype: str) -> None:
    dtypes: dict[str, Any] = {"dtype": dtype, "out_dtype": out_dtype}
    narrow = LARGE | {"block_m": 128, "block_n": 128, "warps": 4, "block_k": 32}
    for config, sizes in ((SMALL, (8, 40)), (MIDDLE, (64, 72)), (LARGE, (136,)), (narrow, (136,))):
        for m in sizes:
            for tall in (False, True):
                check(config, arch, 1, m, 280, tall=tall, added="out", seeds=(None, 1, 2), **dtypes)
    for turned in ("Q", "X", "C", "QXC"):
        for tall in (False, True):
            check(SMALL, arch, 1, 40, 72, tall=tall, turned=turned, added="C", **dtypes)
    for m, n in ((37, 51), (64, 3), (5, 64), (1, 100)):
        for tall in (False, True):
            check(SMALL, arch, 2, m, n, tall=tall, padding=0, added="C", **dtypes)


def test_what_is_not_finite_spreads() -> None:
    Q, X = fill(matrices(1, 72, 72, "bf16"), 1), fill(matrices(1, 72, 136, "bf16"), 2)
    Q[0, 3, 5], X[0, 70, 1] = torch.inf, torch.nan
    C, out = matrices(1, 72, 136, "bf16"), matrices(1, 72, 136, "bf16")
    execute(APPLY, call_of("apply", Q, X, None, out, 1.0), MIDDLE, "sm_80", [Q, X, out], 1)
    expected = Q.double() @ X.double()
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.to(out.dtype).nan_to_num())
    # Where beta is zero, C is not read.
    C.fill_(torch.nan)
    report = execute(APPLY, call_of("apply", Q, X, C, out, 1.0, 0.0), MIDDLE, "sm_80", [Q, X, C, out], None)
    assert report.loaded[2] == 0 and torch.equal(out.isnan(), expected.isnan())


@pytest.mark.parametrize(("arch", "tall"), [("sm_80", False), ("sm_90a", True)])
def test_the_lower_half_of_q_is_enough(arch: str, tall: bool) -> None:
    Q = fill(matrices(1, 136, 136, "bf16"), 1, symmetric=True)
    X, out = (fill(matrices(1, 136, 72, "bf16", by_columns=tall), seed) for seed in (2, 3))
    expected = (Q.double() @ X.double()).to(out.dtype)
    Q[:, torch.ones(136, 136, dtype=torch.bool).triu(1)] = torch.nan
    for seed in (None, 1):
        out.fill_(torch.nan)
        call = call_of("apply", Q, X, None, out, 1.0)
        execute(APPLY, call, MIDDLE | {"lower": True}, arch, [Q, X, out], seed)
        assert torch.equal(out, expected)
    with pytest.raises(Unsupported, match="needs contiguous rows"):
        APPLY.spec(call_of("apply", Q.mT, X, None, out), MIDDLE | {"lower": True}, ARCHS[arch])


def check_mathematics() -> None:
    """To be run where Triton interprets kernels."""
    from dmuon.kernels.gpu.triton_kernels.apply_kernel import apply

    for m, n, tall, padding in ((40, 72, False, 8), (37, 51, True, 0)):
        # fp16, since the interpreter multiplies the bits of bf16 operands.
        Q = fill(matrices(2, m, m, "fp16", padding=padding), 1)
        X = fill(matrices(2, m, n, "fp16", by_columns=tall, padding=padding), 2)
        W = fill(matrices(2, m, n, "fp32", by_columns=tall, padding=padding), 3)
        expected = 2 * (Q.double() @ X.double()) - 3 * W.double()
        call = call_of("apply", Q, X, W, W, 2.0, -3.0)
        options = APPLY.spec(call, SMALL, ARCHS["sm_80"]).options
        names = ("a_rows", "b_rows", "c_rows", "block_m", "block_n", "block_k")
        constexprs = {name.upper(): options[name] for name in names}
        constexprs |= {"QUARTERS": False, "LOWER": "", "UPDATE": False, "VECTOR_OUT": False}
        binary: Any = None
        interpret(apply, APPLY.launch(call, SMALL, binary, 1), constexprs, Q, X, W)
        assert torch.equal(W.double(), expected)


@pytest.mark.slow
def test_mathematics_in_tritons_interpreter() -> None:
    """Of both kernels, since each process costs seconds."""
    in_interpreter(
        "import test_triton_apply, test_triton_symmetric\n"
        "test_triton_apply.check_mathematics()\n"
        "test_triton_symmetric.check_mathematics()\n"
    )


def test_faults_are_noticed() -> None:
    Q, X = fill(matrices(1, 72, 72, "bf16"), 1), fill(matrices(1, 72, 136, "bf16"), 2)
    C, out = fill(matrices(1, 72, 136, "bf16"), 3), matrices(1, 72, 136, "bf16")
    call = call_of("apply", Q, X, C, out, 1.0, 1.0)
    expected = (Q.double() @ X.double() + C.double()).to(out.dtype)

    def verify(binary: Binary) -> None:
        for seed in (None, 1, 2):
            out.fill_(torch.nan)
            launch = APPLY.launch(call, MIDDLE, binary, 1)
            run(binary, launch, Memory.of(Q, X, C, out), seed=seed, max_steps=200_000)
            assert torch.equal(out, expected)

    binary = compiled(APPLY.spec(call, MIDDLE, ARCHS["sm_90a"]))
    lived = survivors(binary, verify, "copy wait", "wgmma wait", "proxy fence", "zero fill", every=3)
    assert not lived, "\n".join(map(str, lived))


def resources_of(
    config: dict[str, Any], arch: str, out_dtype: str, *, tall: bool = False, padding: int = 8
) -> Binary:
    size = 64 if padding else 63
    Q = matrices(1, size, size, "bf16", padding=padding)
    X, W = (matrices(1, size, size, dtype, by_columns=tall, padding=padding) for dtype in ("bf16", out_dtype))
    call = call_of("apply", Q, X, W, W)
    return check_resources(APPLY.spec(call, config, ARCHS[arch]), config)


def test_hopper_multiplies_by_warpgroup_and_spills_nothing() -> None:
    text = sass(resources_of(LARGE, "sm_90a", "bf16"))
    assert "HGMMA" in text and "HMMA" not in text
    assert "STG.E.128" in text and "STG.E.U16" not in text


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nothing_is_spilled_in_any_configuration(arch: str) -> None:
    for config in APPLY.configs("apply", 4096, 4096, "bf16", ARCHS[arch]):
        for tall in (False, True):
            for out_dtype in ("fp32", "bf16") if config["stages"] == 3 else ("fp32",):
                resources_of(config, arch, out_dtype, tall=tall)
    for config in APPLY.configs("apply", 4095, 4095, "bf16", ARCHS[arch]):
        for tall in (False, True):
            resources_of(config, arch, "fp32", tall=tall, padding=0)


@pytest.mark.parametrize("arch", list(ARCHS))
def test_configurations_offered(arch: str) -> None:
    for m, n in ((16, 64), (500, 4096), (4096, 4096), (37, 51)):
        offered = APPLY.configs("apply", m, n, "bf16", ARCHS[arch])
        assert offered
        for config in offered:
            APPLY.check("apply", config)
    assert APPLY.configs("gram", 64, 64, "bf16", ARCHS[arch]) == []
    assert APPLY.configs("apply", 64, 64, "fp32", ARCHS[arch]) == []


def test_what_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="block_k must be at most block_m with lower, got 64"):
        APPLY.check("apply", SMALL | {"block_k": 64, "lower": True})
    with pytest.raises(ValueError, match=r"block_n must be one of .*, got 48"):
        APPLY.check("apply", SMALL | {"block_n": 48})
    with pytest.raises(ValueError, match="got op 'gram'"):
        APPLY.check("gram", SMALL)
    with pytest.raises(Unsupported, match=r"bytes of shared memory, sm_80 has 166912"):
        resources_of(LARGE | {"stages": 6}, "sm_80", "bf16")
    with pytest.raises(Unsupported, match="multiples of 8 elements"):
        resources_of(LARGE, "sm_80", "bf16", padding=0)
