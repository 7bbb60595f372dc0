"""Symmetric products in Triton that hand each other lower halves: their PTX, run by the interpreter."""

from __future__ import annotations

import pytest
import torch
from ptx import Memory, run
from ptx.mutate import survivors
from triton_products import CANARY, call_of, compiled, execute, fill, matrices

from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary
from dmuon.kernels.gpu.triton_kernels.symmetric import SYMMETRIC

pytest.importorskip("triton")

MIDDLE = {"block": 64, "block_k": 32, "warps": 4, "stages": 3, "group": 1}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_lower_halves_determine_the_lower_half(arch: str) -> None:
    config, m = MIDDLE | {"lower": "both"}, 136
    A, B, C = (fill(matrices(1, m, m, "bf16"), seed, symmetric=True) for seed in (1, 2, 3))
    expected = (2 * (A.double() @ B.double()) + 3 * C.double()).to(A.dtype).tril()
    above = torch.ones(m, m, dtype=torch.bool).triu(1)
    for tensor in (A, B, C):
        tensor[:, above] = torch.nan
    out = matrices(1, m, m, "bf16")
    call = call_of("symmetric_product", A, B, C, out, 2.0, 3.0)
    for seed in (None, 1):
        out.fill_(CANARY)
        report = execute(SYMMETRIC, call, config, arch, [A, B, C, out], seed)
        assert torch.equal(out.tril(), expected)
        assert bool((out[:, :64, 64:] == CANARY).all() and (out[:, 64:128, 128:] == CANARY).all())
    # Three tiles a side, the last of 8 rows: six of nine are written.
    assert report.stored[3] == 2 * (64 * 64 * 3 + 8 * 64 * 2 + 8 * 8)
    # And the whole of it, for a consumer that reads it whole.
    execute(SYMMETRIC, call, config | {"lower": "read"}, arch, [A, B, C, out], 1)
    assert torch.equal(out, expected + expected.tril(-1).mT)
    X = fill(matrices(1, m, 40, "bf16"), 4)
    written = MIDDLE | {"lower": "write"}
    execute(SYMMETRIC, call_of("gram", X, None, None, out.fill_(CANARY), 1.0), written, arch, [X, out], None)
    assert torch.equal(out.tril(), (X.double() @ X.double().mT).to(out.dtype).tril())
    assert bool((out[:, :64, 64:] == CANARY).all())


@pytest.mark.parametrize(
    ("arch", "kinds"),
    [
        pytest.param("sm_80", ("zero fill", "copy wait"), marks=pytest.mark.slow),
        ("sm_90a", ("copy wait", "wgmma wait")),
    ],
)
def test_faults_are_noticed(arch: str, kinds: tuple[str, ...]) -> None:
    config, m = MIDDLE | {"lower": "both"}, 200
    A, B = (fill(matrices(1, m, m, "bf16"), seed, symmetric=True) for seed in (1, 2))
    expected = (A.double() @ B.double()).to(A.dtype).tril()
    for tensor in (A, B):
        tensor[:, torch.ones(m, m, dtype=torch.bool).triu(1)] = torch.nan
    out = matrices(1, m, m, "bf16")
    call = call_of("symmetric_product", A, B, None, out, 1.0)

    def verify(binary: Binary) -> None:
        for seed in (None, 1, 2):
            out.fill_(torch.nan)
            launch = SYMMETRIC.launch(call, config, binary, 1)
            run(binary, launch, Memory.of(A, B, out), seed=seed, max_steps=200_000)
            assert torch.equal(out.tril(), expected)

    lived = survivors(compiled(SYMMETRIC.spec(call, config, ARCHS[arch])), verify, *kinds, every=5)
    assert not lived, "\n".join(map(str, lived))
