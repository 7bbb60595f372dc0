"""How long work takes on a device: measured where it was, by operations and bytes where it was not."""

from __future__ import annotations

from dataclasses import replace

from dmuon.autotune import Cost, CostTable
from dmuon.autotune.costs import features
from dmuon.kernels.choose import NSChoice, Problem, ProductChoice, heuristic_choice
from dmuon.kernels.coefficients import CoefficientSet, resolve_coefficients
from dmuon.simulator.machines import Machine

WHOLE, HALF = ProductChoice("torch"), ProductChoice("triton")
"""Symmetric products computed whole, and by their lower half as any backend but torch does it."""

ADAMW_BYTES = 7 * 4
"""Of an element's step: weight, gradient and both averages read, all but the gradient written, in fp32."""

MUON_BYTES = 7 * 4
"""Of an element's step beside Newton–Schulz: gradient, momentum, weight and direction read, all but the gradient
written, in fp32."""


class MachineCosts:
    """What a rank of ``machine`` takes for an optimizer's work.

    Args:
        machine: where.
        precision: of Newton–Schulz.
        coefficients: of Newton–Schulz.
        table: what was measured on such a device; used if it holds anything.
    """

    def __init__(
        self,
        machine: Machine,
        precision: str,
        coefficients: str | CoefficientSet = "polar_express",
        table: CostTable | None = None,
    ) -> None:
        self.machine, self.precision = machine, precision
        self.coefficients = resolve_coefficients(coefficients)
        self._table = table if table is not None and table.calibrated else None

    @property
    def source(self) -> str:
        """Where the times of an owner's Newton–Schulz come from, in words."""
        if self._table is not None:
            return f"measured on {self.machine.device}, and near those shapes modelled on them"
        return f"operations at {self.machine.products:.0%} of the peak, or bytes: no such device was measured"

    def cost(self, rows: int, cols: int, batch: int) -> Cost:
        """An owner's whole step of ``batch`` matrices in one batch: Newton–Schulz, and what surrounds it."""
        around = self._elementwise(batch * rows * cols, MUON_BYTES)
        if self._table is not None:
            measured = self._table.ms(rows, cols, batch)
            return Cost(measured.ms + around * 1e3, measured.source)
        problem = self._problem(rows, cols, batch)
        choice = heuristic_choice(problem, self.coefficients)
        if problem.device.startswith("cuda") and self.precision in ("fp16", "bf16"):
            choice = replace(choice, gram=HALF, symmetric_product=HALF)
        return Cost((self._iteration(problem, choice) + around) * 1e3, "default")

    def plain(self, rows: int, cols: int, *, half: bool = False) -> float:
        """Seconds of one matrix by standard Newton–Schulz, with whole products or with half ones."""
        product = HALF if half else WHOLE
        choice = NSChoice("standard", gram=product, symmetric_product=product)
        iteration = self._iteration(self._problem(rows, cols, 1), choice)
        return iteration + self._elementwise(rows * cols, MUON_BYTES)

    def adamw(self, elements: float) -> float:
        """Seconds of AdamW's step of ``elements``."""
        return self._elementwise(elements, ADAMW_BYTES)

    def _elementwise(self, elements: float, nbytes: int) -> float:
        return elements * nbytes / self.machine.memory_rate

    def _problem(self, rows: int, cols: int, batch: int) -> Problem:
        m, n = sorted((rows, cols))
        return Problem("gram_ns", batch, m, n, self.precision, self.machine.device, self.coefficients.key)

    def _iteration(self, problem: Problem, choice: NSChoice) -> float:
        operations, moved, launches = features(problem, choice)
        rate = self.machine.peak[self.precision] * self.machine.products
        # A product's reads and writes run beside its arithmetic; the slower of the two is what it takes.
        longest: float = max(operations / rate, moved / self.machine.memory_rate)
        return longest + launches * self.machine.launch
