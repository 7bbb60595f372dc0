"""The learning-rate rules against their formulae and against what they promise of an update."""

from __future__ import annotations

import pytest
import torch

from dmuon.lr_adjust import CUSTOM, RULES, check_rule


@pytest.mark.parametrize(
    ("name", "tall", "wide", "square"),
    [("original", 2.0, 1.0, 1.0), ("match_rms_adamw", 1.6, 1.6, 0.8), ("spectral", 2.0, 0.5, 1.0)],
)
def test_each_rule_is_its_formula(name: str, tall: float, wide: float, square: float) -> None:
    rule = RULES[name]
    assert rule(64, 16) == pytest.approx(tall, rel=1e-15)
    assert rule(16, 64) == pytest.approx(wide, rel=1e-15)
    assert rule(16, 16) == pytest.approx(square, rel=1e-15)


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (48, 48)])
def test_match_rms_adamw_gives_entries_of_root_mean_square_02(shape: tuple[int, int]) -> None:
    rows, cols = shape
    tall = torch.linalg.qr(torch.randn(max(shape), min(shape), dtype=torch.float64)).Q
    orthogonal = tall if rows >= cols else tall.T
    update = RULES["match_rms_adamw"](rows, cols) * orthogonal
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-12)


@pytest.mark.parametrize("shape", [(64, 16), (16, 64)])
def test_spectral_changes_features_alike_at_any_width(shape: tuple[int, int]) -> None:
    rows, cols = shape
    update = RULES["spectral"](rows, cols) * torch.eye(rows, cols, dtype=torch.float64)
    # The norm of the map between vectors measured by their root mean square.
    assert torch.linalg.matrix_norm(update, 2).item() * (cols / rows) ** 0.5 == pytest.approx(1.0, rel=1e-12)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"adjust_lr must be one of original, .* got 'rms_norm'"):
        check_rule("rms_norm")
    with pytest.raises(ValueError, match="'custom'"):
        check_rule(CUSTOM)
    check_rule(CUSTOM, {**RULES, CUSTOM: lambda rows, cols: 1.0})
