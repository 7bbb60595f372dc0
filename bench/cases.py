"""What is compared: shapes, precisions, and the speed-ups that DMuon must show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dmuon.autotune import ns_problem
from dmuon.kernels.choose import Problem
from dmuon.models import load_shapes, preset_names

LARGEST_PRESET = 2048
"""The longest smaller side of the preset shapes that are compared."""

PRESET_FLOOR = 0.97
"""No preset shape may run slower than this many times torch's speed."""

TARGETS = {
    (1, 512, 2048): {"fp32": 1.9, "bf16": 1.4},
    (1, 1024, 4096): {"fp32": 2.2, "bf16": 1.7},
    (32, 128, 512): {"fp32": 2.5, "bf16": 2.5},
}
"""Speed-ups over torch.optim.Muon's iteration on a CPU; over its loop for the batch."""


@dataclass(frozen=True)
class Shape:
    """``batch`` matrices of rows × cols; ``floor``: the speed-up that is due for its sake as a preset's."""

    batch: int
    rows: int
    cols: int
    floor: float | None = None

    def __str__(self) -> str:
        matrix = f"{self.rows}×{self.cols}"
        return matrix if self.batch == 1 else f"{self.batch} of {matrix}"

    def problem(self, precision: str, device: str) -> Problem:
        """What ``gram_ns`` is asked in the comparison."""
        return ns_problem(
            self.rows,
            self.cols,
            self.batch,
            device=device,
            precision=precision,
            coefficients="keller_jordan",
        )

    def target(self, precision: str, device: str) -> float | None:
        """The speed-up over torch that is due here; ``None`` where none was promised."""
        if device != "cpu":
            return None
        promised = TARGETS.get((self.batch, self.rows, self.cols), {}).get(precision)
        return self.floor if promised is None and precision in ("fp32", "bf16") else promised


def parse_shape(text: str, batch: int) -> Shape:
    """``"1024x4096"`` → that shape, ``batch`` of it.

    Raises:
        ValueError: ``text`` is no such shape.
    """
    match = re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a shape such as 1024x4096")
    return Shape(batch, int(match[1]), int(match[2]))


def must_show() -> list[Shape]:
    """The shapes that have a target of their own."""
    return [Shape(*key) for key in TARGETS]


def preset_shapes() -> list[Shape]:
    """Every distinct matrix shape of the shipped presets up to :data:`LARGEST_PRESET`, small ones first."""
    counts = (count for name in preset_names() for count in load_shapes(name).matrices())
    sides = {(count.m, count.n) for count in counts if count.m <= LARGEST_PRESET}
    return [Shape(1, m, n, PRESET_FLOOR) for m, n in sorted(sides, key=lambda side: side[0] ** 2 * side[1])]


def distinct(shapes: Iterable[Shape]) -> list[Shape]:
    """The first of each, whatever its floor."""
    first: dict[tuple[int, int, int], Shape] = {}
    for shape in shapes:
        first.setdefault((shape.batch, shape.rows, shape.cols), shape)
    return list(first.values())
