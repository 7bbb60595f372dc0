"""What comes before Newton–Schulz, over a whole batch of matrices in two launches.

*advance* reads each gradient and momentum once, writes the momentum, and measures the update it makes; *scale* reads
both again and writes the update, divided by its Frobenius norm, in the working precision. Reading again moves no more
than a temporary in fp32 would, and needs no memory.

The arithmetic is that of ``dmuon.Muon`` and :mod:`dmuon.kernels.normalize`: any scale of the gradient gives the same
result, a zero matrix gives zero, NaN or Inf makes its own matrix NaN. Sums are taken in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.triton_kernels.elementwise import (
    EXACT_DTYPES,
    WEIGHT_DTYPES,
    launch_over,
    wide,
)

PARTS = ("advance", "scale")
"""The two launches, in order."""


@dataclass(frozen=True)
class PrepareCall:
    """Momentum, scaling and cast of a batch of matrices.

    Momentum becomes the average B ← μB + (1 − μ)G, and the update is B, or μB + (1 − μ)G with ``nesterov``.

    Args:
        table: address of the table (:data:`~dmuon.kernels.gpu.triton_kernels.elementwise.FIELDS`).
        partials: address of scratch memory, fp32 (batch, parts, 2), for at most 1024 parts.
        result: of each matrix; rows are contiguous.
        grad_dtype: fp32, fp16 or bf16.
        momentum_dtype: fp32 or bf16.
        aligned: whether all gradients and momenta start at multiples of 16 bytes.
        nesterov: whether the update looks ahead by one momentum step.
    """

    table: int
    partials: int
    result: Matrices
    grad_dtype: str
    momentum_dtype: str
    aligned: bool
    nesterov: bool


class PrepareFamily:
    """Both launches; for a configuration see :data:`~dmuon.kernels.gpu.triton_kernels.elementwise.CONFIG`."""

    def specs(
        self, call: PrepareCall, config: Mapping[str, Any], arch: Arch
    ) -> tuple[KernelSpec, KernelSpec]:
        """What to compile for the two launches.

        Raises:
            Unsupported: a dtype or the result's layout is not served.
        """
        dtypes = {
            "grad_dtype": (call.grad_dtype, WEIGHT_DTYPES),
            "momentum_dtype": (call.momentum_dtype, EXACT_DTYPES),
            "dtype": (call.result.dtype, WEIGHT_DTYPES),
        }
        for name, (dtype, served) in dtypes.items():
            if dtype not in served:
                raise Unsupported(f"triton: {name} must be one of {', '.join(served)}, got {dtype}")
        options = {
            **{name: dtype for name, (dtype, _) in dtypes.items()},
            "aligned": call.aligned and wide(call.result),
            "nesterov": call.nesterov,
            **config,
        }
        module = "triton_kernels.prepare_kernel"
        advance, scale = (
            KernelSpec("triton", module, arch.name, {**options, "part": part}) for part in PARTS
        )
        return advance, scale

    def launches(
        self, call: PrepareCall, config: Mapping[str, Any], binaries: tuple[Binary, Binary]
    ) -> tuple[Launch, Launch]:
        """The two launches, to be made in this order."""
        addresses = (call.table, call.partials, call.result.address)
        launch = launch_over(call.result, config["elements"], *addresses)
        return launch, launch


PREPARE = PrepareFamily()
