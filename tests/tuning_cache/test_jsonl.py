from __future__ import annotations

import io
import os
import stat
import sys
import threading

import pytest
from sample_trials import sample_trial

from dmuon.tuning_cache import Store, Trial, shipped, shipped_trials

TRIALS = [sample_trial(m=m, message=f"tried “{m}”\nand noted", created_at=float(m)) for m in (64, 128, 256)]


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "tuning.db")
    store.record(TRIALS)
    return store


def test_export_then_import_is_the_same_store(store, tmp_path):
    assert store.export_jsonl(tmp_path / "all.jsonl") == 3
    other = Store(tmp_path / "other.db")
    assert other.import_jsonl(str(tmp_path / "all.jsonl")) == 3
    assert other.trials() == TRIALS
    assert other.import_jsonl(tmp_path / "all.jsonl") == 0
    assert len(other.trials()) == 3


def test_export_filters_and_writes_to_streams(store):
    stream = io.StringIO()
    assert store.export_jsonl(stream, m=128) == 1
    assert [Trial.from_json(line) for line in stream.getvalue().splitlines()] == [TRIALS[1]]


def test_streams_and_blank_lines_and_a_byte_order_mark_are_read(store, tmp_path):
    text = "\n" + "\n\n".join(trial.to_json() for trial in TRIALS) + "\r\n\n"
    assert Store(tmp_path / "a.db").import_jsonl(io.StringIO(text)) == 3
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + TRIALS[0].to_json().encode())
    assert Store(tmp_path / "b.db").import_jsonl(tmp_path / "bom.jsonl") == 1


@pytest.mark.parametrize(
    "line", [b"{}", b"junk", TRIALS[0].to_json().replace('"ok"', '"great"').encode(), b'"\xff"']
)
def test_a_bad_line_is_named_and_nothing_is_imported(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(TRIALS[0].to_json().encode() + b"\n\n" + line + b"\n" + TRIALS[1].to_json().encode())
    store = Store(tmp_path / "tuning.db")
    # Text is decoded in blocks: undecodable bytes are only known to come after the lines already seen.
    where = "line 1 or later: not UTF-8" if b"\xff" in line else "line 3"
    with pytest.raises(ValueError, match=rf"bad\.jsonl, {where}"):
        store.import_jsonl(path)
    assert not store.path.exists()


def test_a_missing_file_is_an_os_error(store, tmp_path):
    with pytest.raises(FileNotFoundError):
        store.import_jsonl(tmp_path / "none.jsonl")


def test_a_failed_export_leaves_the_old_file_and_no_other(store, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "all.jsonl").write_text("precious")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        store.export_jsonl(folder / "all.jsonl")
    assert [(entry.name, entry.read_text()) for entry in folder.iterdir()] == [("all.jsonl", "precious")]


@pytest.mark.skipif(sys.platform == "win32", reason="needs links and pipes")
def test_export_follows_links_and_never_replaces_a_pipe(store, tmp_path):
    (tmp_path / "real.jsonl").write_text("")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    store.export_jsonl(tmp_path / "link.jsonl")
    assert (tmp_path / "link.jsonl").is_symlink()
    assert len((tmp_path / "real.jsonl").read_text().splitlines()) == 3

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    store.export_jsonl(pipe)
    reader.join(timeout=10)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and len(received[0].splitlines()) == 3


def test_shipped_trials_are_read_by_device(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "_folder", lambda: tmp_path / "shipped")
    assert shipped_trials() == [] == shipped_trials("cuda:NVIDIA H200")
    (tmp_path / "shipped").mkdir()
    h200, cpu = "cuda:NVIDIA H200", "cpu:Intel(R) Xeon(R) @ 2.0GHz AVX512:2"
    assert shipped.file_name(h200) == "cuda-nvidia-h200.jsonl"
    assert shipped.file_name(cpu) == "cpu-intel-r-xeon-r-2-0ghz-avx512-2.jsonl"
    for device in (h200, cpu):
        line = sample_trial(device=device).to_json()
        (tmp_path / "shipped" / shipped.file_name(device)).write_text(line + "\n")
    (tmp_path / "shipped" / "README.md").write_text("not a trial")
    assert [trial.device for trial in shipped_trials(h200)] == [h200]
    assert shipped_trials("cuda:Another") == []
    assert {trial.device for trial in shipped_trials()} == {h200, cpu}


def test_a_broken_shipped_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "_folder", lambda: tmp_path)
    (tmp_path / "cuda-x.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"cuda-x\.jsonl, line 1"):
        shipped_trials("cuda:X")


def test_what_is_shipped_is_sound():
    names = {entry.name for entry in shipped._folder().iterdir() if entry.name.endswith(".jsonl")}
    assert {shipped.file_name(trial.device) for trial in shipped_trials()} == names
    assert all(trial.status == "ok" for trial in shipped_trials())
