"""Compiling in other processes: whatever a compiler does, the others go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from fake_kernels import PTX, fake, install, start_process

from dmuon.kernels.gpu.binary import Param, Unsupported
from dmuon.kernels.gpu.pool import BuildCancelled, BuildFailed, Pool


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    return install(tmp_path, monkeypatch)


def test_a_kernel_is_built_in_another_process_without_a_gpu(fakes):
    with Pool(1) as pool:
        first, second = pool.build(fake()), pool.build(fake(number=2))
    assert first.spec == fake() and second.spec == fake(number=2)
    assert (first.entry, first.threads, first.shared_bytes) == ("fake", 128, 4096)
    assert first.ptx == PTX and first.cubin == b"cubin" and first.cluster == (2, 1, 1)
    assert first.params == (Param(0, 8), Param(8, 4))
    assert first.extra["pid"] == second.extra["pid"] != os.getpid()
    assert first.extra["gpus"] == ""


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("raise", "RuntimeError: no such intrinsic"),
        ("abort", "ended its process with SIGABRT: LLVM ERROR: cannot select"),
        ("exit", "ended its process with exit code 3"),
        ("hang", "still compiling after 4 s"),
    ],
)
def test_a_failure_is_told_and_the_next_kernel_built(fakes, does, says):
    with Pool(1, timeout_s=4) as pool:
        pool.build(fake())  # what follows is not the import's fault
        with pytest.raises(BuildFailed, match=says):
            pool.build(fake(does))
        assert pool.build(fake(number=2)).entry == "fake"


def test_a_compiler_that_keeps_crashing_is_given_up(fakes):
    with Pool(1, timeout_s=20) as pool:
        for number in range(2):
            with pytest.raises(BuildFailed, match="SIGABRT"):
                pool.build(fake("abort", number=number))
        pool.build(fake())  # one that works clears the count
        for number in range(3):
            with pytest.raises(BuildFailed, match="SIGABRT"):
                pool.build(fake("abort", number=number))
        with pytest.raises(Unsupported, match=r"not tried: 3 \w+ compilers in a row crashed or hung"):
            pool.build(fake())


def test_garbage_on_every_channel_is_not_taken_for_a_binary(fakes):
    with Pool(1, timeout_s=20) as pool:
        with pytest.raises(BuildFailed, match="answered nonsense"):
            pool.build(fake("garbage"))
        assert pool.build(fake()).entry == "fake"


def test_unsupported_is_passed_on(fakes):
    with Pool(1) as pool, pytest.raises(Unsupported, match="needs a compiler that is not here"):
        pool.build(fake("unsupported"))


def test_each_dsl_has_its_own_process(fakes):
    with Pool(1) as pool:
        pids = [pool.build(fake(dsl=dsl)).extra["pid"] for dsl in ("triton", "cute", "cute")]
    assert pids[0] != pids[1] == pids[2]
    assert not _alive(pids[0]) and not _alive(pids[1])


def test_a_worker_that_dies_between_kernels_is_replaced(fakes):
    with Pool(1) as pool:
        first = pool.build(fake()).extra["pid"]
        os.kill(first, signal.SIGKILL)
        assert pool.build(fake(number=2)).extra["pid"] != first


def test_closing_cancels_what_compiles(fakes):
    pool = Pool(1)
    raised = []

    def build() -> None:
        with pytest.raises(BuildCancelled) as caught:
            pool.build(fake("hang"))
        raised.append(caught)

    thread = threading.Thread(target=build)
    thread.start()
    while not pool._busy:
        time.sleep(0.01)
    [worker] = pool._busy
    pool.close()
    thread.join(10)
    assert raised and worker._process.poll() == -signal.SIGKILL
    with pytest.raises(BuildCancelled):
        pool.build(fake())


def test_a_worker_ends_with_the_process_that_started_it(fakes, tmp_path):
    log = tmp_path / "pids"
    parent = start_process(fakes, f"pool.Pool(1).build(fake('hang', log={str(log)!r}))")
    while not log.exists() or not log.read_text().endswith("\n"):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while _alive(int(log.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("jobs", [0, -1])
def test_jobs_must_be_positive(jobs):
    with pytest.raises(ValueError, match=f"jobs must be at least 1, got {jobs}"):
        Pool(jobs)


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "(zombie)" not in status.read_text()
