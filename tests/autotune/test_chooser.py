from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from simulated import HEURISTIC, PLAIN, blocked, trial

from dmuon.autotune import TunedChooser, chooser, install, ns_problem
from dmuon.kernels.choose import Problem, current_chooser, set_chooser
from dmuon.tuning_cache import Store


@pytest.fixture
def problem() -> Problem:
    return ns_problem(320, 1024, 2)


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch):
    monkeypatch.setattr(chooser, "shipped_trials", lambda device: [])
    monkeypatch.delenv("DMUON_AUTOTUNE", raising=False)


def test_the_stores_best_is_chosen(store: Store, problem):
    store.record(
        [trial(PLAIN, 9.0, problem), trial(blocked(128), 3.0, problem), trial(HEURISTIC, 5.0, problem)]
    )
    assert TunedChooser(store).choose(problem) == blocked(128)


def test_an_empty_store_answers_none_and_is_not_created(store: Store, problem):
    assert TunedChooser(store).choose(problem) is None
    assert not store.path.exists()


def test_the_order_of_look_up(store: Store, monkeypatch, problem):
    shipped = trial(blocked(256), 1.0, problem)
    near = trial(blocked(128), 1.0, ns_problem(330, 1024, 2))
    store.record([near])
    assert TunedChooser(store).choose(problem) == blocked(128)
    monkeypatch.setattr(chooser, "shipped_trials", lambda device: [shipped])
    assert TunedChooser(store).choose(problem) == blocked(256)
    store.record([trial(HEURISTIC, 9.0, problem)])
    assert TunedChooser(store).choose(problem) == HEURISTIC


@pytest.mark.case(row="T2")
def test_stale_and_wrong_entries_are_ignored(store: Store, problem):
    good, bad = blocked(128), blocked(256)
    store.record(
        [
            trial(bad, 1.0, problem, versions={"torch": "1.0"}),
            trial(bad, 1.0, problem, source_hash="else"),
            trial(bad, None, problem, created_at=1.0),
            trial(bad, 1.0, problem, config={"method": "gram"}),
            trial(bad, 1.0, problem, device="cpu:another:2"),
            trial(good, 5.0, problem),
        ]
    )
    assert TunedChooser(store).choose(problem) == good


def test_a_problem_is_looked_up_once_until_refresh(store: Store, monkeypatch, problem):
    tuned = TunedChooser(store)
    assert tuned.choose(problem) is None
    store.record([trial(blocked(128), 3.0, problem)])
    assert tuned.choose(problem) is None
    tuned.refresh()
    assert tuned.choose(problem) == blocked(128)
    monkeypatch.setattr(Store, "trials", lambda self, **filters: pytest.fail("asked the store again"))
    assert tuned.choose(problem) == blocked(128)
    assert tuned.choose(ns_problem(330, 1024, 2)) == blocked(128)


def test_off_answers_none(store: Store, monkeypatch, problem):
    store.record([trial(blocked(128), 3.0, problem)])
    assert TunedChooser(store, mode="off").choose(problem) is None
    monkeypatch.setenv("DMUON_AUTOTUNE", "off")
    assert TunedChooser(store).choose(problem) is None
    assert TunedChooser(store, mode="cache").choose(problem) == blocked(128)


def test_an_unknown_mode_is_refused(store: Store, monkeypatch):
    with pytest.raises(ValueError, match=r"mode must be one of cache, jit, off, got 'always'"):
        TunedChooser(store, mode="always")
    monkeypatch.setenv("DMUON_AUTOTUNE", "jti")
    with pytest.raises(ValueError, match=r"DMUON_AUTOTUNE must be one of .*'jti'"):
        install(store)


def test_a_broken_store_gives_heuristics_and_one_warning(tmp_path: Path, problem):
    path = tmp_path / "tuning.db"
    path.write_bytes(b"not a store at all, but somebody's thesis" * 100)
    tuned = TunedChooser(Store(path))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert tuned.choose(problem) is None
        assert tuned.choose(ns_problem(8, 8)) is None
        assert tuned.choose(ns_problem(8, 8, precision="bf16")) is None
    assert len(seen) == 1


def test_a_corrupt_store_gives_heuristics_and_one_warning(store: Store, problem):
    store.record([trial(blocked(128), 3.0, problem)])
    data = bytearray(store.path.read_bytes())
    data[100:] = b"\xa5" * (len(data) - 100)
    store.path.write_bytes(data)
    tuned = TunedChooser(Store(store.path))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert tuned.choose(problem) is None
        assert tuned.choose(ns_problem(8, 8)) is None
    assert len(seen) == 1


def test_trouble_of_any_kind_never_leaves_choose(store: Store, monkeypatch, problem):
    monkeypatch.setattr(Store, "trials", lambda self, **filters: 1 / 0)
    tuned = TunedChooser(store)
    with pytest.warns(UserWarning, match="tuned choices are not used") as seen:
        assert tuned.choose(problem) is None
        assert tuned.choose(ns_problem(8, 8)) is None
    assert len(seen) == 1


def test_threads_may_ask_at_once(store: Store, monkeypatch, problem):
    store.record([trial(blocked(128), 3.0, problem)])
    asked = []
    trials = Store.trials
    monkeypatch.setattr(Store, "trials", lambda self, **filters: asked.append(1) or trials(self, **filters))
    tuned, gate = TunedChooser(store), threading.Barrier(8)

    def ask() -> object:
        gate.wait()
        return tuned.choose(problem)

    with ThreadPoolExecutor(8) as pool:
        answers = [job.result() for job in [pool.submit(ask) for _ in range(8)]]
    assert answers == [blocked(128)] * 8
    assert len(asked) == 1


def test_other_operations_are_left_to_the_heuristics(store: Store, problem):
    product = Problem("gram", 1, 8, 16, "fp32", problem.device)
    assert TunedChooser(store, mode="jit").choose(product) is None
    assert not store.path.exists()


def test_jit_tunes_an_unknown_problem_once_and_says_so(store: Store, monkeypatch, caplog):
    monkeypatch.setattr(chooser, "JIT_BUDGET_S", 2.0)
    problem = ns_problem(16, 48, 2)
    tuned = TunedChooser(store, mode="jit")
    with caplog.at_level("INFO", logger="dmuon.autotune"):
        chosen = tuned.choose(problem)
        assert tuned.choose(problem) == chosen
    assert chosen is not None
    assert [record.name for record in caplog.records] == ["dmuon.autotune"]
    assert "2 × (16×48) fp32" in caplog.text
    assert store.trials(m=16, status="ok")
    assert TunedChooser(store).choose(problem) == chosen


def test_jit_by_environment(store: Store, monkeypatch):
    monkeypatch.setenv("DMUON_AUTOTUNE", "jit")
    assert TunedChooser(store).mode == "jit"


def test_jit_does_not_tune_what_is_known(store: Store, monkeypatch, problem):
    store.record([trial(blocked(128), 3.0, problem)])
    monkeypatch.setattr(chooser, "Tuner", lambda *_: pytest.fail("tuned"))
    assert TunedChooser(store, mode="jit").choose(problem) == blocked(128)


def test_install(store: Store):
    before = set_chooser(None)
    try:
        assert current_chooser() is None
        tuned = install(store)
        assert current_chooser() is tuned
    finally:
        set_chooser(before)


def test_gram_ns_runs_what_was_chosen(store: Store, monkeypatch, problem):
    """The whole way: what the tuner stored is what a call of gram_ns does."""
    from dmuon.kernels import gram_ns, run

    G = torch.randn(2, 320, 1024, generator=torch.Generator().manual_seed(0))
    store.record([trial(blocked(128, "standard"), 1.0, problem)])
    built = []
    build = run._build
    monkeypatch.setattr(run, "_build", lambda op, choice: built.append(choice) or build(op, choice))
    before = set_chooser(TunedChooser(store))
    try:
        gram_ns(G)
    finally:
        set_chooser(before)
    assert blocked(128).gram in built
