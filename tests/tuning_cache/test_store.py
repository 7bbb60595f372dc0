from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sample_trials import sample_trial

from dmuon.tuning_cache import Store, default_path, plans


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "tuning.db") as store:
        yield store


def test_what_is_recorded_is_read_back_by_another_store(store):
    trials = [sample_trial(m=m, created_at=float(m)) for m in (64, 128)]
    trials.append(sample_trial(status="rejected", error=0.3, created_at=200.0))
    store.record(iter(trials))
    assert Store(store.path).trials() == trials
    store.record(trials[:2])
    assert store.trials() == trials


def test_plans_are_kept_by_key_and_the_oldest_go(store, monkeypatch):
    monkeypatch.setattr(plans, "KEPT", 3)
    assert store.plan("none") is None
    assert not store.path.exists()
    for number in range(5):
        store.keep_plan(f"key {number}", f"plan {number}")
    store.keep_plan("key 3", "another")
    assert [Store(store.path).plan(f"key {number}") for number in range(5)] == [
        None, None, "plan 2", "another", "plan 4",
    ]  # fmt: skip


def test_filters(store):
    base = sample_trial()
    others = {
        "op": "gram",
        "device": "cuda:H200",
        "dtype": "bf16",
        "batch": 2,
        "m": 64,
        "n": 65,
        "coefficients": "you",
        "backend": "torch",
    }
    store.record([base, *(sample_trial(**{name: value}) for name, value in others.items())])
    store.record([sample_trial(status="failed", created_at=1.0)])
    for name, value in others.items():
        assert store.trials(**{name: value}) == [sample_trial(**{name: value})]
    assert [trial.status for trial in store.trials(status="failed")] == ["failed"]
    assert store.trials(m=768, n=65, device="cuda:H200") == []
    with pytest.raises(TypeError, match="colour"):
        store.trials(colour="red")


def test_reading_creates_nothing(tmp_path):
    store = Store(tmp_path / "deep" / "tuning.db")
    assert store.trials() == [] and not store.claimed("key") and store.prune(keep=lambda trial: False) == 0
    assert store.health().exists is False and store.health().writable and store.health().problem is None
    assert store.import_jsonl(os.devnull) == 0
    store.record([])
    assert list(tmp_path.iterdir()) == []
    store.record([sample_trial()])
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["tuning.db"]


def test_default_path(monkeypatch, tmp_path):
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path / "folder"))
    assert default_path() == tmp_path / "folder" / "tuning.db"
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path / "file.sqlite"))
    assert default_path() == tmp_path / "file.sqlite"
    (tmp_path / "folder.db").mkdir()
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path / "folder.db"))
    assert default_path() == tmp_path / "folder.db" / "tuning.db"
    monkeypatch.setenv("DMUON_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path().name == "tuning.db" and "dmuon" in default_path().parts
    assert Store().path == default_path()


def test_a_folder_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder"):
        Store(tmp_path)


def test_claims(store):
    claim = store.claim("a problem", ttl=60)
    assert claim is not None and claim.key == "a problem"
    other = Store(store.path)
    assert other.claim("a problem", ttl=60) is None and other.claimed("a problem")
    assert other.claim("another problem", ttl=60) is not None
    assert claim.refresh()
    claim.release()
    assert not other.claimed("a problem")
    with other.claim("a problem", ttl=60):
        claim.release()  # no longer its own: the other's stays
        assert store.claimed("a problem")
    assert not store.claimed("a problem")


def test_an_overdue_claim_is_taken_and_cannot_be_refreshed(store):
    claim = store.claim("key", ttl=0.05)
    assert claim.refresh()
    time.sleep(0.1)
    assert not store.claimed("key")
    second = store.claim("key", ttl=60)
    assert second is not None and not claim.refresh()
    claim.release()
    assert store.claimed("key")


@pytest.mark.parametrize("ttl", [0, -1.0, float("inf"), float("nan")])
def test_a_claim_needs_a_finite_ttl(store, ttl):
    with pytest.raises(ValueError, match="ttl"):
        store.claim("key", ttl)
    assert not store.path.exists()


def test_prune(store):
    now = time.time()
    store.record(sample_trial(m=m, created_at=now - 100 * m) for m in range(1, 6))
    assert store.prune(keep=lambda trial: trial.m != 2) == 1
    assert store.prune(older_than_s=350) == 2
    assert [trial.m for trial in store.trials()] == [3, 1]
    assert store.prune() == 0


def test_a_row_that_is_no_trial_is_skipped_with_one_warning_and_pruned(store):
    store.record([sample_trial(m=1), sample_trial(m=2)])
    with sqlite3.connect(store.path) as connection:
        connection.execute("update trials set config = '{broken' where m = 1")
    connection.close()
    with pytest.warns(UserWarning, match="skipping 1 row") as warned:
        assert [trial.m for trial in store.trials()] == [2]
        store.trials()
    assert len(warned) == 1
    assert store.prune() == 1
    assert Store(store.path).health().rows == 1


def test_health(store):
    store.record([sample_trial()])
    health = store.health()
    assert (health.exists, health.writable, health.schema_version, health.rows) == (True, True, 3, 1)
    assert (health.integrity, health.problem, health.in_memory) == ("ok", None, False)
    assert health.size_bytes == store.path.stat().st_size


def test_threads_share_one_store(store):
    failures = []

    def work(number):
        try:
            for i in range(20):
                store.record([sample_trial(batch=1 + number, created_at=float(i))])
                assert len(store.trials(batch=1 + number)) == i + 1
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(store.trials()) == 80


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_amid_another_threads_writes_can_use_the_store(store):
    stop = threading.Event()
    written = []

    def write():
        while not stop.is_set():
            store.record([sample_trial(m=1 + len(written))])
            written.append(1)

    thread = threading.Thread(target=write)
    thread.start()
    children: list[int] = []
    try:
        for number in range(8):
            child = os.fork()
            if child == 0:
                try:
                    store.record(sample_trial(n=1 + number, created_at=float(i)) for i in range(5))
                    os._exit(0 if len(store.trials(n=1 + number)) == 5 else 1)
                except BaseException:
                    os._exit(2)
            children.append(child)
        deadline = time.monotonic() + 30
        codes = []
        while len(codes) < len(children) and time.monotonic() < deadline:
            codes = [code for code in map(_exit_code, children) if code is not None]
            time.sleep(0.02)
    finally:
        stop.set()
        thread.join()
        for child in children:
            if _exit_code(child) is None:
                os.kill(child, signal.SIGKILL)
    assert codes == [0] * len(children)
    assert len(store.trials()) == 40 + len(written)
    assert store.health().integrity == "ok"


_ended: dict[int, int] = {}


def _exit_code(child: int) -> int | None:
    if child not in _ended:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            _ended[child] = os.waitstatus_to_exitcode(status)
    return _ended.get(child)


def test_no_connection_outlives_an_operation(store):
    store.record([sample_trial()])
    store.trials()
    if Path("/proc/self/fd").exists():
        opened = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert not any(str(store.path) in name for name in opened)


def test_an_exact_problem_among_100k_rows_is_found_fast(store):
    store.record([sample_trial(m=99_999)])
    connection = sqlite3.connect(store.path)
    varied = {"uid": "'row ' || i", "m": "1 + i % 5000", "batch": "1 + i / 5000"}
    names = [row[1] for row in connection.execute("pragma table_info(trials)")]
    connection.execute(
        "with recursive numbers (i) as (select 0 union all select i + 1 from numbers where i < 99999) "
        f"insert into trials ({', '.join(names)}) "
        f"select {', '.join(varied.get(name, name) for name in names)} from numbers, trials"
    )
    connection.commit()
    connection.close()
    problem = {
        "op": "gram_ns",
        "dtype": "fp32",
        "device": "cpu:Some CPU AVX512:2",
        "coefficients": "polar_express",
        "m": 4321,
        "n": 3072,
        "batch": 7,
    }
    times = []
    for _ in range(20):
        start = time.perf_counter()
        found = store.trials(**problem)
        times.append(time.perf_counter() - start)
    assert len(found) == 1
    assert min(times) < 5e-3


def test_the_import_is_light():
    code = (
        "import sys, dmuon.tuning_cache as t; s = t.Store('/nonexistent/x.db'); assert s.trials() == []\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'sqlite_utils', 'scipy', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
