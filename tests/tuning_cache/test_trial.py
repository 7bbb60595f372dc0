from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_trials import sample_trial

from dmuon.tuning_cache import Trial

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    config=st.dictionaries(st.text(), json_values, max_size=4),
    message=st.text(st.characters(exclude_categories=["Cs"])),
    created_at=st.floats(0, 1e12),
    median_ms=st.floats(1e-9, 1e9),
)
def test_json_round_trip_is_exact(config, message, created_at, median_ms):
    trial = sample_trial(config=config, message=message, created_at=created_at, median_ms=median_ms)
    line = trial.to_json()
    assert "\n" not in line and line.isascii()
    assert Trial.from_json(line) == trial
    assert Trial.from_json(line).uid == trial.uid


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("op", ""),
        ("op", None),
        ("batch", 0),
        ("batch", True),
        ("m", 1.5),
        ("n", 2**63),
        ("dtype", 32),
        ("device", ""),
        ("coefficients", None),
        ("config", [1]),
        ("config", {"f": math.nan}),
        ("config", {"f": object()}),
        ("config", {1: 2}),
        ("status", "fine"),
        ("error", math.inf),
        ("error", -1.0),
        ("tolerance", "1"),
        ("median_ms", 0.0),
        ("median_ms", math.nan),
        ("spread", True),
        ("samples", 0),
        ("message", "\ud800"),
        ("versions", {"torch": 2}),
        ("source_hash", None),
        ("created_at", None),
    ],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        sample_trial(**{field: value})


def test_ok_means_checked_and_within_tolerance():
    for changes in ({"error": 2e-5}, {"error": None}, {"tolerance": None}):
        with pytest.raises(ValueError, match="error of an ok trial"):
            sample_trial(**changes)
    assert sample_trial(status="rejected", error=2e-5).error == 2e-5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ("[" * 100_000, "JSON"),
        ('{"op": "gram_ns"}', "missing backend"),
        (sample_trial().to_json()[:-1] + ', "color": "red"}', "unknown field color"),
        (sample_trial().to_json().replace("12.5", "NaN"), "NaN"),
        (sample_trial().to_json().replace("12.5", "1e999"), "median_ms"),
    ],
)
def test_bad_json_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        Trial.from_json(text)


def test_config_is_a_private_plain_copy():
    config = {"tile": (128, 64)}
    trial = sample_trial(config=config)
    config["tile"] = (1, 1)
    assert trial.config == {"tile": [128, 64]}


def test_identity_is_problem_configuration_source_and_time():
    same = sample_trial(median_ms=99, message="noted", versions={}, samples=1)
    assert same.uid == sample_trial().uid
    for changes in (
        {"m": 64},
        {"config": {}},
        {"source_hash": "x"},
        {"created_at": 5.0},
        {"device": "cuda:H"},
    ):
        assert sample_trial(**changes).uid != sample_trial().uid
    assert sample_trial(created_at=5).uid == sample_trial(created_at=5.0).uid
    assert json.loads(sample_trial(created_at=5).to_json())["created_at"] == 5.0
