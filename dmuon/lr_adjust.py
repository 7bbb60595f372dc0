"""How the learning rate of an orthogonal update depends on the matrix's shape.

An orthogonalised (rows, cols) matrix has root mean square entry 1/√max(rows, cols) and spectral norm 1,
whatever the gradient was; each rule multiplies it by one number that depends on the shape alone. ``rows`` is
the fan-out and ``cols`` the fan-in of the matrix as it acts (y = Wx), however the parameter is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

AdjustRule = Callable[[int, int], float]
"""``rule(rows, cols)`` returns the factor on the learning rate."""


def original(rows: int, cols: int) -> float:
    """√max(1, rows/cols): Keller Jordan's (https://kellerjordan.github.io/posts/muon), torch's default."""
    return math.sqrt(max(1.0, rows / cols))


def match_rms_adamw(rows: int, cols: int) -> float:
    """0.2·√max(rows, cols): entries of root mean square 0.2, as AdamW's typically have (arXiv 2502.16982)."""
    return 0.2 * math.sqrt(max(rows, cols))


def spectral(rows: int, cols: int) -> float:
    """√(rows/cols): features change by as much at any width (spectral μP, arXiv 2310.17813)."""
    return math.sqrt(rows / cols)


RULES: dict[str, AdjustRule] = {
    "original": original,
    "match_rms_adamw": match_rms_adamw,
    "spectral": spectral,
}


CUSTOM = "custom"
"""What a parameter group calls the caller's own function, which no state dict could hold."""


def check_rule(name: str, rules: Mapping[str, AdjustRule] = RULES) -> None:
    """Raise a ValueError if ``rules`` has no such name."""
    if name == CUSTOM and CUSTOM not in rules:
        raise ValueError("adjust_lr is 'custom' but there is no function: give it to Muon(adjust_lr=...)")
    if name not in rules:
        raise ValueError(
            f"adjust_lr must be one of {', '.join(rules)}, or a function given to Muon(...), got {name!r}"
        )
