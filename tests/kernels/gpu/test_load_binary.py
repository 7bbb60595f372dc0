"""From specs to binaries: what is compiled, what is loaded, and how often, by one process and by many."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from fake_kernels import fake, install, start_process

from dmuon.kernels.gpu import load
from dmuon.kernels.gpu.binary import Unsupported
from dmuon.kernels.gpu.cache import BinaryCache
from dmuon.kernels.gpu.load import binary_for, compile_all


@pytest.fixture(autouse=True)
def fakes(tmp_path, monkeypatch):
    yield install(tmp_path, monkeypatch)
    load._pool(os.getpid()).close()
    load._pool.cache_clear()
    load._cache.cache_clear()


@pytest.fixture
def log(tmp_path):
    """Where a fake compiler notes that it ran."""
    return tmp_path / "log"


def count(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def forget() -> None:
    load._known.clear()


def test_a_binary_is_compiled_once_then_loaded(log):
    spec = fake(log=str(log))
    first = binary_for(spec)
    assert binary_for(spec) is first and count(log) == 1
    forget()
    assert binary_for(spec) == first and count(log) == 1


def test_a_damaged_file_is_compiled_again(log):
    spec = fake(log=str(log))
    first = binary_for(spec)
    [file] = BinaryCache().folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    forget()
    assert binary_for(spec).cubin == first.cubin and count(log) == 2


def test_a_failure_is_told_and_not_tried_again(log):
    spec = fake("raise", log=str(log))
    says = "compiling fake_kernel for sm_90a failed: RuntimeError: no such intrinsic"
    for _ in range(2):
        with pytest.raises(Unsupported, match=says):
            binary_for(spec)
    forget()
    with pytest.raises(Unsupported, match=says):
        binary_for(spec)
    assert count(log) == 1


def test_a_missing_compiler_is_asked_for_again_in_the_next_process(log):
    spec = fake("unsupported", log=str(log))
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"^needs a compiler that is not here$"):
            binary_for(spec)
    assert count(log) == 1
    forget()
    with pytest.raises(Unsupported):
        binary_for(spec)
    assert count(log) == 2


def test_compiling_can_be_forbidden(log, monkeypatch):
    compiled, missing = fake(log=str(log)), fake(tile=2, log=str(log))
    binary_for(compiled)
    forget()
    monkeypatch.setenv("DMUON_COMPILE", "off")
    assert binary_for(compiled).entry == "fake"
    with pytest.raises(Unsupported, match=r"not compiled for sm_90a.*dmuon-tune compile MODEL --arch sm_90a"):
        binary_for(missing)
    assert count(log) == 1
    monkeypatch.setenv("DMUON_COMPILE", "0")
    with pytest.raises(ValueError, match="DMUON_COMPILE must be on or off, got '0'"):
        binary_for(fake(tile=3))


def test_where_nothing_can_be_kept_it_compiles_for_itself(log, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DMUON_CACHE", str(blocked))
    spec = fake(log=str(log))
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert binary_for(spec) is binary_for(spec)
    assert count(log) == 1


def test_compile_all_reports_each_spec_and_goes_on_after_failures(log):
    specs = [fake(), fake("raise"), fake(tile=2), fake("abort"), fake()]
    events = []
    outcomes = compile_all(specs, jobs=2, progress=lambda spec, outcome: events.append((spec, outcome)))
    assert [outcome.spec for outcome in outcomes] == specs[:4]
    assert [outcome.status for outcome in outcomes] == ["compiled", "failed", "compiled", "failed"]
    assert "no such intrinsic" in (outcomes[1].reason or "") and "SIGABRT" in (outcomes[3].reason or "")
    assert {spec for spec, outcome in events if outcome is None} == set(specs)
    assert {outcome.spec for _, outcome in events if outcome} == set(specs)
    again = compile_all(specs, jobs=2)
    assert [outcome.status for outcome in again] == ["cached", "failed", "cached", "failed"]
    assert again[0].binary == outcomes[0].binary


def test_compile_all_tries_again_what_failed(log, fakes):
    spec = fake("raise", log=str(log))
    compile_all([spec], jobs=1)
    compile_all([spec], jobs=1)
    assert count(log) == 2
    with pytest.raises(Unsupported, match="no such intrinsic"):
        binary_for(spec)
    assert count(log) == 2


def test_a_time_out_is_a_failure(log):
    [outcome] = compile_all([fake("hang")], jobs=1, timeout_s=1)
    assert outcome.status == "failed" and "still compiling after 1 s" in (outcome.reason or "")


def test_nothing_to_compile_starts_nothing():
    assert compile_all([]) == []


def test_processes_share_the_work(log, tmp_path, fakes):
    """Six processes want the same three kernels at once: three compilations, and all get all."""
    body = f"""
sys.stdin.readline()
for tile in (1, 2, 3):
    assert load.binary_for(fake(tile=tile, seconds=0.3, log={str(log)!r})).entry == "fake"
"""
    ranks = [start_process(fakes, body) for _ in range(6)]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(b"go\n")
        rank.stdin.close()
    assert [rank.wait(120) for rank in ranks] == [0] * 6
    assert count(log) == 3
    assert {file.suffix for file in BinaryCache().folder.iterdir()} == {".kernel"}


def test_a_process_that_dies_compiling_is_taken_over(log, fakes):
    spec = fake(seconds=1.5, log=str(log))
    first = start_process(fakes, f"load.binary_for(fake(seconds=1.5, log={str(log)!r}))")
    while not count(log):
        assert first.poll() is None
        time.sleep(0.02)
    first.kill()
    first.wait()
    assert binary_for(spec).entry == "fake" and count(log) == 2


def test_interrupting_keeps_what_is_finished(log):
    quick, slow = fake(), fake("hang", log=str(log))

    def interrupt() -> None:
        while not count(log):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        compile_all([quick, slow], jobs=1, progress=lambda spec, outcome: None)
    thread.join()
    cache = BinaryCache()
    assert cache.load(quick) is not None and cache.load(slow) is None and cache.failure(slow) is None
    assert not Path(f"/proc/{int(log.read_text())}").exists()
