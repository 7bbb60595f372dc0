"""What the tests of the CuTe DSL products share: operands among canaries, and calls whose results are exact."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from ptx import Memory, run
from ptx.report import Report
from torch import Tensor

from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch
from dmuon.kernels.gpu.build import build_here
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.family import ProductFamily

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@lru_cache
def compiled(spec: KernelSpec) -> Binary:
    pytest.importorskip("cutlass")
    return build_here(spec)


def matrices(batch: int, rows: int, columns: int, dtype: str, by_columns: bool = False) -> Tensor:
    """A batch with gaps of NaN between lines and between matrices, aligned to 16 bytes and no more."""
    lines, length = (columns, rows) if by_columns else (rows, columns)
    unit = 16 // DTYPES[dtype].itemsize
    stride = (-(-length // unit) + 1) * unit
    every = lines * stride + 3 * unit
    buffer = torch.full((batch * every + 256,), float("nan"), dtype=DTYPES[dtype])
    shift = -buffer.data_ptr() % 32 // buffer.itemsize + unit
    view = buffer.as_strided((batch, lines, length), (every, stride, 1), shift)
    return view.mT if by_columns else view


def symmetric(values: Tensor) -> Tensor:
    return values.tril() + values.tril(-1).mT


class ExactCase:
    """One call on integers so small that every sum is exact; the interpreter refuses all access to other memory."""

    family: ProductFamily
    result_by_columns = False
    """Whether the result of symmetric operands lies as they do."""

    def __init__(
        self,
        config: dict[str, Any],
        m: int,
        n: int,
        op: str = "gram",
        dtype: str = "bf16",
        out_dtype: str = "bf16",
        batch: int = 1,
        by_columns: bool = False,
        c: str = "other",
        same: bool = False,
        *,
        arch: str,
        multiprocessors: int,
        alpha: float = 0.5,
    ) -> None:
        generator = torch.Generator().manual_seed(m + n)
        self.config, self.arch, self.multiprocessors = config, ARCHS[arch], multiprocessors
        self.A = matrices(batch, m, n, dtype, by_columns)
        values = torch.randint(-2, 3, self.A.shape, generator=generator).to(self.A.dtype)
        self.A.copy_(values if op == "gram" else symmetric(values))
        self.B = None
        if op == "symmetric_product":
            # A and -A commute, and unlike A and A they show which of them was read.
            self.B = self.A if same else matrices(batch, m, m, dtype, not by_columns).copy_(-self.A)
        turned = self.result_by_columns and by_columns and op != "gram"
        self.out = matrices(batch, m, m, out_dtype, turned)
        self.C = {"none": None, "other": matrices(batch, m, m, out_dtype, True), "out": self.out}[c]
        self.scalars = (alpha, -2.0, 3.0)
        expected = alpha * (self.A.double() @ (self.A.mT if self.B is None else self.B).double())
        expected += self.scalars[2] * torch.eye(m).double()
        if self.C is not None:
            self.C.copy_(symmetric(torch.randint(-4, 5, self.C.shape, generator=generator).to(self.C.dtype)))
            expected += self.scalars[1] * self.C.double()
        self.expected = expected.to(self.out.dtype)
        self.c = None if self.C is None else self.C.clone()
        described = [None if t is None else Matrices.of(t) for t in (self.A, self.B, self.C)]
        self.call = ProductCall(op, *described, Matrices.of(self.out), *self.scalars)

    @property
    def binary(self) -> Binary:
        return compiled(self.family.spec(self.call, self.config, self.arch))

    @property
    def work(self) -> float:
        """Operations on matrices that the kernel has to do: those of the lower triangle."""
        raise NotImplementedError

    def launch(self, binary: Binary) -> Launch:
        return self.family.launch(self.call, self.config, binary, self.multiprocessors)

    def run(
        self, seed: int | None = None, binary: Binary | None = None, launch: Launch | None = None
    ) -> Report:
        binary = binary or self.binary
        self.out.fill_(float("nan"))
        if self.C is not None:
            self.C.copy_(self.c)
        tensors = [t for t in (self.A, self.B, self.C, self.out) if t is not None]
        return run(binary, launch or self.launch(binary), Memory.of(*tensors), seed=seed)

    def exact(self) -> bool:
        return torch.equal(self.out, self.expected) and torch.equal(self.out, self.out.mT)

    def check(self, *seeds: int | None) -> None:
        """Right with every seed, and no more matrix work than there has to be."""
        for seed in seeds:
            report = self.run(seed)
            assert self.exact(), seed
            assert report.flops == self.work
