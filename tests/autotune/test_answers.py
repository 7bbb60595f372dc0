from __future__ import annotations

import math
from dataclasses import replace

import pytest
from simulated import HEURISTIC, PLAIN, blocked, trial

from dmuon.autotune import ns_problem
from dmuon.autotune.answers import Answers, best_trial, choice_of, distance


def run(created_at: float, *entries, samples: int = 9):
    return [trial(choice, ms, created_at=created_at, samples=samples) for choice, ms in entries]


def test_the_fastest_of_a_run_is_best():
    trials = run(1.0, (PLAIN, 10.0), (blocked(128), 4.0), (HEURISTIC, 5.0))
    assert best_trial(trials) == trials[1]
    assert best_trial([]) is None


def test_milliseconds_of_different_runs_are_not_compared():
    """The first run was on a quiet machine, the second on one three times slower."""
    quiet = run(1.0, (PLAIN, 10.0), (HEURISTIC, 8.0))
    loaded = run(2.0, (PLAIN, 30.0), (blocked(128), 12.0), samples=13)
    assert best_trial(quiet + loaded) == loaded[1]
    assert best_trial(loaded + quiet) == loaded[1]


def test_a_run_that_was_cut_short_does_not_replace_a_thorough_one():
    thorough = run(1.0, (PLAIN, 10.0), (HEURISTIC, 8.0))
    short = run(2.0, (PLAIN, 5.0), (blocked(128), 1.0), samples=2)
    shorter = run(3.0, (PLAIN, 5.0), samples=1)
    assert best_trial(thorough + short) == thorough[1]
    assert best_trial(short + shorter) == short[1]


def test_who_was_dropped_early_does_not_win_by_having_been_timed_before_the_machine_slowed_down():
    dropped = trial(blocked(128), 9.0, created_at=1.0, samples=1)
    finalists = run(1.0, (PLAIN, 20.0), (HEURISTIC, 10.0))
    assert best_trial([dropped, *finalists]) == finalists[1]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda config: {**config, "method": "magic"},
        lambda config: {**config, "method": ["gram"]},
        lambda config: {**config, "restarts": [9]},
        lambda config: {**config, "restarts": [5]},
        lambda config: {**config, "restarts": [0]},
        lambda config: {**config, "loop": "yes"},
        lambda config: {**config, "gram": {"backend": "blocked", "block": -1, "split": "panel"}},
        lambda config: {**config, "gram": {"backend": "blocked", "block": 128, "split": "panel", "x": 1}},
        lambda config: {**config, "gram": {"backend": "torch"}, "symmetric_product": {"backend": "torch"}},
        lambda config: {**config, "apply": {"backend": "blocked", "block": 128, "split": "panel"}},
        lambda config: {**config, "extra": 1},
        lambda config: {},
    ],
)
def test_a_configuration_that_makes_no_sense_is_not_used(spoil):
    """Entries may come from a file somebody sent."""
    made = trial(blocked(128), 1.0)
    assert choice_of(made) is not None
    assert choice_of(replace(made, config=spoil(made.config))) is None


@pytest.mark.parametrize(
    "changes",
    [{"op": "gram"}, {"op": "nonsense"}, {"dtype": "fp8"}, {"coefficients": ""}, {"coefficients": "x"}],
)
def test_a_problem_that_makes_no_sense_is_not_used(changes):
    assert choice_of(trial(PLAIN, 1.0, **changes)) is None


def test_rejected_and_failed_trials_are_not_used():
    assert choice_of(trial(PLAIN, None)) is None


def test_a_backend_that_cannot_run_here_is_not_used(monkeypatch):
    from dmuon.kernels.backends import BACKENDS

    made = trial(blocked(128), 1.0)
    monkeypatch.setattr(type(BACKENDS["blocked"]), "unavailable", lambda self, device: "broken")
    assert choice_of(made) is None
    assert choice_of(trial(PLAIN, 1.0)) is not None


def test_distance():
    here = ns_problem(512, 2048, 4)
    assert distance(here, here) == 0
    assert distance(here, ns_problem(1024, 2048, 4)) == pytest.approx(1)
    assert distance(here, ns_problem(1024, 4096, 8)) == pytest.approx(math.sqrt(3))
    assert distance(here, ns_problem(512, 2048, 9)) == math.inf
    assert distance(here, ns_problem(512, 4100, 4)) == math.inf
    assert distance(ns_problem(512, 768), ns_problem(512, 767)) == math.inf
    assert distance(ns_problem(512, 512), ns_problem(512, 767)) < 1


def test_the_nearest_shape_answers():
    near = trial(blocked(128), 1.0, ns_problem(320, 1024))
    far = trial(HEURISTIC, 1.0, ns_problem(600, 1024))
    answers = Answers([far, near])
    assert answers.exact(ns_problem(330, 1000)) is None
    assert answers.nearest(ns_problem(330, 1000)) == near
    assert answers.nearest(ns_problem(330, 1000, precision="bf16")) is None
    assert answers.nearest(ns_problem(330, 1000, coefficients="you")) is None
    assert answers.nearest(ns_problem(3300, 10000)) is None


def test_a_choice_that_the_new_shape_cannot_use_is_passed_over():
    """The nearest trial used blocks of 256, which make no sense at m = 400."""
    near = trial(blocked(256), 1.0, ns_problem(600, 2048))
    next_best = trial(blocked(128), 1.0, ns_problem(700, 2048))
    assert Answers([near, next_best]).nearest(ns_problem(400, 2048)) == next_best
    assert Answers([near]).nearest(ns_problem(400, 2048)) is None


def test_invalid_trials_answer_nothing():
    stale = trial(blocked(128), 1.0, ns_problem(320, 1024), versions={"torch": "1.0"})
    answers = Answers([stale])
    assert answers.exact(ns_problem(320, 1024)) is None
    assert answers.nearest(ns_problem(320, 1024)) is None
