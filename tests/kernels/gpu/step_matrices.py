"""What the tests of a step's elementwise kernels share: matrices strewn over memory, their table, launches run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ptx import Memory, run
from ptx.report import Report
from torch import Tensor
from triton_products import DTYPES, beyond, compiled

from dmuon.kernels.gpu.arch import arch_named
from dmuon.kernels.gpu.triton_kernels.elementwise import fill_table

CANARY = -77.0


def strewn(count: int, rows: int, cols: int, dtype: str, seed: int, *, shift: int = 8) -> list[Tensor]:
    """Contiguous Gaussian matrices, each ``shift`` elements into a buffer of canaries of its own."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        buffer = torch.full((rows * cols + shift + 40,), CANARY, dtype=DTYPES[dtype])
        view = buffer[shift : shift + rows * cols].view(rows, cols)
        found.append(view.copy_(torch.randn(rows, cols, generator=generator)))
    return found


@dataclass
class Strewn:
    """Equal matrices with gradients, momenta and weights, and what is around them."""

    gradients: Sequence[Tensor]
    momenta: Sequence[Tensor]
    weights: Sequence[Tensor]

    def __post_init__(self) -> None:
        self._edges = [beyond(tensor) for tensor in self.tensors]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.gradients, *self.momenta, *self.weights]

    def table(self, scalars: Sequence[tuple[float, float, float, float]]) -> Tensor:
        each = zip(self.gradients, self.momenta, self.weights, strict=True)
        return fill_table([(g.data_ptr(), b.data_ptr(), w.data_ptr()) for g, b, w in each], scalars)

    def nothing_beside_was_touched(self) -> bool:
        return all(map(torch.equal, self._edges, map(beyond, self.tensors)))


def execute(
    family: Any,
    call: Any,
    config: Mapping[str, Any],
    arch: str,
    tensors: Sequence[Tensor],
    seed: int | None = None,
) -> list[Report]:
    """Run the PTX of all launches of ``call``; nothing but the elements of ``tensors`` may be touched."""
    binaries = tuple(compiled(spec) for spec in family.specs(call, config, arch_named(arch)))
    memory = Memory.of(*tensors)
    launches = family.launches(call, config, binaries)
    return [run(binary, launch, memory, seed=seed) for binary, launch in zip(binaries, launches, strict=True)]
