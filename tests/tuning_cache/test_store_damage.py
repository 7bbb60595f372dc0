"""Files that cannot be used as they are: damaged, foreign, old, newer, read-only, on a full disk."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from sample_trials import sample_trial

from dmuon.tuning_cache import Store, StoreUnavailable, StoreWarning, database, migrations

ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
needs_permissions = pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tuning.db"


def filled(path: Path, rows: int = 300) -> Store:
    store = Store(path)
    store.record(sample_trial(m=1 + i) for i in range(rows))
    return store


def aside(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.corrupt-*"))


def overwrite(path: Path, start: int, end: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    end = len(content) if end is None else end
    content[start:end] = os.urandom(end - start)
    path.write_bytes(content)


DAMAGE = {
    "garbage": lambda path: path.write_bytes(b"not a database, whatever its name " * 50),
    "short garbage": lambda path: path.write_bytes(b"\0\1"),
    "first page": lambda path: overwrite(path, 0, 4096),
    "inner pages": lambda path: overwrite(path, 4096),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "truncated in the header": lambda path: os.truncate(path, 50),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("action", ["read", "write"])
def test_a_corrupt_file_is_set_aside_and_begun_anew(path, kind, action):
    filled(path)
    DAMAGE[kind](path)
    content = path.read_bytes()
    assert Store(path).health().problem
    assert path.read_bytes() == content, "health must not change anything"
    store = Store(path)
    with pytest.warns(StoreWarning, match=r"corrupt .*moved to .*corrupt-\d{8}T\d{6}Z") as warned:
        if action == "read":
            assert store.trials() == []
        store.record([sample_trial()])
        assert store.trials() == [sample_trial()]
    assert len(warned) == 1
    assert [file.read_bytes() for file in aside(path)] == [content]
    assert not store.health().in_memory and store.health().problem is None


def test_the_logs_of_a_corrupt_file_in_use_go_with_it(path):
    filled(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("delete from trials where m < 9")
    assert Path(f"{path}-wal").stat().st_size > 0
    overwrite(path, 4096)
    with pytest.warns(StoreWarning):
        Store(path).record([sample_trial()])
    assert {file.name.removeprefix(aside(path)[0].name) for file in aside(path)} == {"", "-wal", "-shm"}
    assert Store(path).trials() == [sample_trial()]
    other.close()
    assert Store(path).trials() == [sample_trial()] and Store(path).health().integrity == "ok"


def test_two_corruptions_within_a_second_keep_both_files(path):
    for content in (b"first" * 40, b"second" * 40):
        path.write_bytes(content)
        with pytest.warns(StoreWarning):
            assert Store(path).trials() == []
    assert sorted(file.read_bytes() for file in aside(path)) == [b"first" * 40, b"second" * 40]


def make_foreign(path: Path, application_id: int = 0) -> bytes:
    connection = sqlite3.connect(path)
    connection.execute("create table trials (mine text)")
    connection.execute(f"pragma application_id = {application_id}")
    connection.executemany("insert into trials values (?)", [("precious" * 30,)] * 200)
    connection.commit()
    connection.close()
    return path.read_bytes()


@pytest.mark.parametrize("application_id", [0, 77])
@pytest.mark.parametrize("damaged", [None, (4096, None), (100, 4096)])
def test_a_foreign_file_is_refused_and_untouched(path, application_id, damaged):
    make_foreign(path, application_id)
    if damaged:
        overwrite(path, *damaged)
    content = path.read_bytes()
    actions = (
        lambda store: store.record([sample_trial()]),
        lambda store: store.trials(),
        lambda store: store.claim("key", 5),
        lambda store: store.prune(keep=lambda trial: False),
    )
    for action in actions:
        with pytest.raises(ValueError, match=f"{path} is not a DMuon store"):
            action(Store(path))
    assert str(path) in (Store(path).health().problem or "")
    assert path.read_bytes() == content
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_file_that_is_not_named_as_a_database_is_never_moved(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("remember the milk\n" * 100)
    for action in (lambda store: store.trials(), lambda store: store.record([sample_trial()])):
        with pytest.raises(ValueError, match=r"notes\.txt is not a DMuon store"):
            action(Store(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_an_empty_file_becomes_a_store(path):
    path.touch()
    assert Store(path).trials() == [] and path.stat().st_size == 0
    filled(path, 1)
    assert len(Store(path).trials()) == 1 and not aside(path)


def make_version_1(path: Path) -> None:
    """Version 1 as its own code left it: trials with their index, no claims."""
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        create table trials (
            uid text primary key, op text not null, dtype text not null, device text not null,
            coefficients text not null, backend text not null, config text not null, status text not null,
            message text not null, versions text not null, source_hash text not null, batch integer not null,
            m integer not null, n integer not null, samples integer not null, error real, tolerance real,
            median_ms real, spread real, created_at real not null
        );
        create index by_problem on trials (op, dtype, device, coefficients, m, n, batch);
        insert into trials values (
            'u', 'gram_ns', 'fp32', 'cpu:Some CPU AVX512:2', 'polar_express', 'blocked',
            '{"method": "gram", "restarts": [2]}', 'ok', '', '{"torch": "2.13.0"}', 'abc',
            1, 768, 3072, 9, 2e-7, 1e-5, 12.5, 0.03, 1700000000.0
        );
        pragma application_id = 1145927023;
        pragma user_version = 1;
        """
    )
    connection.close()


@pytest.mark.parametrize("first", ["read", "claim"])
def test_an_old_store_is_migrated_with_its_rows(path, first):
    make_version_1(path)
    store = Store(path)
    assert store.health().schema_version == 1 and store.health().rows == 1
    if first == "read":
        assert store.trials() == [sample_trial()]
    with store.claim("key", ttl=60):
        assert store.claimed("key")
    assert store.trials() == [sample_trial()]
    assert store.health().schema_version == 3


def test_a_failing_migration_leaves_the_file_as_it_was(path, monkeypatch):
    filled(path, 3)

    def broken(db):
        db.execute("drop table trials")
        if not db.execute("pragma database_list").fetchone()[2]:
            return  # the store in memory may go on
        raise sqlite3.OperationalError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, broken))
        with pytest.warns(StoreWarning, match="out of luck"):
            assert Store(path).trials() == []
    assert Store(path).health().schema_version == 3
    assert len(Store(path).trials()) == 3


def test_a_newer_store_is_not_touched(path):
    filled(path, 3)
    connection = sqlite3.connect(path)
    connection.execute("pragma user_version = 9")
    connection.close()
    content = path.read_bytes()
    store = Store(path)
    with pytest.warns(StoreWarning, match="schema version 9 .* up to 3") as warned:
        assert store.trials() == []
        store.record([sample_trial(m=5)])
        assert [trial.m for trial in store.trials()] == [5]
        assert store.claim("key", 5) is not None and store.claim("key", 5) is None
    assert len(warned) == 1
    assert path.read_bytes() == content and not aside(path)
    health = store.health()
    assert health.in_memory and health.schema_version is None and "version 9" in (health.problem or "")
    with pytest.raises(StoreUnavailable, match="version 9"):
        Store(path, strict=True).trials()


def test_a_full_disk_degrades_to_memory(path, monkeypatch):
    store = filled(path, 3)
    pages = path.stat().st_size // 4096
    connect = database.connect

    def connect_to_full_disk(*arguments):
        db = connect(*arguments)
        db.execute(f"pragma max_page_count = {pages}")
        return db

    monkeypatch.setattr(database, "connect", connect_to_full_disk)
    with pytest.warns(StoreWarning, match="full.*in memory only") as warned:
        for m in (100, 200):
            store.record([sample_trial(m=m, message="x" * 20_000)])
        assert [trial.m for trial in store.trials()] == [1, 2, 3, 100, 200]
    assert len(warned) == 1 and store.health().in_memory
    assert store.prune(keep=lambda trial: trial.m != 100) == 1
    assert [trial.m for trial in store.trials()] == [1, 2, 3, 200]
    with pytest.raises(StoreUnavailable, match="full"):
        Store(path, strict=True).record([sample_trial(message="x" * 20_000)])
    monkeypatch.undo()
    assert len(Store(path).trials()) == 3 and Store(path).health().integrity == "ok"


@pytest.mark.skipif(not ROOT or sys.platform != "linux", reason="mounts a small file system")
def test_a_really_full_disk_degrades_to_memory(tmp_path):
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        store = filled(tmp_path / "tuning.db", 3)
        with pytest.warns(StoreWarning, match="in memory only") as warned:
            for i in range(60):
                store.record([sample_trial(n=1 + i, message="x" * 5000)])
        assert len(warned) == 1
        assert len(store.trials()) == 63
    finally:
        subprocess.run(["umount", tmp_path], check=True)


UNPRIVILEGED = """
import os, sys, warnings
sys.path.insert(0, sys.argv[2])
import sqlite_utils
from sample_trials import sample_trial
from dmuon.tuning_cache import Store
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
store = Store(sys.argv[1])
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    print(len(store.trials()))
    store.record([sample_trial(m=9999)])
    store.record([sample_trial(m=9998)])
    health = store.health()
    print(len(store.trials()), health.in_memory, health.writable, len(warned))
    print(*(warning.message for warning in warned))
"""


@pytest.fixture
def locked():
    """A store in a folder that everybody may enter, for `use_unprivileged` to take write permission from."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    path = folder / "tuning.db"
    filled(path, 3)
    yield path
    folder.chmod(0o755)
    shutil.rmtree(folder)


def use_unprivileged(path: Path) -> list[str]:
    """Read and write the store as somebody whom permissions bind; what was read, then what was warned of."""
    path.parent.chmod(0o555)
    command = [sys.executable, "-c", UNPRIVILEGED, str(path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_permissions
@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_a_read_only_folder_is_read_and_new_rows_stay_in_memory(locked, journal):
    connection = sqlite3.connect(locked)
    connection.execute(f"pragma journal_mode = {journal}")
    connection.close()
    locked.chmod(0o444)
    before, after, warning = use_unprivileged(locked)
    assert before == "3" and after == "5 True False 1"
    assert str(locked) in warning and "in memory only" in warning
    assert [entry.name for entry in locked.parent.iterdir()] == [locked.name]


@needs_permissions
def test_an_unreadable_file_degrades_to_memory(locked):
    locked.chmod(0)
    before, after, warning = use_unprivileged(locked)
    assert before == "0" and after == "2 True False 1" and str(locked) in warning


@needs_permissions
def test_an_old_store_that_cannot_be_migrated_degrades_to_memory(locked):
    locked.unlink()
    make_version_1(locked)
    before, after, warning = use_unprivileged(locked)
    assert before == "0" and after == "2 True False 1" and str(locked) in warning
    assert Store(locked).health().schema_version == 1


@needs_permissions
def test_a_corrupt_file_in_a_read_only_folder_stays(locked):
    overwrite(locked, 0, 4096)
    before, after, warning = use_unprivileged(locked)
    assert before == "0" and after == "2 True False 1" and "cannot be set aside" in warning


def test_a_path_below_a_file_degrades_to_memory(tmp_path):
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "tuning.db")
    assert store.trials() == []
    with pytest.warns(StoreWarning, match="in memory only"):
        store.record([sample_trial()])
    assert store.trials() == [sample_trial()]
    store.close()
    assert store.trials() == []


def test_without_a_write_ahead_log_the_rollback_journal_serves(path, monkeypatch):
    connect = database.connect
    # This VFS has no shared memory, so SQLite refuses the write-ahead log, as on some network filesystems.
    monkeypatch.setattr(
        database, "connect", lambda path, options: connect(path, options + "&vfs=unix-dotfile")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = filled(path, 3)
        assert len(store.trials()) == 3
        with store.claim("key", 5):
            assert store.claimed("key")
    monkeypatch.undo()
    connection = sqlite3.connect(path)
    assert connection.execute("pragma journal_mode").fetchone() == ("delete",)
    connection.close()
    filled(path, 4)
    connection = sqlite3.connect(path)
    assert connection.execute("pragma journal_mode").fetchone() == ("wal",)
    connection.close()


def test_a_writer_waits_for_a_lock_and_gives_up_in_time(path, monkeypatch):
    store = filled(path, 1)
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.3)
    monkeypatch.setattr(database, "_SQLITE_BUSY_SECONDS", 0.1)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("begin immediate")
    with pytest.warns(StoreWarning, match="locked"):
        store.record([sample_trial(m=50)])
    assert len(store.trials()) == 2
    holder.execute("rollback")
    holder.close()
    assert len(Store(path).trials()) == 1
