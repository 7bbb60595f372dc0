"""The whole iteration in one launch: its PTX run by the interpreter against fp64, run_ns and exact integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ptx import Memory, run
from ptx.mutate import mutants, survivors
from ptx.report import Report
from small_exact import rounded
from spectra import DTYPES, SPECTRA, matrix
from torch import Tensor
from triton_products import beyond, compiled, matrices

from dmuon.kernels.choose import NSChoice, ProductChoice
from dmuon.kernels.coefficients import polar_express
from dmuon.kernels.gpu.arch import ARCHS, arch_named
from dmuon.kernels.gpu.binary import Binary, Unsupported
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.resources import resources_of
from dmuon.kernels.gpu.small_calls import Ragged, SmallCall
from dmuon.kernels.gpu.triton_kernels.small import SMALL, padded, shared_bytes
from dmuon.kernels.reference import polynomial_polar, relative_error, tolerance
from dmuon.kernels.run import run_ns

pytest.importorskip("triton")

POLAR = polar_express(5)
RESTARTS = {"fp16": (2,), "bf16": (1, 3)}
NARROW = {"panel": 32, "warps": 1}
WIDE = {"panel": 64, "warps": 4}


def call_of(
    X: Tensor | Ragged,
    out: Tensor | Ragged,
    dtype: str = "fp16",
    *,
    steps: tuple[tuple[float, float, float], ...] = POLAR.steps,
    restarts: tuple[int, ...] | None = None,
    normalize: bool = False,
) -> SmallCall:
    x, y = (t if isinstance(t, Ragged) else Matrices.of(t) for t in (X, out))
    return SmallCall(x, y, dtype, steps, RESTARTS[dtype] if restarts is None else restarts, normalize)


def execute(
    call: SmallCall,
    config: dict[str, Any],
    arch: str,
    *tensors: Tensor,
    seed: int | None = None,
    binary: Binary | None = None,
) -> Report:
    """Run the PTX that ``config`` compiles to; nothing but the elements of ``tensors`` may be touched."""
    binary = binary or compiled(SMALL.spec(call, config, arch_named(arch)))
    assert binary.shared_bytes <= shared_bytes(
        padded(call.X.rows), call.segments, config["panel"], config["warps"], call.out.dtype
    )
    return run(binary, SMALL.launch(call, config, binary), Memory.of(*tensors), seed=seed)


def by_torch(G: Tensor, dtype: str, restarts: tuple[int, ...]) -> Tensor:
    """The same iteration product by product, rounded as tensor cores round."""
    plain = ProductChoice("torch", {})
    choice = NSChoice("gram", restarts, plain, plain, plain)
    return run_ns(G, choice, POLAR, DTYPES[dtype], torch.empty_like(G, dtype=torch.float64))


@pytest.mark.parametrize(
    ("arch", "config", "m", "n", "dtype", "out_dtype", "padding"),
    [
        ("sm_80", NARROW, 16, 72, "fp16", "fp16", 8),
        ("sm_80", NARROW | {"warps": 4}, 25, 43, "bf16", "fp32", 0),
        ("sm_90a", WIDE, 64, 72, "fp16", "fp16", 8),
        ("sm_90a", WIDE, 40, 41, "bf16", "fp32", 0),
    ],
)
def test_every_spectrum(
    arch: str, config: dict[str, Any], m: int, n: int, dtype: str, out_dtype: str, padding: int
) -> None:
    """As exact as the products one by one, and within the documented bound where the spectrum decays."""
    X = matrices(len(SPECTRA), m, n, "fp32", padding=padding)
    X.copy_(torch.stack([matrix(name, m, n) for name in SPECTRA]))
    out = matrices(len(SPECTRA), m, n, out_dtype, padding=padding)
    untouched = beyond(out)
    report = execute(call_of(X, out, dtype, normalize=True), config, arch, X, out)
    exact = polynomial_polar(X, POLAR)
    error = relative_error(out, exact)
    other = relative_error(by_torch(X, dtype, RESTARTS[dtype]), exact)
    assert (error <= 1.1 * other + 1e-3).all(), (error, other)
    assert error[SPECTRA.index("decaying")] <= tolerance(DTYPES[dtype])
    assert torch.equal(beyond(out), untouched)
    # Two passes to normalise, one for each R, and one for the result, which is written once.
    assert report.loaded[0] <= (4 + len(RESTARTS[dtype])) * X.numel() * 4
    assert report.stored == [0, out.numel() * out.itemsize]
    kinds = {name.split(".")[0] for name in report.mma}
    assert kinds == {"wgmma" if arch == "sm_90a" else "mma"}


@pytest.mark.parametrize(
    ("arch", "config", "m", "n", "steps", "restarts", "tall"),
    [
        ("sm_80", NARROW, 9, 40, 3, (1,), False),
        ("sm_80", WIDE, 64, 72, 3, (2,), True),
        ("sm_90a", WIDE | {"panel": 32}, 64, 72, 4, (2, 3), False),
        ("sm_90a", WIDE | {"warps": 8}, 49, 52, 2, (), True),
    ],
)
def test_exactly_on_integers(
    arch: str, config: dict[str, Any], m: int, n: int, steps: int, restarts: tuple[int, ...], tall: bool
) -> None:
    """Rows that overlap in pairs, so that no product is diagonal, and sums that fp32 holds."""
    unit = 8 if tall else 4
    X = matrices(2, m, n, "fp16", by_columns=tall, padding=unit).zero_()
    rows = torch.arange(m)
    X[0, rows, rows % n], X[0, rows, (rows + 1) % n] = 0.5, -0.5
    X[1, rows, (7 * rows) % n] = 0.5
    out = matrices(2, m, n, "fp16", by_columns=not tall, padding=unit)
    polynomials = ((2.0, -1.0, 0.25), (1.0, 0.5, -0.25), (0.5, -0.25, 0.125), (1.0, 0.25, 0.5))[:steps]
    call = call_of(X, out, steps=polynomials, restarts=restarts)
    untouched, expected = beyond(out), rounded(X, polynomials, call.segments)
    assert expected.isfinite().all() and (expected != 0).double().mean() > 0.02
    for seed in (None, 1, 2):
        out.fill_(torch.nan)
        execute(call, config, arch, X, out, seed=seed)
        assert torch.equal(out.double(), expected)
        assert torch.equal(beyond(out), untouched)


@pytest.mark.parametrize(
    ("arch", "config", "m", "widths", "tall"),
    [("sm_80", NARROW, 12, (150, 12, 69), False), ("sm_90a", WIDE, 64, (70, 64), True)],
)
def test_ragged_batch(arch: str, config: dict[str, Any], m: int, widths: tuple[int, ...], tall: bool) -> None:
    """Matrices of one m and different n, each as if it were alone."""
    Xs = [matrices(1, m, n, "fp16", by_columns=tall, padding=8)[0] for n in widths]
    for n, X in zip(widths, Xs, strict=True):
        G = torch.randn(m, n, generator=torch.Generator().manual_seed(n))
        X.copy_(G / G.norm())
    outs = [matrices(1, m, n, "bf16", padding=0)[0] for n in widths]
    tables = torch.empty(2, len(Xs), 3, dtype=torch.int64)
    batch, result = Ragged.of(Xs, tables[0]), Ragged.of(outs, tables[1])
    assert batch.row_major != tall and batch.aligned == tall and not result.aligned
    binary = compiled(SMALL.spec(call_of(batch, result), config, ARCHS[arch]))
    report = execute(call_of(batch, result), config, arch, *Xs, *outs, tables, seed=1, binary=binary)
    assert report.stored == [0] * len(Xs) + [2 * out.numel() for out in outs] + [0]
    for X, out in zip(Xs, outs, strict=True):
        together = out.clone()
        assert relative_error(out, polynomial_polar(X, POLAR)) < 8e-3
        call = call_of(Ragged.of([X], tables[0, :1]), Ragged.of([out], tables[1, :1]))
        execute(call, config, arch, X, out.fill_(0), tables, binary=binary)
        assert torch.equal(out, together)


def test_the_result_may_overwrite_the_input() -> None:
    X = torch.randn(2, 32, 200, generator=torch.Generator().manual_seed(0)).half() / 80
    out = torch.empty_like(X)
    config = {"panel": 64, "warps": 4}
    execute(call_of(X, out), config, "sm_80", X, out)
    for seed in (None, 1):
        Y = X.clone()
        execute(call_of(Y, Y), config, "sm_80", Y, seed=seed)
        assert torch.equal(Y, out)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_scales_zeros_and_what_is_not_finite(arch: str) -> None:
    """N1 and N2: the scale does not matter, a zero stays one, and only its own matrix is lost to a NaN or Inf."""
    G = torch.randn(32, 40, generator=torch.Generator().manual_seed(0))
    X = torch.stack([G, G * 2.0**-100, G * 2.0**60, 0 * G, G, G, G * 2.0**-126])
    X[4, 3, 5], X[5, 31, 39] = torch.nan, -torch.inf
    out = torch.empty_like(X)
    config = {"panel": 32, "warps": 4}
    execute(call_of(X, out, normalize=True), config, arch, X, out)
    assert relative_error(out[0], polynomial_polar(G, POLAR)) < 3e-3
    assert torch.equal(out[1], out[0]) and torch.equal(out[2], out[0])
    assert (out[3] == 0).all() and out[4].isnan().all() and out[5].isnan().all()
    assert relative_error(out[6], out[0].double()) < 3e-3


def test_a_lone_column_and_a_lone_row() -> None:
    for m, n in ((1, 1), (1, 50)):
        X, out = torch.randn(3, m, n, generator=torch.Generator().manual_seed(m)), torch.empty(3, m, n)
        execute(call_of(X, out, normalize=True), NARROW, "sm_80", X, out)
        assert (relative_error(out, polynomial_polar(X, POLAR)) < 2e-2).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_faults_are_noticed(arch: str) -> None:
    """Dropped barriers, waits and fences, and shifted reads, each break the result or a rule."""
    side = 16 if arch == "sm_80" else 64
    X = torch.randn(1, side, 80, generator=torch.Generator().manual_seed(0)).half() / 80
    config = {"panel": 32, "warps": 2} if arch == "sm_80" else WIDE
    out = torch.empty_like(X)
    call = call_of(X, out, steps=POLAR.steps[:3], restarts=(1,))
    binary = compiled(SMALL.spec(call, config, ARCHS[arch]))
    execute(call, config, arch, X, out, binary=binary)
    expected = out.clone()

    def verify(mutant: Binary) -> None:
        for seed in (None, 1, 2):
            out.fill_(torch.nan)
            execute(call, config, arch, X, out, seed=seed, binary=mutant)
            assert torch.equal(out, expected)

    kinds = ("barrier",) if arch == "sm_80" else ("proxy fence", "wgmma wait")
    tried = -(-len(list(mutants(binary, *kinds))) // 3)
    lived = survivors(binary, verify, *kinds, every=3)
    # The compiler puts barriers where nothing conflicts too, and one fence serves for two stores before a barrier.
    assert tried >= 6 and len(lived) <= tried // 3, "\n".join(map(str, lived))


def test_what_is_refused() -> None:
    def spec(m: int, n: int, arch: str = "sm_80", config: dict[str, Any] = WIDE, **options: Any) -> None:
        X = torch.empty(1, m, n, dtype=options.pop("x_dtype", torch.float16))
        SMALL.spec(call_of(X, options.pop("out", X), **options), config, ARCHS[arch])

    with pytest.raises(Unsupported, match="at most 128 rows, got 129"):
        spec(129, 200)
    with pytest.raises(
        Unsupported, match=r"2 segments of 128 padded rows keep 132096 bytes.*sm_86 has 101376"
    ):
        spec(128, 200, "sm_86", {"panel": 32, "warps": 8})
    with pytest.raises(Unsupported, match="X must be fp16, as the iteration is, got fp32"):
        spec(64, 64, x_dtype=torch.float32)
    with pytest.raises(Unsupported, match="out must be fp32, fp16 or bf16, got fp64"):
        spec(64, 64, out=torch.empty(1, 64, 64, dtype=torch.float64))
    with pytest.raises(Unsupported, match=r"take .4, 8. warps, got 1"):
        spec(64, 64, config=NARROW)
    with pytest.raises(Unsupported, match="rows or columns must be contiguous"):
        spec(64, 64, out=torch.empty(1, 128, 128, dtype=torch.float16)[:, ::2, ::2])
    with pytest.raises(ValueError, match="out must have X's batch and rows"):
        spec(64, 64, out=torch.empty(1, 65, 64, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"panel must be one of .*, got 48"):
        SMALL.check({"panel": 48, "warps": 4})
    with pytest.raises(ValueError, match="fields panel, warps"):
        SMALL.check({"panel": 64})
    with pytest.raises(ValueError, match="agree in rows and dtype"):
        Ragged.of([torch.empty(4, 8), torch.empty(5, 8)], torch.empty(2, 3, dtype=torch.int64))
    assert SMALL.configs(129, 512, "fp16", ARCHS["sm_90a"]) == []
    assert SMALL.configs(64, 512, "fp32", ARCHS["sm_90a"]) == []


def check_resources(
    config: dict[str, Any], arch: str, m: int, restarts: tuple[int, ...], *, aligned: bool, **options: Any
) -> None:
    """No spills, and no more shared memory than was admitted."""
    x_dtype, out_dtype = options.pop("dtypes")
    X = Ragged(0, x_dtype, 1, m, options.pop("x_row_major", True), aligned)
    out = Ragged(0, out_dtype, 1, m, options.pop("out_row_major", True), aligned)
    call = SmallCall(X, out, "fp16", POLAR.steps, restarts, x_dtype == "fp32")
    spec = SMALL.spec(call, config, ARCHS[arch])
    binary = compiled(spec)
    used = resources_of(binary)
    assert used.local_bytes == 0, (spec, used)
    admitted = shared_bytes(padded(m), call.segments, spec.options["panel"], config["warps"], out_dtype)
    assert binary.shared_bytes <= admitted <= ARCHS[arch].shared_bytes
    assert any(
        name.startswith("HGMMA" if arch == "sm_90a" and m > 32 else "HMMA") for name in used.instructions
    )


def test_nothing_is_spilled() -> None:
    check_resources({"panel": 64, "warps": 8}, "sm_90a", 128, (1, 3), aligned=True, dtypes=("fp16", "fp16"))


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("m", [16, 32, 64, 128])
def test_nothing_is_spilled_in_any_configuration(arch: str, m: int) -> None:
    for config in SMALL.configs(m, 512, "fp16", ARCHS[arch]):
        for restarts in ((1, 3), (2,)):
            for aligned in (True, False):
                for major in (True, False):
                    for dtypes in (("fp16", "fp16"), ("fp32", "fp32")):
                        check_resources(
                            config,
                            arch,
                            m,
                            restarts,
                            aligned=aligned,
                            dtypes=dtypes,
                            x_row_major=major,
                            out_row_major=major,
                        )


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("m", "n"), [(128, 320), (100, 203)])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_largest(arch: str, m: int, n: int, dtype: str) -> None:
    X = torch.stack([matrix(name, m, n) for name in ("gaussian", "decaying")]).float()
    out = torch.empty_like(X)
    exact = polynomial_polar(X, POLAR)
    other = relative_error(by_torch(X, dtype, RESTARTS[dtype]), exact)
    for seed in (None, 1):
        report = execute(
            call_of(X, out, dtype, normalize=True), {"panel": 64, "warps": 8}, arch, X, out, seed=seed
        )
        assert (relative_error(out, exact) <= 1.1 * other + 1e-3).all()
        assert report.stored == [0, out.numel() * 4]
