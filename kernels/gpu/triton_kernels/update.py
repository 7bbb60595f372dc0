"""The weight update in the last product of Newton–Schulz: W ← βW + α(Q + qI)X, by the kernel of ``apply``.

No orthogonalised matrix is ever written. Each weight of the batch is wherever the table says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.triton_kernels.apply import APPLY

_LARGE = {"block_m": 128, "block_n": 128, "block_k": 64, "warps": 8, "stages": 3, "group": 8}
_SMALL = {"block_m": 64, "block_n": 64, "block_k": 32, "warps": 4, "stages": 3, "group": 8}


@dataclass(frozen=True)
class UpdateCall:
    """An update of the weights in a table.

    Args:
        table: address of the table (:data:`~dmuon.kernels.gpu.triton_kernels.elementwise.FIELDS`).
        Q: (batch, m, m), fp16 or bf16.
        X: (batch, m, n) in Q's dtype. Contiguous columns say that the weights are tall: (n, m) by rows.
        shift: q.
        weight_dtype: fp32, bf16 or fp16.
        aligned: whether all weights start at multiples of 16 bytes.
    """

    table: int
    Q: Matrices
    X: Matrices
    shift: float
    weight_dtype: str
    aligned: bool

    @property
    def product(self) -> ProductCall:
        """As a product, whose result stands for the weights."""
        m, n = self.X.rows, self.X.columns
        strides = (n, 1) if self.X.row_major else (1, m)
        address = 16 if self.aligned else 1
        weights = Matrices(address, self.weight_dtype, self.X.batch, m, n, 0, *strides)
        return ProductCall("apply", self.Q, self.X, self.X, weights, 1.0, self.shift)


class UpdateFamily:
    """Its launch in one of the configurations of :data:`~dmuon.kernels.gpu.triton_kernels.apply.APPLY`."""

    def config(self, call: UpdateCall) -> dict[str, Any]:
        """What runs until someone times it: tiles of 128, or of 64 where lines are ragged or few."""
        m, n = call.X.rows, call.X.columns
        large = call.aligned and m % 8 == n % 8 == 0 and m > 64
        return dict(_LARGE if large else _SMALL)

    def specs(self, call: UpdateCall, config: Mapping[str, Any], arch: Arch) -> tuple[KernelSpec]:
        """What to compile.

        Raises:
            Unsupported: a dtype or a layout is not served.
        """
        return (APPLY.spec(call.product, config, arch, update=True),)

    def launches(self, call: UpdateCall, config: Mapping[str, Any], binaries: tuple[Binary]) -> tuple[Launch]:
        """The launch."""
        # Its blocks are not persistent: the number of multiprocessors has no say.
        return (APPLY.launch(call.product, config, binaries[0], 0, table=call.table),)


UPDATE = UpdateFamily()
