"""The whole iteration in TileLang: its PTX run by the interpreter against fp64, run_ns and exact integers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from ptx import Memory, run
from ptx.mutate import SYNCHRONISATION, survivors
from ptx.report import Report
from small_exact import rounded
from spectra import DTYPES, SPECTRA, matrix
from torch import Tensor
from triton_products import beyond, compiled, matrices

from dmuon.kernels.choose import NSChoice, ProductChoice
from dmuon.kernels.coefficients import polar_express
from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary, Unsupported
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.resources import resources_of
from dmuon.kernels.gpu.small_calls import Ragged, SmallCall
from dmuon.kernels.gpu.tilelang_kernels.small import SMALL, padded, shared_bytes
from dmuon.kernels.reference import polynomial_polar, relative_error, tolerance
from dmuon.kernels.run import run_ns

pytest.importorskip("tilelang")

POLAR = polar_express(5)
RESTARTS = {"fp16": (2,), "bf16": (1, 3)}
NARROW = {"panel": 32, "stages": 2, "threads": 64}
MIDDLE = {"panel": 32, "stages": 3, "threads": 128}
WIDE = {"panel": 64, "stages": 2, "threads": 256}


def call_of(X: Tensor, out: Tensor, dtype: str, **others: Any) -> SmallCall:
    others = {"steps": POLAR.steps, "restarts": RESTARTS.get(dtype, ())} | others
    return SmallCall(Matrices.of(X), Matrices.of(out), dtype, **others)


def execute(
    call: SmallCall,
    config: dict[str, Any],
    arch: str,
    *tensors: Tensor,
    seed: int | None = None,
    binary: Binary | None = None,
) -> Report:
    """Run the PTX that ``config`` compiles to; nothing but the elements of ``tensors`` may be touched."""
    binary = binary or compiled(SMALL.spec(call, config, ARCHS[arch]))
    needed = shared_bytes(padded(call.X.rows), call.segments, config, call.X.dtype, call.out.dtype)
    assert binary.shared_bytes <= needed
    return run(binary, SMALL.launch(call, config, binary), Memory.of(*tensors), seed=seed)


def check_spectra(
    arch: str,
    config: dict[str, Any],
    m: int,
    n: int,
    dtype: str,
    out_dtype: str,
    spectra: tuple[str, ...] = SPECTRA,
) -> None:
    """As exact as the products one by one, and within the documented bound where the spectrum decays."""
    X = matrices(len(spectra), m, n, "fp32").copy_(torch.stack([matrix(name, m, n) for name in spectra]))
    out = matrices(len(spectra), m, n, out_dtype)
    untouched = beyond(out)
    report = execute(call_of(X, out, dtype, normalize=True), config, arch, X, out)
    exact = polynomial_polar(X, POLAR)
    error = relative_error(out, exact)
    plain = ProductChoice("torch", {})
    choice = NSChoice("gram", RESTARTS[dtype], plain, plain, plain)
    other = run_ns(X, choice, POLAR, DTYPES[dtype], torch.empty(X.shape, dtype=torch.float64))
    other = relative_error(other, exact)
    assert (error <= 1.1 * other + 1e-3).all(), (error, other)
    if "decaying" in spectra:
        assert error[spectra.index("decaying")] <= tolerance(DTYPES[dtype])
    assert torch.equal(beyond(out), untouched)
    # Two passes to normalise, one for each R, and one for the result, which is written once.
    assert report.loaded[0] == (4 + len(RESTARTS[dtype])) * X.numel() * 4
    assert report.stored == [0, out.numel() * out.itemsize]


@pytest.mark.slow
def test_every_spectrum() -> None:
    check_spectra("sm_80", NARROW, 25, 43, "fp16", "fp32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "config", "m", "n", "dtype", "out_dtype"),
    [
        ("sm_90a", NARROW | {"threads": 128}, 32, 72, "bf16", "fp16"),
        ("sm_80", MIDDLE, 64, 72, "fp16", "fp16"),
        ("sm_90a", WIDE, 40, 104, "bf16", "fp32"),
        ("sm_90a", WIDE | {"panel": 32}, 128, 136, "fp16", "fp16"),
        ("sm_80", WIDE | {"panel": 32}, 128, 136, "bf16", "bf16"),
    ],
)
def test_every_spectrum_of_more(
    arch: str, config: dict[str, Any], m: int, n: int, dtype: str, out_dtype: str
) -> None:
    check_spectra(arch, config, m, n, dtype, out_dtype, SPECTRA if m < 96 else ("gaussian", "decaying"))


def check_integers(
    arch: str,
    config: dict[str, Any],
    m: int,
    n: int,
    count: int,
    restarts: tuple[int, ...],
    tall: bool,
    *,
    in_place: bool = False,
    seed: int | None = None,
    binary: Binary | None = None,
) -> None:
    """Rows that overlap in pairs, so that no product is diagonal, and sums that fp32 holds: exact equality."""
    X = matrices(2, m, n, "fp16", by_columns=tall).zero_()
    rows = torch.arange(m)
    X[0, rows, rows % n], X[0, rows, (rows + 1) % n] = 0.5, -0.5
    X[1, rows, (7 * rows) % n] = 0.5
    out = X if in_place else matrices(2, m, n, "fp16", by_columns=not tall)
    steps = ((2.0, -1.0, 0.25), (1.0, 0.5, -0.25), (0.5, -0.25, 0.125), (1.0, 0.25, 0.5))[:count]
    call = call_of(X, out, "fp16", steps=steps, restarts=restarts)
    expected, untouched = rounded(X, steps, call.segments), beyond(out)
    execute(call, config, arch, *([X] if in_place else [X, out]), seed=seed, binary=binary)
    assert torch.equal(out.double(), expected)
    assert torch.equal(beyond(out), untouched)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_exactly_on_integers(seed: int | None) -> None:
    check_integers("sm_80", NARROW, 25, 43, 3, (1,), True, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(
    ("arch", "config", "m", "n", "count", "restarts", "tall"),
    [
        ("sm_90a", MIDDLE, 64, 72, 3, (2,), True),
        ("sm_80", MIDDLE, 49, 104, 4, (2, 3), False),
        ("sm_90a", NARROW, 9, 40, 2, (), False),
    ],
)
def test_exactly_on_integers_of_more(
    arch: str,
    config: dict[str, Any],
    m: int,
    n: int,
    count: int,
    restarts: tuple[int, ...],
    tall: bool,
    seed: int | None,
) -> None:
    check_integers(arch, config, m, n, count, restarts, tall, seed=seed)
    if not seed:
        check_integers(arch, config, m, n, count, restarts, tall, in_place=True)


def test_refusals() -> None:
    X, out = matrices(2, 40, 72, "fp16"), matrices(2, 40, 72, "fp16")

    def refused(pattern: str, call: SmallCall, arch: str = "sm_80", **changes: Any) -> None:
        with pytest.raises(Unsupported, match=pattern):
            SMALL.spec(call, MIDDLE | changes, ARCHS[arch])

    refused(
        "no ragged batches",
        SmallCall(Ragged(0, "fp16", 1, 40, True, True), Matrices.of(out), "fp16", POLAR.steps),
    )
    refused("at most 128 rows, got 193", call_of(matrices(1, 193, 200, "fp16"), out, "fp16"))
    refused("at most 8 steps, got 9", call_of(X, out, "fp16", steps=POLAR.steps[:1] * 9))
    refused("must be fp16 or bf16, got fp32", call_of(X, out, "fp32"))
    refused("X must be in", call_of(X.float(), out, "fp16"))
    refused("X must have its row stride", call_of(torch.ones(1, 40, 71).half(), out, "fp16"))
    refused("does not suit matrices of 40 rows", call_of(X, out, "fp16"), threads=64)
    large = matrices(1, 128, 200, "fp16")
    refused(
        "need .* bytes of shared memory, sm_86 has",
        call_of(large, large, "fp16"),
        "sm_86",
        threads=256,
        panel=32,
    )
    with pytest.raises(ValueError, match="panel must be one of"):
        SMALL.check(MIDDLE | {"panel": 48})
    with pytest.raises(ValueError, match="config must have the fields"):
        SMALL.check({"panel": 32})


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_configurations_can_be_built(arch: Any) -> None:
    for m in (1, 33, 64, 100, 128):
        for config in SMALL.configs(m, 512, "fp16", arch):
            X = torch.empty(1, m, 512)
            SMALL.spec(call_of(X, X.half(), "fp16", normalize=True, restarts=()), config, arch)
    assert SMALL.configs(128, 512, "fp16", arch)


def spilled_bytes(arch: str, config: dict[str, Any], m: int, dtype: str, given: str) -> int:
    X, out = torch.empty(1, m, 512, dtype=DTYPES[given]), torch.empty(1, m, 512, dtype=DTYPES[dtype])
    used = resources_of(
        compiled(SMALL.spec(call_of(X, out, dtype, normalize=given == "fp32"), config, ARCHS[arch]))
    )
    assert used.blocks_per_sm, used
    return used.local_bytes


def test_no_spills() -> None:
    """Where registers are scarcest."""
    assert not spilled_bytes("sm_90a", WIDE | {"panel": 32}, 128, "fp16", "fp16")


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("m", [32, 64, 128])
def test_no_configuration_on_offer_spills(m: int, arch: str) -> None:
    for config in SMALL.configs(m, 512, "fp16", ARCHS[arch]):
        for dtype in ("fp16", "bf16"):
            for given in (dtype, "fp32"):
                assert not spilled_bytes(arch, config, m, dtype, given), (config, dtype, given)


HARMLESS = {
    "barrier": (
        "R R of the second segment's first step, where Q was not laid over R",
        # Between a segment and the panels of the next, and between panels.
        "after the first Q: one comes after a panel is scaled, before Q is read",
        "after the second Q: likewise",
        "before a panel of the second segment: threads scale what they have copied themselves",
        "before a panel of the last segment: likewise",
        "before X of the second segment is made: its last readers have passed the panel's first barrier",
        "before X of the last segment is made: likewise",
        "at the end",
    ),
    "copy wait": ("at the end: what is still under way are zeros beyond X",),
}
"""What can be dropped without an access out of order, which the interpreter sees whatever the schedule. TileLang lays
buffers over each other as it likes, so that in other configurations most of it is needed."""


@pytest.mark.slow
def test_mutants_are_noticed() -> None:
    """Dropped waits, commits and barriers. Three stages, of which none is waited for by all; four warps, which share
    operands; five panels, so that slots are used again."""

    def passes(binary: Binary) -> None:
        for seed in (None, 1):
            check_integers("sm_80", MIDDLE, 49, 136, 3, (1,), True, seed=seed, binary=binary)

    X, out = matrices(2, 49, 136, "fp16", by_columns=True), matrices(2, 49, 136, "fp16")
    call = call_of(X, out, "fp16", steps=POLAR.steps[:3], restarts=(1,))
    lived = survivors(compiled(SMALL.spec(call, MIDDLE, ARCHS["sm_80"])), passes, *SYNCHRONISATION)
    harmless = Counter({kind: len(reasons) for kind, reasons in HARMLESS.items()})
    assert Counter(mutant.kind for mutant in lived) <= harmless, "\n".join(map(str, lived))
