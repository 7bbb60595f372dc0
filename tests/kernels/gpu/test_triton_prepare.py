"""Momentum, scaling and cast of a batch of matrices: the PTX of both launches run by the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ptx.report import Report
from step_matrices import Strewn, execute, strewn
from torch import Tensor
from triton_products import DTYPES, beyond, compiled, in_interpreter, matrices

from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Unsupported
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.resources import resources_of
from dmuon.kernels.gpu.triton_kernels.elementwise import CONFIG as SHIPPED
from dmuon.kernels.gpu.triton_kernels.elementwise import parts_of
from dmuon.kernels.gpu.triton_kernels.prepare import PREPARE, PrepareCall
from dmuon.kernels.normalize import normalized_copy

pytest.importorskip("triton")

ROUNDING = {"fp32": 2.0**-22, "fp16": 2.0**-11, "bf16": 2.0**-8}
CONFIG = {"elements": 256, "warps": 2}


def prepare(
    batch: Strewn,
    result: Tensor,
    arch: str,
    *,
    decays: tuple[float, ...] = (),
    nesterov: bool = True,
    aligned: bool = True,
    config: dict[str, Any] = CONFIG,
    seed: int | None = None,
) -> list[Report]:
    """Reports have gradients, momenta, weights and the result, in this order."""
    decays = decays or (0.95,) * len(batch.gradients)
    table = batch.table([(1 - decay, decay, torch.nan, torch.nan) for decay in decays])
    partials = torch.full((len(decays), parts_of(Matrices.of(result), config["elements"]), 2), torch.nan)
    dtypes = [{v: k for k, v in DTYPES.items()}[t[0].dtype] for t in (batch.gradients, batch.momenta)]
    call = PrepareCall(table.data_ptr(), partials.data_ptr(), Matrices.of(result), *dtypes, aligned, nesterov)
    return execute(PREPARE, call, config, arch, [*batch.tensors, result, table, partials], seed)


def expected(
    gradient: Tensor, momentum: Tensor, dtype: str, mu: float, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """Momentum and result as dmuon.Muon and gram_ns make them."""
    momentum, gradient = momentum.clone(), gradient.to(momentum.dtype)
    momentum.lerp_(gradient, 1 - mu)
    update = torch.lerp(gradient, momentum, mu) if nesterov else momentum
    return momentum, normalized_copy(update, torch.empty(update.shape, dtype=DTYPES[dtype]))


@pytest.mark.parametrize(
    ("arch", "grad", "dtype", "working", "nesterov", "shape", "padding"),
    [
        ("sm_80", "fp32", "fp32", "fp16", True, (24, 40), 0),
        ("sm_80", "bf16", "fp32", "bf16", False, (9, 304), 8),
        ("sm_80", "fp16", "fp32", "fp32", True, (5, 7), 0),
        ("sm_90a", "bf16", "bf16", "bf16", True, (24, 40), 8),
        ("sm_90a", "fp32", "fp32", "fp16", False, (5, 307), 5),
        ("sm_90a", "bf16", "fp32", "fp16", True, (1, 1), 8),
    ],
)
def test_as_the_optimizer_does_it(
    arch: str, grad: str, dtype: str, working: str, nesterov: bool, shape: tuple[int, int], padding: int
) -> None:
    """Results with and without gaps between rows, aligned and not; each byte read as often as must be, and written
    once; every matrix with its own momentum."""
    aligned, decays = not shape[1] % 8, (0.95, 0.0, 0.4)
    shift = 8 if aligned else 3
    batch = Strewn(*(strewn(3, *shape, name, k, shift=shift) for k, name in enumerate((grad, dtype, dtype))))
    result = matrices(3, *shape, working, padding=padding)
    wanted = [
        expected(gradient, momentum, working, decay, nesterov)
        for gradient, momentum, decay in zip(batch.gradients, batch.momenta, decays, strict=True)
    ]
    before, edge = [weight.clone() for weight in batch.weights], beyond(result)
    advance, scale = prepare(batch, result, arch, decays=decays, nesterov=nesterov, aligned=aligned, seed=1)
    for momentum, got, (momentum_wanted, result_wanted) in zip(batch.momenta, result, wanted, strict=True):
        limit = 2 * ROUNDING[dtype] * momentum_wanted.abs().max()
        assert (momentum.double() - momentum_wanted.double()).abs().max() <= limit
        step = max(ROUNDING[working], ROUNDING[dtype])
        assert (got.double() - result_wanted.double()).abs().max() <= 2 * step * result_wanted.abs().max()
    assert batch.nothing_beside_was_touched() and torch.equal(beyond(result), edge)
    assert all(map(torch.equal, batch.weights, before))
    state, gradients = (
        [t.numel() * t.itemsize for t in batch.momenta],
        [t.numel() * t.itemsize for t in batch.gradients],
    )
    assert advance.loaded[:9] == gradients + state + [0] * 3
    assert advance.stored[:10] == [0] * 3 + state + [0] * 4
    assert scale.loaded[:6] == (gradients if nesterov else [0] * 3) + state
    assert scale.stored[:10] == [0] * 9 + [result.numel() * result.itemsize]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_exactly_on_powers_of_two(arch: str) -> None:
    """All of ±2⁻ᵏ: momentum, norm and result are exact, at any scale, whatever the order of blocks."""
    for exponent in (-100, 0, 60):
        for seed in (None, 1):
            batch = Strewn(*(strewn(2, 16, 64, "fp32", 0) for _ in range(3)))
            for gradient, momentum, sign in zip(batch.gradients, batch.momenta, (1, -1), strict=True):
                gradient.fill_(sign * 2.0**exponent)
                momentum.zero_()
            result = torch.empty(2, 16, 64, dtype=torch.float16)
            prepare(batch, result, arch, decays=(0.5, 0.5), nesterov=False, seed=seed)
            assert all(torch.equal(m, g / 2) for m, g in zip(batch.momenta, batch.gradients, strict=True))
            assert (result[0] == 2.0**-5).all() and (result[1] == -(2.0**-5)).all()


def test_zeros_and_what_is_not_finite() -> None:
    """N1 and N2."""
    batch = Strewn(*(strewn(6, 16, 48, "fp32", k) for k in range(3)))
    gradients = batch.gradients
    gradients[1].zero_()
    gradients[2][3, 4], gradients[3][15, 47] = torch.nan, torch.inf
    gradients[4].mul_(1e-30)
    gradients[5].mul_(1e18)
    for momentum in batch.momenta:
        momentum.zero_()
    result = torch.empty(6, 16, 48)
    wanted = [expected(g, m, "fp32", 0.95, True)[1] for g, m in zip(gradients, batch.momenta, strict=True)]
    prepare(batch, result, "sm_80")
    assert (result[1] == 0).all()
    for k in range(6):
        assert result[k].isnan().all() == wanted[k].isnan().all() == (k in (2, 3))
        torch.testing.assert_close(result[k], wanted[k], equal_nan=True, rtol=1e-5, atol=1e-9)


def test_under_the_triton_interpreter() -> None:
    in_interpreter(
        """
import torch, triton, triton.language as tl
from dmuon.kernels.gpu.triton_kernels import prepare_kernel
from dmuon.kernels.gpu.triton_kernels.elementwise import fill_table
from test_triton_prepare import expected
g, m, x = torch.randn(9, 33).bfloat16(), torch.randn(9, 33), torch.empty(9, 33, dtype=torch.float16)
wanted = expected(g, m, "fp16", 0.95, True)
table, partials = fill_table([(g.data_ptr(), m.data_ptr(), 0)], [(0.05, 0.95, 0, 0)]), torch.empty(4, 2)
for kernel in (prepare_kernel.advance, prepare_kernel.scale):
    kernel[(4,)](
        table, partials, x, 9, 33, 33, 297, 4, NESTEROV=True, GRAD=tl.bfloat16, MOMENTUM=tl.float32,
        ALIGNED=False, BLOCK=64, MOST=8,
    )
torch.testing.assert_close(m, wanted[0])
torch.testing.assert_close(x, wanted[1], rtol=2e-3, atol=1e-6)
"""
    )


def test_what_is_refused() -> None:
    result = Matrices.of(torch.empty(1, 16, 32))
    with pytest.raises(Unsupported, match="momentum_dtype must be one of fp32, bf16, got fp16"):
        PREPARE.specs(PrepareCall(0, 0, result, "fp16", "fp16", True, True), CONFIG, ARCHS["sm_80"])
    with pytest.raises(Unsupported, match="rows must be contiguous"):
        turned = Matrices.of(torch.empty(1, 32, 16).mT)
        PREPARE.specs(PrepareCall(0, 0, turned, "fp32", "fp32", True, True), CONFIG, ARCHS["sm_80"])
    with pytest.raises(Unsupported, match="more than a grid holds"):
        parts_of(Matrices(0, "fp16", 1 << 31, 4, 8, 32, 8, 1), 1024)


def test_blocks_follow_the_work() -> None:
    def parts(side: int, batch: int) -> int:
        return parts_of(Matrices(0, "fp16", batch, side, side, side * side, side, 1), 1024)

    assert (parts(16, 1), parts(4096, 1), parts(4096, 400)) == (1, 1024, 11)


def test_nothing_is_spilled_and_accesses_are_wide() -> None:
    for arch in ("sm_80", "sm_90a"):
        for momentum in ("fp32", "bf16"):
            result = Matrices(0, "fp16", 4, 4096, 4096, 1 << 24, 4096, 1)
            call = PrepareCall(0, 0, result, "bf16", momentum, True, True)
            for spec in PREPARE.specs(call, SHIPPED, ARCHS[arch]):
                used = resources_of(compiled(spec))
                assert used.local_bytes == 0 and used.occupancy >= 0.5, used
                assert any("128" in name for name in used.instructions if name.startswith(("LDG", "STG")))
