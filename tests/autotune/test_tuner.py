from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from simulated import HEURISTIC, PLAIN, Clock, SimulatedBench, blocked, trial

from dmuon.autotune import Progress, Tuner, ns_problem, tune
from dmuon.autotune.costs import operations
from dmuon.autotune.describe import choice_text
from dmuon.autotune.tuner import claim_key, seconds_text
from dmuon.kernels.choose import NSChoice, Problem
from dmuon.kernels.coefficients import resolve_coefficients
from dmuon.tuning_cache import Store

CHOICES = [HEURISTIC, *(blocked(block) for block in (64, 128, 256))]
RATE = 1e6
"""Simulated operations per millisecond of the plain choice."""


class Simulation:
    """A tuner on a clock: the plain choice takes operations / RATE, the others a share of that."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, **options) -> None:
        self.clock = Clock()
        self.events: list[Progress] = []
        self.before_run: Callable[[str, str], None] = lambda kind, choice: None
        self.runs: list[Problem] = []
        self.longest_s = 0.0
        monkeypatch.setattr("dmuon.autotune.tuner.ns_candidates", lambda *_: CHOICES)
        self.tuner = Tuner(
            store,
            progress=self.events.append,
            bench=self._bench,
            rate=lambda problem: RATE,
            now=self.clock,
            sleep=self.clock.sleep,
            **options,
        )

    def tune(self, problems: Sequence[Problem], budget_s: float):
        return self.tuner.tune(problems, budget_s)

    def _bench(self, problem: Problem, coefficients: object) -> SimulatedBench:
        self.runs.append(problem)
        plain = operations(problem, PLAIN) / RATE
        self.longest_s = max(self.longest_s, plain / 1e3)
        ms = {choice_text(choice): plain * (0.9 - 0.1 * k) for k, choice in enumerate(CHOICES)}
        ms[choice_text(PLAIN)] = plain
        return SimulatedBench(
            self.clock, ms, batch=problem.batch, before_run=lambda kind, choice: self.before_run(kind, choice)
        )


@pytest.fixture
def simulation(store: Store, monkeypatch) -> Simulation:
    return Simulation(store, monkeypatch)


def statuses(report) -> list[str]:
    return [outcome.status for outcome in report.outcomes]


def test_tunes_and_then_answers_from_the_store(simulation: Simulation, store: Store):
    problems = [ns_problem(64, 256), ns_problem(32, 32)]
    report = simulation.tune(problems, 60)
    assert statuses(report) == ["tuned", "tuned"]
    assert [outcome.problem for outcome in report.outcomes] == problems
    assert report.outcomes[0].choice == CHOICES[-1]
    assert report.outcomes[0].speedup == pytest.approx(1 / 0.6)
    assert len(store.trials()) == 10

    runs = len(simulation.runs)
    again = simulation.tune(problems, 60)
    assert statuses(again) == ["stored", "stored"]
    assert again.all_stored
    assert again.outcomes[0].choice == CHOICES[-1]
    assert again.outcomes[0].speedup == pytest.approx(1 / 0.6)
    assert len(simulation.runs) == runs


def test_force_tunes_again(store: Store, monkeypatch):
    problem = ns_problem(64, 256)
    Simulation(store, monkeypatch).tune([problem], 60)
    assert statuses(Simulation(store, monkeypatch, force=True).tune([problem], 60)) == ["tuned"]
    assert len(store.trials()) == 10


@pytest.mark.case(row="T2")
def test_stale_trials_do_not_answer(simulation: Simulation, store: Store):
    problem = ns_problem(64, 256)
    store.record([trial(PLAIN, 1.0, problem, versions={"torch": "1.0"})])
    assert statuses(simulation.tune([problem], 60)) == ["tuned"]


@pytest.mark.parametrize("budget", [0.05, 0.5, 2.0, 7.0, 30.0])
def test_the_budget_holds_but_for_one_run(budget, simulation: Simulation):
    problems = [ns_problem(side, 4 * side, batch) for side in (64, 128, 256) for batch in (1, 6)]
    simulation.tune(problems, budget)
    assert simulation.clock.seconds <= budget + simulation.longest_s


def test_what_is_out_of_reach_is_said_and_does_not_eat_the_budget(simulation: Simulation):
    small, huge = ns_problem(64, 256), ns_problem(4096, 11008)
    report = simulation.tune([huge, small], 20)
    assert statuses(report) == ["not reached", "tuned"]
    assert "needs about" in report.outcomes[0].reason
    assert simulation.runs == [small]
    assert len(report.outcomes[1].trials) == 5


def test_small_problems_come_first_and_what_they_leave_goes_to_the_large(simulation: Simulation):
    small, large = ns_problem(64, 256), ns_problem(512, 2048)
    needed = 4 * operations(large, PLAIN) / RATE / 1e3
    report = simulation.tune([large, small], 1.2 * needed)
    assert simulation.runs == [small, large]
    assert statuses(report) == ["tuned", "tuned"]


def test_duplicates_are_tuned_once(simulation: Simulation):
    report = simulation.tune([ns_problem(64, 256), ns_problem(256, 64)], 60)
    assert len(report.outcomes) == 1


def test_progress_says_what_runs_and_what_is_best(simulation: Simulation):
    problems = [ns_problem(64, 256), ns_problem(32, 32)]
    simulation.tune(problems, 60)
    stages = [event.stage for event in simulation.events]
    assert {"inputs", "checking", "timing", "done"} <= set(stages)
    fractions = [event.fraction for event in simulation.events]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    last = [event for event in simulation.events if event.stage == "timing"][-1]
    assert last.choice in [PLAIN, *CHOICES]
    assert last.best == CHOICES[-1]
    assert last.best_ms == pytest.approx(0.6 * operations(last.problem, PLAIN) / RATE)
    done = [event.outcome for event in simulation.events if event.outcome]
    assert [outcome.problem for outcome in done] == problems[::-1]


def test_ctrl_c_while_timing_keeps_what_is_known(simulation: Simulation, store: Store):
    small, large = ns_problem(32, 32), ns_problem(64, 256)

    def interrupt(kind: str, choice: str) -> None:
        timed = [event for event in simulation.events if event.problem == large and event.stage == "timing"]
        if len(timed) == 8:
            raise KeyboardInterrupt

    simulation.before_run = interrupt
    with pytest.raises(KeyboardInterrupt):
        simulation.tune([small, large], 60)
    assert statuses(simulation.tuner.report) == ["tuned", "tuned"]
    assert {t.m for t in store.trials(status="ok")} == {32, 64}
    assert not store.claimed(claim_key(large))


def test_ctrl_c_while_checking_keeps_finished_problems_alone(simulation: Simulation, store: Store):
    small, large = ns_problem(32, 32), ns_problem(64, 256)

    def interrupt(kind: str, choice: str) -> None:
        if simulation.events[-1].problem == large and kind == "check" and choice == choice_text(CHOICES[-1]):
            raise KeyboardInterrupt

    simulation.before_run = interrupt
    with pytest.raises(KeyboardInterrupt):
        simulation.tune([small, large], 60)
    assert statuses(simulation.tuner.report) == ["tuned"]
    assert {t.m for t in store.trials()} == {32}
    assert not store.claimed(claim_key(large))


def test_a_problem_that_another_process_tunes_is_left_to_it(simulation: Simulation, store: Store):
    mine, theirs = ns_problem(64, 256), ns_problem(32, 32)
    claim = store.claim(claim_key(theirs), 60)
    assert claim is not None

    def deliver(seconds: float) -> None:
        simulation.clock.sleep(seconds)
        if simulation.clock.seconds > 5:
            store.record([trial(PLAIN, 1.0, theirs)])

    simulation.tuner._sleep = deliver
    report = simulation.tune([theirs, mine], 60)
    assert statuses(report) == ["stored", "tuned"]
    assert simulation.runs == [mine]
    assert simulation.clock.seconds < 10


def test_waiting_ends_with_the_budget(simulation: Simulation, store: Store):
    problem = ns_problem(32, 32)
    claim = store.claim(claim_key(problem), 60)
    assert claim is not None
    report = simulation.tune([problem], 10)
    assert statuses(report) == ["not reached"]
    assert "another process" in report.outcomes[0].reason
    assert 10 <= simulation.clock.seconds < 11


def test_a_claim_given_up_without_a_result_is_taken_over(simulation: Simulation, store: Store):
    problem = ns_problem(32, 32)
    claim = store.claim(claim_key(problem), 60)
    assert claim is not None

    def give_up(seconds: float) -> None:
        simulation.clock.sleep(seconds)
        claim.release()

    simulation.tuner._sleep = give_up
    assert statuses(simulation.tune([problem], 10)) == ["tuned"]


def test_when_nothing_works_it_says_so(simulation: Simulation, store: Store):
    def fail(kind: str, choice: str) -> None:
        raise RuntimeError("no luck")

    simulation.before_run = fail
    [outcome] = simulation.tune([ns_problem(64, 256)], 10).outcomes
    assert outcome.status == "failed"
    assert "no luck" in outcome.reason
    assert outcome.choice is None and outcome.speedup is None
    assert {t.status for t in store.trials()} == {"failed"}


def test_inputs_that_do_not_fit(simulation: Simulation):
    def no_memory(problem: Problem, coefficients: object) -> SimulatedBench:
        raise RuntimeError("not enough memory: you tried to allocate 99 TB")

    simulation.tuner._bench = no_memory
    [outcome] = simulation.tune([ns_problem(64, 256)], 10).outcomes
    assert outcome.status == "failed"
    assert "99 TB" in outcome.reason


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_a_budget_must_be_positive(budget, store: Store):
    with pytest.raises(ValueError, match="budget_s"):
        tune([ns_problem(8, 8)], store=store, budget_s=budget)


def test_unknown_backends_are_refused(store: Store):
    with pytest.raises(ValueError, match=r"backends: .*'warp'.*torch"):
        tune([ns_problem(8, 8)], store=store, budget_s=1, backends=["warp"])
    assert not store.path.exists()


def test_a_callers_own_coefficients_must_be_passed(store: Store):
    own = resolve_coefficients([(1.5, -0.5, 0.0)] * 4)
    problem = ns_problem(8, 24, coefficients=own)
    with pytest.raises(ValueError, match=r"coefficients: .*custom:4"):
        tune([problem], store=store, budget_s=1)
    report = tune([problem], store=store, budget_s=1, coefficients=own)
    assert statuses(report) == ["tuned"]


def test_the_choice_is_one_of_the_candidates_and_runs(store: Store):
    """End to end, nothing simulated."""
    import torch

    from dmuon.kernels.reference import polynomial_polar, relative_error
    from dmuon.kernels.run import run_ns

    problem = ns_problem(32, 96, 4)
    [outcome] = tune([problem], store=store, budget_s=5).outcomes
    assert outcome.status == "tuned"
    assert isinstance(outcome.choice, NSChoice)
    assert outcome.speedup is not None and outcome.speedup >= 0.5
    G = torch.randn(4, 32, 96, generator=torch.Generator().manual_seed(0))
    sets = resolve_coefficients("polar_express")
    result = run_ns(G, outcome.choice, sets, torch.float32)
    assert relative_error(result, polynomial_polar(G, sets)).max() < 1e-3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (9.94, "9.9s"), (59.7, "1m"), (75, "1m15s"), (3600, "1h"), (3725, "1h2m5s")],
)
def test_seconds_text(seconds, text):
    assert seconds_text(seconds) == text


def test_a_backend_with_nothing_for_the_shape(store: Store):
    """No part of 8 rows is worth computing alone: there is nothing for blocked to try."""
    [outcome] = tune([ns_problem(8, 24)], store=store, budget_s=1, backends=["blocked"]).outcomes
    assert outcome.status == "failed"
    assert "blocked" in outcome.reason
    assert not store.trials()
