"""What the tests of the Triton products share: operands among canaries, kernels' PTX run on them, resources."""

from __future__ import annotations

import inspect
import os
import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from ptx import Memory, run
from ptx.report import Report
from torch import Tensor

from dmuon.kernels.gpu.arch import arch_named
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch
from dmuon.kernels.gpu.build import build_here
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.family import ProductFamily
from dmuon.kernels.gpu.toolchain import tool

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CANARY = -77.0

compiled = lru_cache(build_here)


def matrices(
    batch: int, rows: int, columns: int, dtype: str, *, by_columns: bool = False, padding: int = 8
) -> Tensor:
    """A batch inside a larger buffer of canaries, with ``padding`` elements after each line and each matrix."""
    lines, length = (columns, rows) if by_columns else (rows, columns)
    stride = -(-length // padding) * padding + padding if padding else length
    every = lines * stride + padding
    buffer = torch.full((batch * every + 64,), CANARY, dtype=DTYPES[dtype])
    shift = -buffer.data_ptr() % 64 // buffer.itemsize + (padding or 1)
    view = buffer.as_strided((batch, lines, length), (every, stride, 1), shift)
    return view.mT if by_columns else view


def fill(tensor: Tensor, seed: int, *, symmetric: bool = False) -> Tensor:
    """With integers so small that every sum is exact in fp32."""
    values = torch.randint(-2, 3, tensor.shape, generator=torch.Generator().manual_seed(seed)).to(
        tensor.dtype
    )
    return tensor.copy_(values.tril() + values.tril(-1).mT if symmetric else values)


def call_of(
    op: str, A: Tensor, B: Tensor | None, C: Tensor | None, out: Tensor, *scalars: float
) -> ProductCall:
    """Scalars are alpha, beta and diag."""
    second, added = (None if t is None else Matrices.of(t) for t in (B, C))
    return ProductCall(op, Matrices.of(A), second, added, Matrices.of(out), *scalars)


@dataclass(frozen=True)
class Case:
    """A symmetric product of integers, so that its result is exact."""

    call: ProductCall
    tensors: list[Tensor]
    out: Tensor
    start: Tensor
    expected: Tensor
    around: Tensor

    def begin(self) -> None:
        """Have in ``out`` what is there before the product: C, or what must not stay."""
        self.out.copy_(self.start)

    def verify(self, seed: int | None) -> None:
        """Demand the result, and nothing changed beside it."""
        assert torch.equal(self.out, self.expected), (seed, (self.out.double() - self.expected).abs().max())
        assert torch.equal(beyond(self.out), self.around)


def symmetric_case(
    op: str,
    batch: int,
    m: int,
    n: int,
    *,
    dtype: str = "bf16",
    out_dtype: str = "bf16",
    by_columns: bool = False,
    padding: int = 8,
    added: str = "",
) -> Case:
    """``added`` is "" for no C, "C", or "out" for C in the result's place."""
    square = op != "gram"
    A = fill(matrices(batch, m, n, dtype, by_columns=by_columns, padding=padding), 1, symmetric=square)
    B = fill(matrices(batch, m, n, dtype, padding=padding), 2, symmetric=True) if square else None
    out = matrices(batch, m, m, out_dtype, padding=padding)
    separate = fill(matrices(batch, m, m, out_dtype, padding=padding), 3, symmetric=True)
    C = {"": None, "C": separate, "out": out}[added]
    alpha, beta, diag = 2.0, 3.0 if added else 0.0, -5.0
    product = A.double() @ (A.mT if B is None else B).double()
    lower = alpha * product + beta * separate.double() + diag * torch.eye(m, dtype=torch.float64)
    expected = (lower.tril() + lower.tril(-1).mT).to(out.dtype)
    start = separate if added == "out" else torch.full_like(out, torch.nan)
    tensors = [tensor for tensor in (A, B, separate, out) if tensor is not None]
    return Case(call_of(op, A, B, C, out, alpha, beta, diag), tensors, out, start, expected, beyond(out))


def execute(
    family: ProductFamily,
    call: ProductCall,
    config: dict[str, Any],
    arch: str,
    tensors: list[Tensor],
    seed: int | None,
) -> Report:
    """Run the PTX that ``config`` compiles to; nothing but the elements of ``tensors`` may be touched."""
    binary = compiled(family.spec(call, config, arch_named(arch)))
    return run(binary, family.launch(call, config, binary, 132), Memory.of(*tensors), seed=seed)


def beyond(tensor: Tensor) -> Tensor:
    """All elements of the buffer that a tensor of :func:`matrices` is a view of, the tensor's own aside."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).clone()
    whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(CANARY)
    return whole


def interpret(kernel: Any, launch: Launch, constexprs: dict[str, Any], *tensors: Tensor) -> None:
    """Run a kernel of the Triton interpreter with the arguments of ``launch``, whose addresses are ``tensors``."""
    at = {tensor.data_ptr(): tensor for tensor in tensors} | {0: torch.empty(0)}
    values: list[Any] = []
    for name, data in zip(inspect.signature(kernel.fn).parameters, launch.args[:-2], strict=False):
        assert isinstance(data, bytes)
        if name in ("A", "B", "C", "out", "scalars", "parts"):
            values.append(at[struct.unpack("<Q", data)[0]])
        else:
            kind = "f" if name in ("alpha", "beta", "diag") else {4: "i", 8: "q"}[len(data)]
            values.append(struct.unpack(f"<{kind}", data)[0])
    kernel[launch.grid](*values, **constexprs)


def in_interpreter(script: str) -> None:
    """Run ``script`` in a process where Triton interprets kernels on CPU tensors."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1])])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def check_resources(spec: KernelSpec, config: dict[str, Any]) -> Binary:
    """Compile, and demand no spilled registers and no more shared memory than the arch has."""
    binary = compiled(spec)
    text = _cuobjdump(binary, "--dump-resource-usage")
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 255, (spec, used)
    assert binary.threads == 32 * config["warps"]
    assert binary.shared_bytes <= arch_named(spec.arch).shared_bytes
    return binary


def sass(binary: Binary) -> str:
    """The machine code in words."""
    return _cuobjdump(binary, "--dump-sass")


def _cuobjdump(binary: Binary, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.cubin)
        file.flush()
        command = [tool("cuobjdump"), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
