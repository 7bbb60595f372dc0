"""A kernel of the tests: the tiles that indices stand for."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from ptx import Memory, run
from torch import Tensor

from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, i32, pointer
from dmuon.kernels.gpu.triton_kernels.compile import compile_triton
from dmuon.kernels.gpu.triton_kernels.operands import HIDDEN_ARGS
from dmuon.kernels.gpu.triton_kernels.symmetric_kernel import place_of

COUNT = 512


@triton.jit
def tiles(index, side, group, rows, columns, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    i, j = place_of(tl.load(index + at), side, group)
    tl.store(rows + at, i)
    tl.store(columns + at, j)


@lru_cache
def compiled_tiles() -> Binary:
    spec = KernelSpec("triton", "test", "sm_80")
    signature = {"index": "*i32", "side": "i32", "group": "i32", "rows": "*i32", "columns": "*i32"}
    return compile_triton(spec, tiles, signature, {"COUNT": COUNT}, num_warps=4, num_stages=1)


def tiles_of(index: Tensor, side: int, group: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of up to COUNT tiles, as the compiled kernel computes them."""
    padded, rows, columns = (torch.zeros(COUNT, dtype=torch.int32) for _ in range(3))
    padded[: len(index)] = index
    args = (
        pointer(padded.data_ptr()),
        i32(side),
        i32(group),
        pointer(rows.data_ptr()),
        pointer(columns.data_ptr()),
    )
    run(compiled_tiles(), Launch((1, 1, 1), (*args, *HIDDEN_ARGS)), Memory.of(padded, rows, columns))
    return rows[: len(index)].long(), columns[: len(index)].long()
