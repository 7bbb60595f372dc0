"""What comes before Newton–Schulz, over a whole list of matrices in two launches.

*advance* reads each gradient and momentum once, writes the momentum, and measures the update it makes; *scale* reads
both again and writes the update, divided by its Frobenius norm, in the working precision. Reading again moves no more
than a temporary in fp32 would, and needs no memory.

The arithmetic is that of ``dmuon.Muon`` and :mod:`dmuon.kernels.normalize`: any scale of the gradient gives the same
result, a zero matrix gives zero, NaN or Inf makes its own matrix NaN. Sums are taken in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported, pointer
from dmuon.kernels.gpu.triton_kernels.operands import HIDDEN_ARGS
from dmuon.kernels.precision import precision_name

RECORD = 8
"""int64 fields of a matrix's record: the addresses of gradient, momentum and result, the number and the length of
their lines, and the elements from one line to the next in each."""

PARTS = ("advance", "scale")
"""The two launches, in order."""


@dataclass(frozen=True)
class PrepareCall:
    """Momentum, scaling and cast of a list of matrices.

    Args:
        records: address of an int64 array (count, 8) on the device; see :data:`RECORD`.
        scalars: address of two fp32 values on the device, 1 − μ and μ, for momentum μ; read at every launch, so
            that a captured graph follows them.
        partials: address of scratch memory, fp32 (count, parts, 2).
        count: matrices.
        grad_dtype: fp32, fp16 or bf16.
        momentum_dtype: fp32 or bf16.
        dtype: of the results: fp32, fp16 or bf16.
        aligned: whether every line is a multiple of 8 elements long, and starts at a multiple of 16 bytes.
        nesterov: whether the update looks ahead by one momentum step.
        average: whether momentum is the average B ← μB + (1 − μ)G, and the update μB + (1 − μ)G with Nesterov;
            else it is the sum B ← μB + G, and the update μB + G.
    """

    records: int
    scalars: int
    partials: int
    count: int
    grad_dtype: str
    momentum_dtype: str
    dtype: str
    aligned: bool
    nesterov: bool
    average: bool = True

    @classmethod
    def of(
        cls,
        gradients: Sequence[Tensor],
        momenta: Sequence[Tensor],
        results: Sequence[Tensor],
        records: Tensor,
        scalars: Tensor,
        partials: Tensor,
        *,
        nesterov: bool,
        average: bool = True,
    ) -> PrepareCall:
        """Of equally many matrices each, and fill ``records``, int64 (count, 8).

        Raises:
            Unsupported: tensors of one kind differ in dtype, or a matrix's three tensors are not all row-major.
        """
        fields, aligned = [], True
        for matrices in zip(gradients, momenta, results, strict=True):
            number, length, strides = common_lines(matrices)
            fields.append([*(tensor.data_ptr() for tensor in matrices), number, length, *strides])
            aligned &= all(tensor.data_ptr() % 16 == 0 for tensor in matrices)
            aligned &= all(size % 8 == 0 for size in (length, *strides))
        records.copy_(torch.tensor(fields, dtype=torch.int64))
        return cls(
            records.data_ptr(),
            scalars.data_ptr(),
            partials.data_ptr(),
            len(fields),
            only_dtype(gradients),
            only_dtype(momenta),
            only_dtype(results),
            aligned,
            nesterov,
            average,
        )


def common_lines(matrices: Sequence[Tensor]) -> tuple[int, int, list[int]]:
    """Number and length of the lines that tensors of one shape consist of, and each one's stride between lines.

    Raises:
        Unsupported: their rows are not contiguous.
    """
    first = matrices[0]
    if any(tensor.shape != first.shape for tensor in matrices):
        raise ValueError(f"a matrix's tensors must agree in shape, got {[tuple(t.shape) for t in matrices]}")
    if all(tensor.is_contiguous() for tensor in matrices):
        return 1, first.numel(), [0] * len(matrices)
    if first.ndim != 2 or any(tensor.stride(1) != 1 for tensor in matrices):
        strides = [tensor.stride() for tensor in matrices]
        raise Unsupported(f"triton: rows must be contiguous in a list of matrices, got strides {strides}")
    return first.shape[0], first.shape[1], [tensor.stride(0) for tensor in matrices]


def only_dtype(tensors: Sequence[Tensor]) -> str:
    """The name of the dtype that all ``tensors`` have.

    Raises:
        Unsupported: they have several.
    """
    names = {precision_name(tensor.dtype) for tensor in tensors}
    if len(names) != 1:
        raise Unsupported(f"triton: a list of matrices must have one dtype, got {', '.join(sorted(names))}")
    return names.pop()


def spread(elements: int, count: int) -> dict[str, Any]:
    """How blocks share ``count`` matrices, the largest of ``elements``: some thousands in all, none always idle."""
    pieces = -(-elements // 1024)
    wanted = min(pieces, -(-4096 // count), 1024)
    return {"parts": 1 << (wanted - 1).bit_length(), "block": 1024, "warps": 4}


class PrepareFamily:
    """Both launches. A configuration has ``parts`` (blocks for each matrix), ``block`` (elements that one handles at
    a time) and ``warps``."""

    sources = tuple(
        f"gpu/triton_kernels/{name}.py" for name in ("prepare", "prepare_kernel", "operands", "compile")
    )

    def config(self, elements: int, count: int) -> dict[str, Any]:
        """For ``count`` matrices, the largest of ``elements``."""
        return spread(elements, count)

    def specs(
        self, call: PrepareCall, config: Mapping[str, Any], arch: Arch
    ) -> tuple[KernelSpec, KernelSpec]:
        """What to compile for the two launches.

        Raises:
            Unsupported: a dtype is not served.
        """
        allowed = {
            "grad_dtype": ("fp32", "fp16", "bf16"),
            "momentum_dtype": ("fp32", "bf16"),
            "dtype": ("fp32", "fp16", "bf16"),
        }
        for name, dtypes in allowed.items():
            if getattr(call, name) not in dtypes:
                raise Unsupported(
                    f"triton: {name} must be one of {', '.join(dtypes)}, got {getattr(call, name)}"
                )
        options = {name: getattr(call, name) for name in (*allowed, "aligned", "nesterov", "average")}
        advance, scale = (
            KernelSpec(
                "triton", "triton_kernels.prepare_kernel", arch.name, {**options, **config, "part": part}
            )
            for part in PARTS
        )
        return advance, scale

    def launches(
        self, call: PrepareCall, config: Mapping[str, Any], binaries: tuple[Binary, Binary]
    ) -> tuple[Launch, Launch]:
        """The two launches, to be made in this order."""
        blocks = call.count * config["parts"]
        if blocks >= 1 << 31:
            raise Unsupported(f"triton: {blocks} blocks are more than a grid holds; use fewer parts")
        args = (pointer(call.records), pointer(call.scalars), pointer(call.partials), *HIDDEN_ARGS)
        launch = Launch((blocks, 1, 1), args)
        return launch, launch


PREPARE = PrepareFamily()
