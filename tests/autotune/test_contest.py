from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import HEURISTIC, PLAIN, Clock, SimulatedBench, blocked

from dmuon.autotune import ns_problem
from dmuon.autotune.answers import best_trial
from dmuon.autotune.contest import Contest
from dmuon.autotune.describe import choice_text

FAST, SLOW = blocked(128), blocked(256)
P, H, F, S = map(choice_text, (PLAIN, HEURISTIC, FAST, SLOW))
TIMES = {P: 10.0, H: 8.0, F: 5.0, S: 9.0}


def contest(bench: SimulatedBench, candidates=(HEURISTIC, FAST, SLOW), seconds=60.0, **problem) -> Contest:
    bench.batch = problem.get("batch", 1)
    return Contest(
        ns_problem(64, 128, **problem),
        bench,
        PLAIN,
        candidates,
        tolerance=1e-4,
        now=bench.clock,
        deadline=bench.clock.seconds + seconds,
        watch=lambda stage, choice: None,
    )


def statuses(found: Contest) -> dict[str, list[str]]:
    trials = found.trials(created_at=1.0)
    return {
        status: sorted(trial.backend for trial in trials if trial.status == status)
        for status in {trial.status for trial in trials}
    }


def test_the_fastest_correct_candidate_wins_and_the_plain_one_is_timed_with_it():
    found = contest(SimulatedBench(Clock(), TIMES))
    found.run()
    assert found.best is not None and found.best.choice == FAST
    trials = {str(trial.config): trial for trial in found.trials(created_at=123.0)}
    assert len(trials) == 4
    fast, plain = trials[str(FAST.to_config())], trials[str(PLAIN.to_config())]
    assert (fast.median_ms, plain.median_ms) == (5.0, 10.0)
    assert fast.samples == plain.samples >= 9
    assert fast.created_at == 123.0
    assert best_trial(trials.values()) == fast


@pytest.mark.case(row="T4")
@pytest.mark.parametrize("error", [0.02, math.nan, math.inf])
def test_wrong_numbers_are_rejected_however_fast(error):
    bench = SimulatedBench(Clock(), {**TIMES, F: 0.001}, {F: [{"gaussian": 1e-6, "decaying": error}]})
    bench.errors[P] = bench.errors[H] = [{"gaussian": 1e-6, "decaying": 1e-5}]
    found = contest(bench, (HEURISTIC, FAST))
    found.run()
    assert found.best is not None and found.best.choice == HEURISTIC
    [rejected] = [trial for trial in found.trials(1.0) if trial.status == "rejected"]
    assert rejected.config == FAST.to_config()
    assert rejected.error == (error if math.isfinite(error) else None)
    assert rejected.tolerance == 1e-4
    assert rejected.median_ms is None
    assert "decaying" in rejected.message


def test_every_part_of_the_check_counts():
    """A batch of one needs three runs for the three spectra: wrong in the second alone is wrong."""
    parts = [{"gaussian": 1e-6}, {"decaying": 1e-6}, {"rank-deficient": 1e-6}]
    bench = SimulatedBench(Clock(), TIMES, dict.fromkeys(TIMES, parts), checks=3)
    bench.errors[F] = [parts[0], {"decaying": 0.5}, parts[2]]
    found = contest(bench)
    found.run()
    assert statuses(found) == {"ok": ["blocked+torch", "torch", "torch"], "rejected": ["blocked+torch"]}


def test_the_yardstick_is_the_plain_form_on_the_same_spectrum():
    """What the precision cannot do at all is no fault; the same error where it can is one."""
    hard = [{"gaussian": 1e-6, "decaying": 0.05}]
    bench = SimulatedBench(Clock(), TIMES, {P: hard, H: hard})
    bench.errors[F] = [{"gaussian": 1e-6, "decaying": 0.1}]
    bench.errors[S] = [{"gaussian": 0.05, "decaying": 1e-6}]
    found = contest(bench)
    found.run()
    trials = {trial.config["gram"].get("block"): trial for trial in found.trials(1.0)}
    assert trials[128].status == "ok" and trials[128].tolerance == pytest.approx(0.1, rel=1e-4)
    assert trials[256].status == "rejected" and trials[256].tolerance == 1e-4


def test_in_fp64_the_yardstick_makes_no_allowance():
    bench = SimulatedBench(Clock(), TIMES, {c: [{"gaussian": 1e-13}] for c in TIMES})
    bench.errors[F] = [{"gaussian": 5e-7}]
    found = Contest(
        ns_problem(64, 128, precision="fp64"),
        bench,
        PLAIN,
        (HEURISTIC, FAST),
        tolerance=1e-10,
        now=bench.clock,
        deadline=60.0,
        watch=lambda stage, choice: None,
    )
    found.run()
    assert "rejected" in statuses(found)


@pytest.mark.case(row="T3")
def test_who_raises_has_failed_with_its_message_and_the_next_is_used():
    bench = SimulatedBench(Clock(), TIMES, {F: RuntimeError("no kernel image")})
    found = contest(bench)
    found.run()
    [failed] = [trial for trial in found.trials(1.0) if trial.status == "failed"]
    assert failed.message == "RuntimeError: no kernel image"
    assert failed.error is None
    assert found.best is not None and found.best.choice == HEURISTIC


def test_raising_late_fails_too():
    def fail_when_timed(kind: str, choice: str) -> None:
        if kind == "time" and choice == F:
            raise RuntimeError("out of memory")

    bench = SimulatedBench(Clock(), TIMES, before_run=fail_when_timed)
    found = contest(bench)
    found.run()
    assert statuses(found)["failed"] == ["blocked+torch"]


def test_nothing_is_kept_while_the_heuristic_choice_is_unknown():
    """Else the best of what is stored could be slower than no tuning at all."""
    parts = [{"gaussian": 1e-6}] * 3
    bench = SimulatedBench(Clock(), {**TIMES, P: 300.0, H: 300.0}, dict.fromkeys(TIMES, parts), checks=3)
    found = contest(bench, seconds=1.0)
    found.run()
    assert found.plain.samples
    assert found.trials(1.0) == []


def test_what_was_timed_before_the_time_ran_out_is_kept():
    bench = SimulatedBench(Clock(), {P: 100.0, H: 90.0, F: 80.0, S: 95.0})
    found = contest(bench, seconds=0.5)
    found.run()
    trials = found.trials(1.0)
    assert PLAIN.to_config() in [trial.config for trial in trials]
    assert HEURISTIC.to_config() in [trial.config for trial in trials]
    assert len(trials) < 4
    assert all(trial.samples >= 1 for trial in trials)


@given(
    times=st.lists(st.floats(0.5, 900), min_size=4, max_size=4),
    seconds=st.floats(0.001, 8),
    batch=st.sampled_from([1, 2, 14]),
)
@settings(max_examples=150, deadline=None)
def test_at_most_one_run_goes_over_the_deadline(times, seconds, batch):
    ms = dict(zip((P, H, F, S), times, strict=True))
    bench = SimulatedBench(Clock(), ms, checks=3 if batch == 1 else 1)
    found = contest(bench, seconds=seconds, batch=batch)
    found.run()
    assert bench.clock.seconds <= seconds + max(times) / 1e3 + 1e-9


def test_with_little_time_a_part_of_the_batch_decides_who_is_tried_on_all_of_it():
    many = [blocked(8 * k) for k in range(1, 17)]
    winner = many[10]
    ms = {choice_text(choice): 1400.0 + 10 * k for k, choice in enumerate(many)}
    ms |= {P: 2800.0, H: 2000.0, choice_text(winner): 1000.0}
    bench = SimulatedBench(Clock(), ms)
    found = contest(bench, (HEURISTIC, *many), seconds=40.0, batch=14)
    found.run()
    assert found.best is not None and found.best.choice == winner
    whole = Counter(choice for kind, choice in bench.log if kind != "part")
    assert len(whole) < len(ms)
    assert {P, H, choice_text(winner)} <= set(whole)


def test_with_enough_time_all_are_tried_on_the_whole_batch():
    bench = SimulatedBench(Clock(), TIMES)
    found = contest(bench, batch=14)
    found.run()
    assert {choice for kind, choice in bench.log if kind == "check"} == set(TIMES)


def test_a_first_run_is_no_sample():
    """It may compile: a candidate that takes 3 s once and 5 ms from then on is a 5 ms candidate."""
    runs: Counter[str] = Counter()
    bench = SimulatedBench(Clock(), dict(TIMES), checks=3)

    def compile_first(kind: str, choice: str) -> None:
        runs[choice] += 1
        bench.ms = {**TIMES, F: 3000.0 if choice == F and runs[choice] == 1 else 5.0}

    bench.before_run = compile_first
    found = contest(bench)
    found.run()
    assert found.best is not None and found.best.choice == FAST
    assert max(found.best.samples) == 5.0


def test_a_hopeless_candidate_is_not_checked_to_the_end():
    bench = SimulatedBench(Clock(), {**TIMES, S: 500.0}, checks=3)
    found = contest(bench)
    found.run()
    assert Counter(bench.log)["check", S] == 2
    assert len(found.trials(1.0)) == 3


def test_a_heuristic_choice_that_is_far_behind_is_not_waited_for():
    """Ten times slower than plain on part of the batch, it cannot be what to fall back to."""
    many = [blocked(8 * k) for k in range(1, 17)]
    ms = {choice_text(choice): 1400.0 for choice in many} | {P: 2800.0, H: 28_000.0}
    bench = SimulatedBench(Clock(), ms)
    found = contest(bench, (HEURISTIC, *many), seconds=40.0, batch=14)
    found.run()
    assert found.best is not None and found.best.choice in many
    assert ("check", H) not in bench.log
    assert HEURISTIC.to_config() not in [trial.config for trial in found.trials(1.0)]


def test_the_twin_of_a_screened_candidate_is_not_screened_again():
    """On one matrix, one by one is the same as together."""
    many = [replace(blocked(8 * k), loop=loop) for k in range(1, 17) for loop in (False, True)]
    ms = {choice_text(choice): 1400.0 for choice in many} | {P: 2800.0, H: 2000.0}
    bench = SimulatedBench(Clock(), ms)
    contest(bench, (HEURISTIC, *many), seconds=20.0, batch=14).run()
    assert len({name for kind, name in bench.log if kind == "part"}) == 18
