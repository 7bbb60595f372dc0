"""The guard against non-finite results: the PTX of both launches run by the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ptx.report import Report
from step_matrices import execute
from torch import Tensor
from triton_products import compiled, in_interpreter, matrices

from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Unsupported
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.resources import resources_of
from dmuon.kernels.gpu.triton_kernels.elementwise import CONFIG as SHIPPED
from dmuon.kernels.gpu.triton_kernels.elementwise import parts_of
from dmuon.kernels.gpu.triton_kernels.guard import GUARD, GuardCall

pytest.importorskip("triton")

CONFIG = {"elements": 128, "warps": 1}


def guard(values: Tensor, counter: Tensor, arch: str, seed: int | None) -> list[Report]:
    layout = Matrices.of(values)
    found = torch.full((layout.batch, parts_of(layout, CONFIG["elements"])), -1, dtype=torch.int32)
    call = GuardCall(layout, found.data_ptr(), counter.data_ptr())
    return execute(GUARD, call, CONFIG, arch, [values, found, counter], seed)


@pytest.mark.parametrize(
    ("arch", "dtype", "padding"),
    [("sm_80", "fp16", 8), ("sm_80", "fp32", 0), ("sm_90a", "bf16", 8), ("sm_90a", "fp16", 0)],
)
@pytest.mark.parametrize("shape", [(9, 40), (1, 1), (5, 7), (1, 400)])
def test_bad_matrices_are_counted(arch: str, dtype: str, padding: int, shape: tuple[int, int]) -> None:
    """Wherever the one bad element is, once for each matrix; everything is read once and nothing else written."""
    counter, wanted = torch.zeros(1, dtype=torch.int32), 0
    rows, cols = shape
    steps: tuple[dict[int, tuple[int, int, float]], ...] = (
        {},
        {0: (rows - 1, cols - 1, torch.nan)},
        {0: (0, 0, torch.inf), 2: (rows // 2, 0, -torch.inf), 4: (0, cols - 1, torch.nan)},
        dict.fromkeys(range(5), (0, cols // 2, torch.inf)),
    )
    for seed, bad in zip((None, 1, 2, 3), steps, strict=True):
        values = matrices(5, *shape, dtype, padding=padding).fill_(60000.0)
        for k, (i, j, value) in bad.items():
            values[k, i, j] = value
        before = values.clone()
        look, count = guard(values, counter, arch, seed)
        wanted += len(bad)
        assert counter.item() == wanted
        assert torch.equal(values.nan_to_num(), before.nan_to_num())
        assert look.loaded[0] == values.numel() * values.itemsize and look.stored[0] == 0
        assert count.loaded[0] == 0


def test_all_elements_of_a_matrix_count_once() -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    guard(torch.full((3, 40, 40), torch.nan), counter, "sm_80", 1)
    assert counter.item() == 3


def test_under_the_triton_interpreter() -> None:
    in_interpreter(
        """
import torch
from dmuon.kernels.gpu.triton_kernels import guard_kernel
x = torch.ones(2, 9, 40)[:, :, :33]
x[0, 8, 32] = torch.nan
found, counter = torch.empty(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
guard_kernel.look[(4,)](x, found, 9, 33, 40, 360, 2, ALIGNED=False, BLOCK=64)
guard_kernel.count[(2,)](found, counter, 2, MOST=4)
assert counter.item() == 1
"""
    )


def test_what_is_refused() -> None:
    def specs(values: Tensor) -> Any:
        return GUARD.specs(GuardCall(Matrices.of(values), 0, 0), CONFIG, ARCHS["sm_80"])

    with pytest.raises(Unsupported, match="rows must be contiguous"):
        specs(torch.empty(4, 8).mT)
    with pytest.raises(Unsupported, match="dtype must be one of fp32, bf16, fp16, got fp64"):
        specs(torch.empty(4, 8).double())


def test_nothing_is_spilled_and_accesses_are_wide() -> None:
    for arch in ("sm_80", "sm_90a"):
        values = Matrices(0, "bf16", 4, 4096, 4096, 1 << 24, 4096, 1)
        look, count = map(
            resources_of, map(compiled, GUARD.specs(GuardCall(values, 0, 0), SHIPPED, ARCHS[arch]))
        )
        assert look.local_bytes == count.local_bytes == 0 and look.occupancy >= 0.5, look
        assert any("128" in name for name in look.instructions if name.startswith("LDG"))
