"""The guard against non-finite results: the PTX of both launches run by the interpreter."""

from __future__ import annotations

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
from dmuon.kernels.gpu.triton_kernels.guard import GUARD, GuardCall

pytest.importorskip("triton")

CONFIG = {"parts": 4, "block": 128, "warps": 1}
SHAPES = ((9, 40), (1, 1), (64, 24), (5, 7), (16, 16))


def execute(
    results: list[Tensor],
    skipped: Tensor,
    arch: str,
    *,
    config: dict[str, Any] = CONFIG,
    seed: int | None = None,
) -> list[Report]:
    count = len(results)
    records = torch.empty(count, 4, dtype=torch.int64)
    found = torch.full((count, config["parts"]), -1, dtype=torch.int32)
    call = GuardCall.of(results, records, found, skipped)
    first, second = (compiled(spec) for spec in GUARD.specs(call, config, arch_named(arch)))
    memory = Memory.of(*results, records, found, skipped)
    launches = GUARD.launches(call, config, (first, second))
    return [run(b, launch, memory, seed=seed) for b, launch in zip((first, second), launches, strict=True)]


@pytest.mark.parametrize(
    ("arch", "dtype", "padding"),
    [("sm_80", "fp16", 8), ("sm_80", "fp32", 0), ("sm_90a", "bf16", 8), ("sm_90a", "fp16", 0)],
)
def test_bad_matrices_are_zeroed_and_counted(arch: str, dtype: str, padding: int) -> None:
    """Wherever the one bad element is; good matrices are read once and not written."""
    skipped = torch.zeros(len(SHAPES), dtype=torch.int32)
    steps = (
        {},
        {0: (8, 39, torch.nan)},
        {0: (0, 0, torch.inf), 2: (31, 5, -torch.inf), 4: (15, 15, torch.nan)},
    )
    for seed, bad in zip((None, 1, 2), steps, strict=True):
        results = [matrices(1, *shape, dtype, padding=padding)[0].fill_(60000.0) for shape in SHAPES]
        for k, (i, j, value) in bad.items():
            results[k][i, j] = value
        edges, before = [beyond(result) for result in results], skipped.clone()
        look, skip = execute(results, skipped, arch, seed=seed)
        for k, result in enumerate(results):
            finite = torch.tensor(60000.0).to(result.dtype)
            assert (result == (0 if k in bad else finite)).all()
            assert skipped[k] == before[k] + (k in bad)
            size = result.numel() * result.itemsize
            assert look.loaded[k] == size and look.stored[k] == 0
            assert skip.loaded[k] == 0 and skip.stored[k] == (size if k in bad else 0)
        assert all(map(torch.equal, edges, map(beyond, results)))


def test_under_the_triton_interpreter() -> None:
    in_interpreter(
        """
import torch, triton.language as tl
from dmuon.kernels.gpu.triton_kernels import guard_kernel
x, y = torch.ones(9, 33), torch.ones(9, 33)
x[8, 32] = torch.nan
records = torch.tensor([[x.data_ptr(), 1, 297, 0], [y.data_ptr(), 9, 33, 33]])
found, skipped = torch.empty(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
options = dict(DTYPE=tl.float32, ALIGNED=False, BLOCK=64, PARTS=2)
guard_kernel.look[(4,)](records, found, **options)
guard_kernel.skip[(4,)](records, found, skipped, **options)
assert (x == 0).all() and (y == 1).all() and skipped.tolist() == [1, 0]
"""
    )


def test_what_is_refused() -> None:
    scratch = torch.empty(2, 4, dtype=torch.int64), torch.empty(2, 4), torch.empty(2)
    with pytest.raises(Unsupported, match="rows must be contiguous"):
        GuardCall.of([torch.empty(4, 8).mT], *scratch)
    with pytest.raises(Unsupported, match="must have one dtype, got fp16, fp32"):
        GuardCall.of([torch.empty(4, 8), torch.empty(4, 8).half()], *scratch)
    with pytest.raises(Unsupported, match="dtype must be fp32, fp16 or bf16, got fp64"):
        GUARD.specs(GuardCall(0, 0, 0, 1, "fp64", True), CONFIG, ARCHS["sm_80"])
    with pytest.raises(Unsupported, match="more than a grid holds"):
        GUARD.launches(GuardCall(0, 0, 0, 1 << 30, "fp16", True), CONFIG, (None, None))  # type: ignore[arg-type]


def test_nothing_is_spilled_and_accesses_are_wide() -> None:
    for arch in ("sm_80", "sm_90a"):
        config = GUARD.config(1 << 24, 4)
        for spec in GUARD.specs(GuardCall(0, 0, 0, 4, "bf16", True), config, ARCHS[arch]):
            used = resources_of(compiled(spec))
            assert used.local_bytes == 0 and used.occupancy >= 0.5, used
            assert any("128" in name for name in used.instructions if name.startswith(("LDG", "STG")))
