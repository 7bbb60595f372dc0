"""Many processes on one store. Each child runs `python test_store_processes.py ROLE …`."""

from __future__ import annotations

import math
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from sample_trials import sample_trial

from dmuon.tuning_cache import Store, StoreWarning


def write(path: str, log: str, number: str, seconds: str) -> None:
    """Record batches of trials; note each batch in the log once record() has returned.

    The time counts from the first batch, so that a loaded machine's slow start does not eat it up.
    """
    store, end, counter = Store(path), math.inf, 0
    draw = random.Random(number)
    with Path(log).open("a") as file:
        while time.monotonic() < end:
            counter += 1
            size = draw.randint(1, 6)
            text = str(draw.random()) * draw.randint(1, 300)
            store.record(
                sample_trial(
                    batch=1 + int(number),
                    m=counter,
                    n=1 + i,
                    config={"size": size, "text": text},
                    message=text,
                    created_at=float(counter),
                )
                for i in range(size)
            )
            file.write(f"{number} {counter} {size}\n")
            file.flush()
            end = min(end, time.monotonic() + float(seconds))


def read(path: str, log: str, seconds: str) -> None:
    """Read everything again and again: only whole batches, and the two copies of each text alike."""
    store, end, reads = Store(path), math.inf, 0
    while time.monotonic() < end:
        trials = store.trials()
        if trials:
            end = min(end, time.monotonic() + float(seconds))
        batches = Counter((trial.batch, trial.m) for trial in trials)
        for trial in trials:
            assert trial.config["text"] == trial.message
            assert batches[trial.batch, trial.m] == trial.config["size"]
        reads += bool(trials)
    Path(log).write_text(str(reads))


def hold(path: str, log: str, ttl: str) -> None:
    """Take a claim and never let it go."""
    assert Store(path).claim("held", float(ttl)) is not None
    Path(log).write_text("held")
    time.sleep(600)


def discover(path: str, log: str, start_at: str, number: str) -> None:
    """Record one trial in a store that is corrupt, at the same moment as others."""
    time.sleep(max(0.0, float(start_at) - time.time()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        store = Store(path)
        store.record([sample_trial(m=1 + int(number))])
    assert not store.health().in_memory
    Path(log).write_text("recorded")


def spawn(role: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "error::UserWarning", __file__, role, *map(str, arguments)]
    return subprocess.Popen(command)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or not path.stat().st_size:
        assert time.monotonic() < deadline, f"nothing appeared in {path}"
        time.sleep(0.02)


@pytest.mark.case(row="T1")
@pytest.mark.parametrize("seconds", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_eight_writers_one_killed(tmp_path, seconds):
    path = tmp_path / "tuning.db"
    writers = [spawn("write", path, tmp_path / f"log{i}", i, seconds + i % 2) for i in range(8)]
    reader = spawn("read", path, tmp_path / "reads", seconds)
    try:
        wait_for(tmp_path / "log0")
        time.sleep(seconds / 2)
        writers[0].send_signal(signal.SIGKILL)
        codes = [process.wait(timeout=120) for process in [*writers, reader]]
    finally:
        for process in [*writers, reader]:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    assert codes == [-signal.SIGKILL] + [0] * 8
    assert int((tmp_path / "reads").read_text()) > 0

    trials = Store(path).trials()
    found = Counter((trial.batch - 1, trial.m) for trial in trials)
    reported = {}
    for log in tmp_path.glob("log*"):
        for line in log.read_text().splitlines():
            number, counter, size = map(int, line.split())
            reported[number, counter] = size
    lost = {key: size for key, size in reported.items() if found[key] != size}
    assert not lost
    assert {number for number, _ in reported} == set(range(8))
    # At most the batch in flight when the signal came was written without being reported.
    assert len(set(found) - set(reported)) <= 1
    assert Store(path).health().integrity == "ok"


def test_killed_at_any_moment(tmp_path):
    """Each kill comes at another moment of another write; what was reported is there, and each batch is whole."""
    path, moments = tmp_path / "tuning.db", random.Random(0)
    for number in range(6):
        writer = spawn("write", path, tmp_path / f"log{number}", number, 60)
        try:
            wait_for(tmp_path / f"log{number}")
            time.sleep(moments.uniform(0, 0.03))
        finally:
            writer.kill()
        assert writer.wait() == -signal.SIGKILL
        trials = Store(path).trials()
        found = Counter((trial.batch - 1, trial.m) for trial in trials)
        assert all(found[trial.batch - 1, trial.m] == trial.config["size"] for trial in trials)
        reported = [map(int, line.split()) for line in (tmp_path / f"log{number}").read_text().splitlines()]
        assert all(found[who, counter] == size for who, counter, size in reported)
        assert Store(path).health().integrity == "ok"


def test_the_claim_of_a_killed_process_expires(tmp_path):
    path = tmp_path / "tuning.db"
    holder = spawn("hold", path, tmp_path / "held", 3)
    wait_for(tmp_path / "held")
    taken = time.monotonic()
    holder.kill()
    holder.wait()
    store = Store(path)
    assert store.claimed("held") and store.claim("held", ttl=5) is None
    while (claim := store.claim("held", ttl=5)) is None:
        assert time.monotonic() < taken + 10, "the claim of a dead process never expires"
        time.sleep(0.05)
    assert time.monotonic() - taken > 1
    claim.release()


@pytest.mark.parametrize("damage", ["garbage", "page"])
def test_processes_that_find_corruption_at_once_share_one_fresh_store(tmp_path, damage):
    path = tmp_path / "tuning.db"
    Store(path).record(sample_trial(m=1000 + i) for i in range(200))
    content = bytearray(path.read_bytes())
    content[0 if damage == "garbage" else 4096 :] = b"\xa5" * (len(content) - (damage == "page") * 4096)
    path.write_bytes(content)
    start_at = time.time() + 1.5
    children = [spawn("discover", path, tmp_path / f"log{i}", start_at, i) for i in range(6)]
    assert [child.wait(timeout=60) for child in children] == [0] * 6
    assert sorted(trial.m for trial in Store(path).trials()) == [1, 2, 3, 4, 5, 6]
    aside = [entry for entry in tmp_path.iterdir() if ".corrupt-" in entry.name]
    assert [entry.read_bytes() for entry in aside] == [bytes(content)]


def test_a_store_deleted_under_a_running_process_is_made_again(tmp_path):
    store = Store(tmp_path / "cache" / "tuning.db")
    store.record([sample_trial(m=1)])
    store.path.unlink()
    store.path.parent.rmdir()
    assert store.trials() == []
    store.record([sample_trial(m=2)])
    assert [trial.m for trial in Store(store.path).trials()] == [2]


if __name__ == "__main__":
    {"write": write, "read": read, "hold": hold, "discover": discover}[sys.argv[1]](*sys.argv[2:])
