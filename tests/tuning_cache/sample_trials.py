"""Trials for tests, made also in child processes."""

from __future__ import annotations

from typing import Any

from dmuon.tuning_cache import Trial


def sample_trial(**changes: Any) -> Trial:
    values: dict[str, Any] = {
        "op": "gram_ns",
        "batch": 1,
        "m": 768,
        "n": 3072,
        "dtype": "fp32",
        "device": "cpu:Some CPU AVX512:2",
        "coefficients": "polar_express",
        "backend": "blocked",
        "config": {"method": "gram", "restarts": [2]},
        "status": "ok",
        "error": 2e-7,
        "tolerance": 1e-5,
        "median_ms": 12.5,
        "spread": 0.03,
        "samples": 9,
        "message": "",
        "versions": {"torch": "2.13.0"},
        "source_hash": "abc",
        "created_at": 1_700_000_000.0,
    }
    if changes.get("status", "ok") != "ok":
        values.update(error=None, median_ms=None, spread=None, samples=0, message="it broke")
    return Trial(**{**values, **changes})
