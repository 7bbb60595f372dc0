"""What the owner's whole step takes: momentum, orthogonalisation and update of a batch of equal matrices."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dmuon.autotune import Cost, CostTable, valid
from dmuon.autotune.answers import best_trial
from dmuon.autotune.costs import UNCALIBRATED, nonnegative_least_squares
from dmuon.kernels.coefficients import CoefficientSet
from dmuon.planner.items import Shape
from dmuon.tuning_cache import Store, Trial

STEP = "owner_step"
"""The ``op`` of trials of whole steps; their m and n are the rows and columns, as transposes differ."""

AROUND_BYTES = 7 * 4
"""Of an element, beside Newton–Schulz: gradient, momentum, weight and direction read, all but the first written."""

AROUND_LAUNCHES = 6
"""Of a batch, beside Newton–Schulz."""


class StepCosts:
    """Costs on one device, as known when it was made: by whole steps that :func:`~dmuon.planner.profile` measured.

    A batch between two measured ones of its shape is interpolated, one beyond them extrapolated by the model. The
    model adds to Newton–Schulz (:class:`~dmuon.autotune.CostTable`) what surrounds it, by bytes and batches; measured
    steps, where there are any, say how much of each, by least squares of the relative error.

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
        self.table = CostTable(store, device, precision, coefficients)
        trials: dict[tuple[Shape, int], list[Trial]] = {}
        for trial in store.trials(
            op=STEP,
            device=self.table.device,
            dtype=precision,
            coefficients=self.table.coefficients.key,
            status="ok",
        ):
            if valid(trial):
                trials.setdefault(((trial.m, trial.n), trial.batch), []).append(trial)
        self.measured: dict[Shape, dict[int, float]] = {}
        for (shape, batch), group in sorted(trials.items(), key=lambda pair: pair[0]):
            best = best_trial(group)
            if best is not None and best.median_ms:
                self.measured.setdefault(shape, {})[batch] = best.median_ms
        self._known: dict[tuple[int, int, int], Cost] = {}
        self._weights = self._calibrate()

    def cost(self, rows: int, cols: int, batch: int) -> Cost:
        """Milliseconds of the step of ``batch`` matrices of rows × cols in one batch.

        ``source`` is "measured" for a whole step of this very batch, "model" for what goes by measurements, and
        "default" where nothing was measured on the device.
        """
        key = (rows, cols, batch)
        if key not in self._known:
            self._known[key] = self._find(rows, cols, batch)
        return self._known[key]

    def _find(self, rows: int, cols: int, batch: int) -> Cost:
        steps = self.measured.get((rows, cols), {})
        if batch in steps:
            return Cost(steps[batch], "measured")
        below, above = [b for b in steps if b < batch], [b for b in steps if b > batch]
        if below and above:
            return Cost(float(np.interp(batch, list(steps), list(steps.values()))), "model")
        modelled = self._modelled(rows, cols, batch)
        if steps:
            near = max(below) if below else min(above)
            return Cost(modelled * steps[near] / self._modelled(rows, cols, near), "model")
        return Cost(modelled, "model" if self.table.calibrated or self.measured else "default")

    def _modelled(self, rows: int, cols: int, batch: int) -> float:
        return float(self._features(rows, cols, batch) @ self._weights)

    def _features(self, rows: int, cols: int, batch: int) -> NDArray[np.float64]:
        iteration = self.table.ms(rows, cols, batch).ms
        return np.array([iteration, batch * rows * cols * AROUND_BYTES, AROUND_LAUNCHES], dtype=np.float64)

    def _calibrate(self) -> NDArray[np.float64]:
        steps = [(*shape, batch, ms) for shape, each in self.measured.items() for batch, ms in each.items()]
        if not steps:
            _, byte, launch = UNCALIBRATED["cuda" if self.table.device.startswith("cuda") else "cpu"]
            return np.array([1.0, byte, launch])
        rows = np.array([self._features(*step[:3]) / step[3] for step in steps])
        weights: NDArray[np.float64] = nonnegative_least_squares(rows, np.ones(len(steps)))
        return weights
