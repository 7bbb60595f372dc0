"""A guard against non-finite results, over a list of matrices in two launches and without a host synchronisation.

*look* reads every result once; *skip* zeroes each matrix in which any element is NaN or infinite, so that its weights
are not moved, and counts it. Other matrices are left as they are. The counts stay on the device until someone reads
them.
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
from dmuon.kernels.gpu.triton_kernels.prepare import common_lines, only_dtype, spread

RECORD = 4
"""int64 fields of a matrix's record: address, number and length of its lines, elements from one to the next."""

PARTS = ("look", "skip")
"""The two launches, in order."""


@dataclass(frozen=True)
class GuardCall:
    """A check of a list of matrices.

    Args:
        records: address of an int64 array (count, 4) on the device; see :data:`RECORD`.
        found: address of scratch memory, int32 (count, parts).
        skipped: address of an int32 array (count,) on the device: how often each matrix was skipped. It is added to,
            never reset.
        count: matrices.
        dtype: of the matrices: fp32, fp16 or bf16.
        aligned: whether every line is a multiple of 8 elements long, and starts at a multiple of 16 bytes.
    """

    records: int
    found: int
    skipped: int
    count: int
    dtype: str
    aligned: bool

    @classmethod
    def of(cls, matrices: Sequence[Tensor], records: Tensor, found: Tensor, skipped: Tensor) -> GuardCall:
        """Of matrices with contiguous rows, and fill ``records``, int64 (count, 4).

        Raises:
            Unsupported: they differ in dtype, or rows are not contiguous.
        """
        fields, aligned = [], True
        for matrix in matrices:
            number, length, (stride,) = common_lines([matrix])
            fields.append([matrix.data_ptr(), number, length, stride])
            aligned &= matrix.data_ptr() % 16 == 0 and length % 8 == 0 and stride % 8 == 0
        records.copy_(torch.tensor(fields, dtype=torch.int64))
        addresses = records.data_ptr(), found.data_ptr(), skipped.data_ptr()
        return cls(*addresses, len(fields), only_dtype(matrices), aligned)


class GuardFamily:
    """Both launches. A configuration has ``parts`` (blocks for each matrix), ``block`` (elements that one handles at
    a time) and ``warps``."""

    sources = tuple(
        f"gpu/triton_kernels/{name}.py"
        for name in ("guard", "guard_kernel", "prepare", "operands", "compile")
    )

    def config(self, elements: int, count: int) -> dict[str, Any]:
        """For ``count`` matrices, the largest of ``elements``."""
        return spread(elements, count)

    def specs(self, call: GuardCall, config: Mapping[str, Any], arch: Arch) -> tuple[KernelSpec, KernelSpec]:
        """What to compile for the two launches.

        Raises:
            Unsupported: the dtype is not served.
        """
        if call.dtype not in ("fp32", "fp16", "bf16"):
            raise Unsupported(f"triton: dtype must be fp32, fp16 or bf16, got {call.dtype}")
        options = {"dtype": call.dtype, "aligned": call.aligned, **config}
        module = "triton_kernels.guard_kernel"
        look, skip = (KernelSpec("triton", module, arch.name, {**options, "part": part}) for part in PARTS)
        return look, skip

    def launches(
        self, call: GuardCall, config: Mapping[str, Any], binaries: tuple[Binary, Binary]
    ) -> tuple[Launch, Launch]:
        """The two launches, to be made in this order."""
        blocks = call.count * config["parts"]
        if blocks >= 1 << 31:
            raise Unsupported(f"triton: {blocks} blocks are more than a grid holds; use fewer parts")
        shared = (pointer(call.records), pointer(call.found))
        look = Launch((blocks, 1, 1), (*shared, *HIDDEN_ARGS))
        skip = Launch((blocks, 1, 1), (*shared, pointer(call.skipped), *HIDDEN_ARGS))
        return look, skip


GUARD = GuardFamily()
