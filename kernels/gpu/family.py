"""The host side of a kernel for the three products: what a compiled backend asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch
from dmuon.kernels.gpu.calls import ProductCall


class ProductFamily(Protocol):
    """One kernel in all its configurations. Its module imports no DSL: device code lives beside it."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Its source files, host and device, relative to the kernels folder."""

    def configs(self, op: str, m: int, n: int, dtype: str, arch: Arch) -> list[dict[str, Any]]:
        """The configurations worth timing on (m, n) operands (JSON values), pruned of those that cannot win and
        of those that exceed the arch's shared memory, registers or threads; empty if it cannot serve."""

    def check(self, op: str, config: Mapping[str, Any]) -> None:
        """Raise ValueError, naming field and value, unless ``config`` is one it understands for ``op``."""

    def spec(self, call: ProductCall, config: Mapping[str, Any], arch: Arch) -> KernelSpec:
        """What to compile for ``call``: a function of dtypes, layouts and config, not of sizes or addresses.

        Raises:
            Unsupported: arch, dtype, alignment or layout cannot be served, or the configuration needs more
                shared memory than the arch has; the message says which and why.
        """

    def launch(
        self, call: ProductCall, config: Mapping[str, Any], binary: Binary, multiprocessors: int
    ) -> Launch:
        """The launch that performs ``call``. ``multiprocessors`` sizes the grid of persistent kernels."""
