"""The weight update W ← βW + αO of a batch of matrices in one launch, where O has been written out.

It serves kernels that run the whole iteration; else the update rides in the last product
(:mod:`dmuon.kernels.gpu.triton_kernels.update`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.triton_kernels.elementwise import WEIGHT_DTYPES, launch_over, wide


@dataclass(frozen=True)
class MoveCall:
    """An update of the weights in a table.

    Args:
        table: address of the table (:data:`~dmuon.kernels.gpu.triton_kernels.elementwise.FIELDS`).
        direction: O of each matrix; rows are contiguous.
        weight_dtype: fp32, bf16 or fp16.
        aligned: whether all weights start at multiples of 16 bytes.
    """

    table: int
    direction: Matrices
    weight_dtype: str
    aligned: bool


class MoveFamily:
    """Its launch; for a configuration see :data:`~dmuon.kernels.gpu.triton_kernels.elementwise.CONFIG`."""

    def specs(self, call: MoveCall, config: Mapping[str, Any], arch: Arch) -> tuple[KernelSpec]:
        """What to compile.

        Raises:
            Unsupported: a dtype or the layout is not served.
        """
        for name, dtype in (("weight_dtype", call.weight_dtype), ("dtype", call.direction.dtype)):
            if dtype not in WEIGHT_DTYPES:
                raise Unsupported(f"triton: {name} must be one of {', '.join(WEIGHT_DTYPES)}, got {dtype}")
        options = {
            "weight_dtype": call.weight_dtype,
            "dtype": call.direction.dtype,
            "aligned": call.aligned and wide(call.direction),
            **config,
        }
        return (KernelSpec("triton", "triton_kernels.move_kernel", arch.name, options),)

    def launches(self, call: MoveCall, config: Mapping[str, Any], binaries: tuple[Binary]) -> tuple[Launch]:
        """The launch."""
        return (launch_over(call.direction, config["elements"], call.table, call.direction.address),)


MOVE = MoveFamily()
