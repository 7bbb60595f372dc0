"""How long work takes on a device: measured where it was, by operations and bytes where it was not."""

from __future__ import annotations

from dataclasses import replace

from dmuon.autotune import Cost
from dmuon.autotune.costs import features
from dmuon.kernels.choose import NSChoice, Problem, ProductChoice, heuristic_choice
from dmuon.kernels.coefficients import CoefficientSet, resolve_coefficients
from dmuon.planner import StepCosts
from dmuon.planner.costs import AROUND_BYTES, AROUND_LAUNCHES
from dmuon.simulator.machines import Machine

WHOLE, HALF = ProductChoice("torch"), ProductChoice("triton")
"""Symmetric products computed whole, and by their lower half as any backend but torch does it."""

ADAMW_BYTES = 7 * 4
"""Of an element's step: weight, gradient and both averages read, all but the gradient written, in fp32."""


class MachineCosts:
    """What a rank of ``machine`` takes for an optimizer's work.

    Args:
        machine: where.
        precision: of Newton–Schulz.
        coefficients: of Newton–Schulz.
        measured: the steps of such a device; used if anything was measured there.
    """

    def __init__(
        self,
        machine: Machine,
        precision: str,
        coefficients: str | CoefficientSet = "polar_express",
        measured: StepCosts | None = None,
    ) -> None:
        self.machine, self.precision = machine, precision
        self.coefficients = resolve_coefficients(coefficients)
        known = measured is not None and (measured.table.calibrated or measured.measured)
        self._measured = measured if known else None

    @property
    def source(self) -> str:
        """Where the times of an owner's Newton–Schulz come from, in words."""
        if self._measured is not None:
            return f"measured on {self.machine.device}, and modelled on that where it was not"
        return f"operations at {self.machine.products:.0%} of the peak, or bytes: no such device was measured"

    def cost(self, rows: int, cols: int, batch: int) -> Cost:
        """An owner's whole step of ``batch`` matrices in one batch: Newton–Schulz, and what surrounds it."""
        if self._measured is not None:
            return self._measured.cost(rows, cols, batch)
        problem = self._problem(rows, cols, batch)
        choice = heuristic_choice(problem, self.coefficients)
        if problem.device.startswith("cuda") and self.precision in ("fp16", "bf16"):
            choice = replace(choice, gram=HALF, symmetric_product=HALF)
        return Cost((self._iteration(problem, choice) + self._around(rows, cols, batch)) * 1e3, "default")

    def plain(self, rows: int, cols: int, *, half: bool = False) -> float:
        """Seconds of one matrix by standard Newton–Schulz, with whole products or with half ones."""
        product = HALF if half else WHOLE
        choice = NSChoice("standard", gram=product, symmetric_product=product)
        iteration = self._iteration(self._problem(rows, cols, 1), choice)
        return iteration + self._around(rows, cols, 1)

    def adamw(self, elements: float) -> float:
        """Seconds of AdamW's step of ``elements``."""
        return elements * ADAMW_BYTES / self.machine.memory_rate

    def _around(self, rows: int, cols: int, batch: int) -> float:
        """Seconds of what surrounds Newton–Schulz: momentum, scaling, update."""
        moved = batch * rows * cols * AROUND_BYTES / self.machine.memory_rate
        return moved + AROUND_LAUNCHES * self.machine.launch

    def _problem(self, rows: int, cols: int, batch: int) -> Problem:
        m, n = sorted((rows, cols))
        return Problem("gram_ns", batch, m, n, self.precision, self.machine.device, self.coefficients.key)

    def _iteration(self, problem: Problem, choice: NSChoice) -> float:
        operations, moved, launches = features(problem, choice)
        rate = self.machine.peak[self.precision] * self.machine.products
        # A product's reads and writes run beside its arithmetic; the slower of the two is what it takes.
        longest: float = max(operations / rate, moved / self.machine.memory_rate)
        return longest + launches * self.machine.launch
