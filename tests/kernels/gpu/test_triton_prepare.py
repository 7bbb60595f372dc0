"""Momentum, scaling and cast of a list of matrices: the PTX of both launches run by the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ptx import Memory, run
from ptx.report import Report
from torch import Tensor
from triton_products import beyond, compiled, in_interpreter, matrices

from dmuon.kernels.gpu.arch import ARCHS, arch_named
from dmuon.kernels.gpu.binary import Unsupported
from dmuon.kernels.gpu.resources import resources_of
from dmuon.kernels.gpu.triton_kernels.prepare import PREPARE, PrepareCall
from dmuon.kernels.normalize import normalized_copy

pytest.importorskip("triton")

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDING = {"fp32": 2.0**-22, "fp16": 2.0**-11, "bf16": 2.0**-8}
CONFIG = {"parts": 2, "block": 256, "warps": 2}
SHAPES = ((24, 40), (8, 16), (3, 304))


def gaussian(shapes: Sequence[tuple[int, int]], dtype: str, seed: int, padding: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        matrices(1, *shape, dtype, padding=padding)[0].copy_(torch.randn(shape, generator=generator))
        for shape in shapes
    ]


def execute(
    gradients: list[Tensor],
    momenta: list[Tensor],
    results: list[Tensor],
    arch: str,
    *,
    mu: float = 0.95,
    nesterov: bool = True,
    average: bool = True,
    config: dict[str, Any] = CONFIG,
    seed: int | None = None,
) -> list[Report]:
    count = len(gradients)
    records = torch.empty(count, 8, dtype=torch.int64)
    scalars, partials = torch.tensor([1 - mu, mu]), torch.full((count, config["parts"], 2), torch.nan)
    call = PrepareCall.of(
        gradients, momenta, results, records, scalars, partials, nesterov=nesterov, average=average
    )
    first, second = (compiled(spec) for spec in PREPARE.specs(call, config, arch_named(arch)))
    memory = Memory.of(*gradients, *momenta, *results, records, scalars, partials)
    launches = PREPARE.launches(call, config, (first, second))
    return [run(b, launch, memory, seed=seed) for b, launch in zip((first, second), launches, strict=True)]


def expected(
    gradient: Tensor, momentum: Tensor, dtype: str, mu: float, nesterov: bool, average: bool
) -> tuple[Tensor, Tensor]:
    """Momentum and result as dmuon.Muon and gram_ns make them."""
    momentum, gradient = momentum.clone(), gradient.to(momentum.dtype)
    if average:
        momentum.lerp_(gradient, 1 - mu)
        update = torch.lerp(gradient, momentum, mu) if nesterov else momentum
    else:
        momentum.mul_(mu).add_(gradient)
        update = gradient + mu * momentum if nesterov else momentum
    return momentum, normalized_copy(update, torch.empty(update.shape, dtype=DTYPES[dtype]))


CASES = [
    ("sm_80", "fp32", "fp32", "fp16", True, True, 0),
    ("sm_80", "bf16", "fp32", "bf16", False, True, 8),
    ("sm_80", "fp16", "fp32", "fp32", True, False, 8),
    ("sm_90a", "bf16", "bf16", "bf16", True, True, 8),
    ("sm_90a", "fp32", "fp32", "fp16", False, False, 3),
    ("sm_90a", "bf16", "fp32", "fp16", True, True, 8),
]


@pytest.mark.parametrize(("arch", "grad", "dtype", "working", "nesterov", "average", "padding"), CASES)
def test_as_the_optimizer_does_it(
    arch: str, grad: str, dtype: str, working: str, nesterov: bool, average: bool, padding: int
) -> None:
    """Lines with and without gaps, aligned and not; each byte read as often as must be, and written once."""
    gradients, momenta = gaussian(SHAPES, grad, 0, padding), gaussian(SHAPES, dtype, 1, padding)
    results = [matrices(1, *shape, working, padding=padding)[0] for shape in SHAPES]
    wanted = [
        expected(gradient, momentum, working, 0.95, nesterov, average)
        for gradient, momentum in zip(gradients, momenta, strict=True)
    ]
    edges = [beyond(tensor) for tensor in (*momenta, *results)]
    advance, scale = execute(gradients, momenta, results, arch, nesterov=nesterov, average=average, seed=1)
    for momentum, result, (momentum_wanted, result_wanted) in zip(momenta, results, wanted, strict=True):
        limit = 2 * ROUNDING[dtype] * momentum_wanted.abs().max()
        assert (momentum.double() - momentum_wanted.double()).abs().max() <= limit
        step = max(ROUNDING[working], ROUNDING[dtype])
        assert (result.double() - result_wanted.double()).abs().max() <= 2 * step * result_wanted.abs().max()
    assert all(map(torch.equal, edges, [beyond(tensor) for tensor in (*momenta, *results)]))

    def sizes(tensors: list[Tensor]) -> list[int]:
        return [tensor.numel() * tensor.itemsize for tensor in tensors]

    assert advance.loaded[:6] == sizes(gradients) + sizes(momenta)
    assert advance.stored[3:9] == sizes(momenta) + [0] * 3
    assert scale.loaded[:6] == (sizes(gradients) if nesterov else [0] * 3) + sizes(momenta)
    assert scale.stored[3:9] == [0] * 3 + sizes(results)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_exactly_on_powers_of_two(arch: str) -> None:
    """All of ±2⁻ᵏ: momentum, norm and result are exact, at any scale, whatever the order of blocks."""
    for exponent in (-100, 0, 60):
        gradients = [torch.full((16, 64), 2.0**exponent), torch.full((4, 16), -(2.0**exponent))]
        for seed in (None, 1):
            momenta = [torch.zeros_like(gradient) for gradient in gradients]
            results = [torch.empty_like(gradient, dtype=torch.float16) for gradient in gradients]
            execute(gradients, momenta, results, arch, mu=0.5, nesterov=False, seed=seed)
            assert all(torch.equal(m, g / 2) for m, g in zip(momenta, gradients, strict=True))
            assert (results[0] == 2.0**-5).all() and (results[1] == -(2.0**-3)).all()


def test_zeros_and_what_is_not_finite() -> None:
    """N1 and N2."""
    gradients = gaussian(((16, 48),) * 6, "fp32", 0)
    gradients[1].zero_()
    gradients[2][3, 4], gradients[3][15, 47] = torch.nan, torch.inf
    gradients[4].mul_(1e-30)
    gradients[5].mul_(1e18)
    momenta = [torch.zeros(16, 48) for _ in gradients]
    results = [torch.empty(16, 48) for _ in gradients]
    wanted = [expected(g, m, "fp32", 0.95, True, True)[1] for g, m in zip(gradients, momenta, strict=True)]
    execute(gradients, momenta, results, "sm_80")
    assert (results[1] == 0).all()
    for k, result in enumerate(results):
        assert result.isnan().all() == wanted[k].isnan().all() == (k in (2, 3))
        torch.testing.assert_close(result, wanted[k], equal_nan=True, rtol=1e-5, atol=1e-9)


def test_under_the_triton_interpreter() -> None:
    in_interpreter(
        """
import torch, triton, triton.language as tl
from dmuon.kernels.gpu.triton_kernels import prepare_kernel
from test_triton_prepare import expected
g, m, x = torch.randn(9, 33).bfloat16(), torch.randn(9, 33), torch.empty(9, 33, dtype=torch.float16)
wanted = expected(g, m, "fp16", 0.95, True, True)
records = torch.tensor([[g.data_ptr(), m.data_ptr(), x.data_ptr(), 3, 99, 99, 99, 99]])
scalars, partials = torch.tensor([0.05, 0.95]), torch.empty(4, 2)
for kernel in (prepare_kernel.advance, prepare_kernel.scale):
    kernel[(4,)](
        records, scalars, partials, NESTEROV=True, AVERAGE=True, GRAD=tl.bfloat16, MOMENTUM=tl.float32,
        WORKING=tl.float16, ALIGNED=False, BLOCK=64, PARTS=4,
    )
torch.testing.assert_close(m, wanted[0])
torch.testing.assert_close(x, wanted[1], rtol=2e-3, atol=1e-6)
"""
    )


def test_what_is_refused() -> None:
    def of(*tensors: Tensor) -> PrepareCall:
        gradient, momentum, result = tensors
        scratch = torch.empty(1, 8, dtype=torch.int64), torch.empty(2), torch.empty(1, 2, 2)
        return PrepareCall.of([gradient], [momentum], [result], *scratch, nesterov=True)

    wide = torch.empty(16, 32)
    with pytest.raises(Unsupported, match=r"momentum_dtype must be one of fp32, bf16, got fp16"):
        PREPARE.specs(of(wide, wide.half(), wide), CONFIG, ARCHS["sm_80"])
    with pytest.raises(Unsupported, match="rows must be contiguous"):
        of(wide, wide.mT.contiguous().mT, wide)
    with pytest.raises(ValueError, match="agree in shape"):
        of(wide, torch.empty(8, 64), wide)
    with pytest.raises(Unsupported, match="more than a grid holds"):
        call = PrepareCall(0, 0, 0, 1 << 30, "fp32", "fp32", "fp16", True, True)
        PREPARE.launches(call, CONFIG, (None, None))  # type: ignore[arg-type]


def test_blocks_follow_the_work() -> None:
    assert PREPARE.config(128, 1)["parts"] == 1
    assert PREPARE.config(4096 * 4096, 1)["parts"] == 1024
    assert PREPARE.config(4096 * 4096, 400)["parts"] == 16


def test_nothing_is_spilled_and_accesses_are_wide() -> None:
    for arch in ("sm_80", "sm_90a"):
        for momentum in ("fp32", "bf16"):
            call = PrepareCall(0, 0, 0, 4, "bf16", momentum, "fp16", True, True)
            config = PREPARE.config(1 << 24, 4)
            for spec in PREPARE.specs(call, config, ARCHS[arch]):
                used = resources_of(compiled(spec))
                assert used.local_bytes == 0 and used.occupancy >= 0.5, used
                assert any("128" in name for name in used.instructions if name.startswith(("LDG", "STG")))
