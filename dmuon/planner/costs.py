"""What the owner's whole step takes: momentum, orthogonalisation and update of a batch of equal matrices."""

from __future__ import annotations

import torch

from dmuon.autotune import Cost, CostTable
from dmuon.kernels.coefficients import CoefficientSet
from dmuon.tuning_cache import Store


class StepCosts:
    """Costs on one device, as known when it was made.

    Args:
        store: of trials.
        device: a device of this process, or a device key.
        precision: of Newton–Schulz, as "fp32".
        coefficients: as for ``gram_ns``.

    Raises:
        ValueError: an unknown precision or unknown coefficients.
    """

    def __init__(
        self,
        store: Store,
        device: torch.device | str,
        precision: str,
        coefficients: str | CoefficientSet = "polar_express",
    ) -> None:
        self._table = CostTable(store, device, precision, coefficients)
        self._known: dict[tuple[int, int, int], Cost] = {}

    def cost(self, rows: int, cols: int, batch: int) -> Cost:
        """Milliseconds of the step of ``batch`` matrices of rows × cols in one batch."""
        key = (rows, cols, batch)
        if key not in self._known:
            self._known[key] = self._table.ms(rows, cols, batch)
        return self._known[key]
