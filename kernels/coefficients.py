"""The polynomials of Newton–Schulz: named coefficient sets, their sources, and the Polar Express derivation.

A step maps each singular value x to ``a·x + b·x³ + c·x⁵``; a set is one (a, b, c) per step. Inputs are scaled
to ‖X‖_F = 1 first, so that every singular value starts in [0, 1].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

Triple = tuple[float, float, float]

POLAR_EXPRESS_LOWER = 1e-3
"""The smallest singular value that Polar Express is optimised for (the paper's ℓ)."""

POLAR_EXPRESS_CUSHION = 0.02407327424182761
"""The paper's cushion: a step never optimises for a lower end below this fraction of its upper end."""

POLAR_EXPRESS_SAFETY = 1.05
"""Head room for rounding: each polynomial p is used as p(x / safety), as gram-newton-schulz does."""


@dataclass(frozen=True)
class CoefficientSet:
    """A sequence of (a, b, c), one per Newton–Schulz step. ``key`` identifies it in stores and logs."""

    name: str
    steps: tuple[Triple, ...]
    key: str

    def __len__(self) -> int:
        return len(self.steps)


def keller_jordan(steps: int = 5) -> CoefficientSet:
    """Keller Jordan's quintic (https://kellerjordan.github.io/posts/muon), the same triple at every step.

    It trades exact convergence for slope at 0: singular values end in about [0.68, 1.13].
    """
    _check_steps(steps)
    return CoefficientSet("keller_jordan", ((3.4445, -4.7750, 2.0315),) * steps, f"keller_jordan:{steps}")


def you() -> CoefficientSet:
    """The five steps that gram-newton-schulz (Dao-AILab) names YOU, after Jiacheng You who found them."""
    steps = (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    )
    return CoefficientSet("you", steps, "you:5")


@lru_cache
def polar_express(steps: int = 5, safety: float = POLAR_EXPRESS_SAFETY) -> CoefficientSet:
    """Polar Express (Amsel et al., arXiv 2505.16932): each step the best odd quintic for what the last one left.

    Step t minimises max |1 − p(x)| over [l, u], where l and u = 2 − l bound the singular values after step
    t − 1. The coefficients are derived here, not transcribed; any number of steps is defined.
    """
    _check_steps(steps)
    if not 1.0 <= safety < 2.0:
        raise ValueError(f"safety must be in [1, 2), got {safety}")
    lower, upper = POLAR_EXPRESS_LOWER, 1.0
    triples = []
    for _ in range(steps):
        a, b, c = _optimal_quintic(max(lower, POLAR_EXPRESS_CUSHION * upper), upper)
        # With the cushion in force the error is level over a shorter interval: recentre it around 1 over [l, u].
        centre = 2.0 / (_quintic(a, b, c, lower) + _quintic(a, b, c, upper))
        a, b, c = a * centre, b * centre, c * centre
        lower = _quintic(a, b, c, lower)
        upper = 2.0 - lower
        triples.append((a / safety, b / safety**3, c / safety**5))
    suffix = "" if safety == POLAR_EXPRESS_SAFETY else f":{safety:g}"
    return CoefficientSet("polar_express", tuple(triples), f"polar_express:{steps}{suffix}")


NAMED: dict[str, Callable[[], CoefficientSet]] = {
    "polar_express": polar_express,
    "keller_jordan": keller_jordan,
    "you": you,
}


def resolve_coefficients(spec: str | CoefficientSet | Sequence[Sequence[float]]) -> CoefficientSet:
    """A set from its name, from itself, or from a list of (a, b, c) triples.

    Raises:
        ValueError: an unknown name, no steps, a step that is not three finite numbers.
        TypeError: ``spec`` is none of these.
    """
    if isinstance(spec, CoefficientSet):
        return spec
    if isinstance(spec, str):
        if spec not in NAMED:
            raise ValueError(
                f"coefficients must be one of {', '.join(NAMED)} or a list of triples, got {spec!r}"
            )
        return NAMED[spec]()
    try:
        steps = tuple(tuple(float(value) for value in step) for step in spec)
    except (TypeError, ValueError):
        raise TypeError(f"coefficients must be a name or a list of (a, b, c) triples, got {spec!r}") from None
    if not steps or any(len(step) != 3 or not all(map(math.isfinite, step)) for step in steps):
        raise ValueError(f"coefficients must be one or more triples of finite numbers, got {spec!r}")
    triples = tuple((step[0], step[1], step[2]) for step in steps)
    digest = hashlib.sha256(repr(triples).encode()).hexdigest()[:12]
    return CoefficientSet("custom", triples, f"custom:{len(triples)}:{digest}")


def coefficients_of(key: str) -> CoefficientSet | None:
    """The named set that has this :attr:`CoefficientSet.key`; ``None`` for a caller's own list."""
    name, *numbers = key.split(":")
    try:
        if name == "polar_express":
            found = polar_express(int(numbers[0]), *map(float, numbers[1:]))
        elif name == "keller_jordan":
            found = keller_jordan(int(numbers[0]))
        else:
            found = NAMED[name]()
    except (KeyError, ValueError, IndexError, TypeError):
        return None
    return found if found.key == key else None


def _check_steps(steps: int) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}")


def _quintic(a: float, b: float, c: float, x: float) -> float:
    return a * x + b * x**3 + c * x**5


def _optimal_quintic(lower: float, upper: float) -> Triple:
    """The odd quintic closest to 1 on [lower, upper], by Remez exchange on its four extrema.

    The error equioscillates at lower, q, r and upper, where q < r are the interior extrema: solve for the
    polynomial and the error given the points, then move q and r to where its derivative vanishes.
    """
    if lower / upper > 1 - 5e-6:
        # So short an interval leaves no error to level: the limit is the Padé quintic.
        return 15 / 8 / upper, -10 / 8 / upper**3, 3 / 8 / upper**5
    q, r = (3 * lower + upper) / 4, (lower + 3 * upper) / 4
    previous = math.inf
    while True:
        a, b, c, error = _level_error((lower, q, r, upper))
        if abs(previous - error) <= 1e-15:
            return a, b, c
        previous = error
        root = math.sqrt(9 * b * b - 20 * a * c)
        q, r = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))


def _level_error(points: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    """Solve a·x + b·x³ + c·x⁵ ± e = 1 at four points with alternating sign, by Gauss with pivoting."""
    rows = [[x, x**3, x**5, (-1.0) ** k, 1.0] for k, x in enumerate(points)]
    for k in range(4):
        pivot = max(range(k, 4), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(k + 1, 4):
            factor = rows[i][k] / rows[k][k]
            rows[i] = [value - factor * above for value, above in zip(rows[i], rows[k], strict=True)]
    solution = [0.0] * 4
    for k in reversed(range(4)):
        known = sum(rows[k][j] * solution[j] for j in range(k + 1, 4))
        solution[k] = (rows[k][4] - known) / rows[k][k]
    return solution[0], solution[1], solution[2], solution[3]
