"""A guard against non-finite results, over a batch of matrices in two launches and without a host synchronisation.

*look* reads every result once, and *count* adds the number of matrices in which any element is NaN or infinite to a
counter on the device, for whoever reads it. Nothing is changed: what is not finite shows in the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported, i32, pointer
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.triton_kernels.elementwise import WEIGHT_DTYPES, launch_over, parts_of, wide
from dmuon.kernels.gpu.triton_kernels.operands import HIDDEN_ARGS

PARTS = ("look", "count")
"""The two launches, in order."""


@dataclass(frozen=True)
class GuardCall:
    """A check of a batch of matrices.

    Args:
        values: the matrices, in fp32, fp16 or bf16; rows are contiguous.
        found: address of scratch memory, int32 (batch, parts), for at most 1024 parts.
        counter: address of an int32 on the device, which is added to.
    """

    values: Matrices
    found: int
    counter: int


class GuardFamily:
    """Both launches; for a configuration see :data:`~dmuon.kernels.gpu.triton_kernels.elementwise.CONFIG`."""

    def specs(self, call: GuardCall, config: Mapping[str, Any], arch: Arch) -> tuple[KernelSpec, KernelSpec]:
        """What to compile for the two launches.

        Raises:
            Unsupported: the dtype or the layout is not served.
        """
        dtype = call.values.dtype
        if dtype not in WEIGHT_DTYPES:
            raise Unsupported(f"triton: dtype must be one of {', '.join(WEIGHT_DTYPES)}, got {dtype}")
        look = {"part": "look", "dtype": dtype, "aligned": wide(call.values), **config}
        first, second = (
            KernelSpec("triton", "triton_kernels.guard_kernel", arch.name, options)
            for options in (look, {"part": "count"})
        )
        return first, second

    def launches(
        self, call: GuardCall, config: Mapping[str, Any], binaries: tuple[Binary, Binary]
    ) -> tuple[Launch, Launch]:
        """The two launches, to be made in this order."""
        parts = parts_of(call.values, config["elements"])
        look = launch_over(call.values, config["elements"], call.values.address, call.found)
        count = (pointer(call.found), pointer(call.counter), i32(parts), *HIDDEN_ARGS)
        return look, Launch((call.values.batch, 1, 1), count)


GUARD = GuardFamily()
