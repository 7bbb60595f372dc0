"""The CuTe DSL kernel on warp-level matrix instructions, run from its PTX by the interpreter."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from ptx import Memory, run
from ptx.report import Report
from torch import Tensor

from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary
from dmuon.kernels.gpu.build import build_here
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.cute_kernels.symmetric_sm80 import SYMMETRIC_SM80

pytest.importorskip("cutlass")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

SMALL = {"tile": 32, "bk": 32, "stages": 3, "warps_m": 2, "warps_n": 1}
MIDDLE = {"tile": 64, "bk": 64, "stages": 3, "warps_m": 2, "warps_n": 2}
LARGE = {"tile": 128, "bk": 32, "stages": 4, "warps_m": 2, "warps_n": 4}

compiled = lru_cache(build_here)


def matrices(batch: int, rows: int, columns: int, dtype: str, *, by_columns: bool = False) -> Tensor:
    """A batch inside a larger buffer of canaries: padded lines, a padded batch stride, 16-byte alignment only."""
    lines, length = (columns, rows) if by_columns else (rows, columns)
    unit = 16 // DTYPES[dtype].itemsize
    stride = (-(-length // unit) + 1) * unit
    every = lines * stride + 3 * unit
    buffer = torch.full((batch * every + 256,), -77.0, dtype=DTYPES[dtype])
    shift = -buffer.data_ptr() % 32 // buffer.itemsize + unit
    view = buffer.as_strided((batch, lines, length), (every, stride, 1), shift)
    return view.mT if by_columns else view


def fill(tensor: Tensor, generator: torch.Generator, *, symmetric: bool = False) -> Tensor:
    """With integers so small that every sum is exact."""
    values = torch.randint(-2, 3, tensor.shape, generator=generator).to(tensor.dtype)
    tensor.copy_(values.tril() + values.tril(-1).mT if symmetric else values)
    return tensor


def launch(
    op: str,
    config: dict[str, Any],
    A: Tensor,
    B: Tensor | None,
    C: Tensor | None,
    out: Tensor,
    alpha: float,
    beta: float,
    diag: float,
    *,
    arch: str = "sm_80",
    seed: int | None = None,
    binary: Binary | None = None,
) -> Report:
    second, added = (None if t is None else Matrices.of(t) for t in (B, C))
    call = ProductCall(op, Matrices.of(A), second, added, Matrices.of(out), alpha, beta, diag)
    binary = binary or compiled(SYMMETRIC_SM80.spec(call, config, ARCHS[arch]))
    tensors = [t for t in (A, B, C, out) if t is not None]
    return run(binary, SYMMETRIC_SM80.launch(call, config, binary, 108), Memory.of(*tensors), seed=seed)


def check(
    op: str,
    config: dict[str, Any],
    batch: int,
    m: int,
    n: int,
    dtype: str = "bf16",
    out_dtype: str = "bf16",
    *,
    by_columns: bool = False,
    added: str = "",
    same: bool = False,
    seed: int | None = None,
    **others: Any,
) -> Report:
    """Run on integers and demand the exact result, symmetric, and not one element beyond it written."""
    generator = torch.Generator().manual_seed(m + n)
    A = fill(matrices(batch, m, n, dtype, by_columns=by_columns), generator, symmetric=op != "gram")
    B = None
    if op == "symmetric_product":
        # A and -A commute, and unlike A A the product of -A and A would show which operand was read.
        B = A if same else matrices(batch, m, m, dtype).copy_(-A)
    out = matrices(batch, m, m, out_dtype)
    C = {"": None, "other": matrices(batch, m, m, out_dtype), "out": out}[added]
    alpha, beta, diag = 0.5, -2.0, 3.0
    expected = alpha * (A.double() @ (A.mT if B is None else B).double()) + diag * torch.eye(m).double()
    if C is not None:
        expected += beta * fill(C, generator, symmetric=True).double()
    report = launch(op, config, A, B, C, out, alpha, beta, diag, seed=seed, **others)
    assert torch.equal(out, expected.to(out.dtype))
    assert torch.equal(out, out.mT)
    return report


@pytest.mark.parametrize("added", ["", "other", "out"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (33, 40), (96, 200)])
def test_gram(m: int, n: int, added: str) -> None:
    check("gram", SMALL, 2, m, n, added=added)
