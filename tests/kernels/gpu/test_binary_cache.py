"""Binaries on disk: what a key covers, and files that are damaged, unwritable or written by many at once."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from fake_kernels import PTX, fake, install, start_process

from dmuon.kernels.gpu import cache as cache_module
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Param
from dmuon.kernels.gpu.cache import BinaryCache, Damaged, decode, default_folder, encode, key_of
from dmuon.kernels.gpu.locks import file_lock
from dmuon.kernels.gpu.sources import source_digest


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    return install(tmp_path, monkeypatch)


@pytest.fixture
def cache(fakes, tmp_path):
    return BinaryCache(tmp_path / "binaries")


def binary(spec: KernelSpec) -> Binary:
    extra = {"tiles": [64, 128], "note": "é"}
    params = (Param(0, 8), Param(64, 128))
    return Binary(spec, "fake", 384, 1 << 17, params, PTX, bytes(range(256)) * 9, (2, 1, 1), extra)


def test_a_binary_survives_the_disk(cache):
    stored = binary(fake(tile=64))
    assert cache.load(stored.spec) is None
    cache.store(stored)
    assert cache.load(fake(tile=64)) == stored
    assert cache.load(fake(tile=128)) is None
    [file] = cache.folder.iterdir()
    assert file.name.startswith("triton-fake-sm_90a-") and file.suffix == ".kernel"


def test_the_key_covers_spec_sources_and_version(fakes, monkeypatch):
    keys = {key_of(fake(tile=tile, arch=arch)) for tile in (64, 128) for arch in ("sm_80", "sm_90a")}
    assert len(keys) == 4
    before = key_of(fake())
    source_digest.cache_clear()
    assert key_of(fake()) == before
    fakes.write_text(fakes.read_text() + "\n# changed")
    source_digest.cache_clear()
    changed = key_of(fake())
    assert changed != before
    monkeypatch.setattr(cache_module, "_version", lambda name: f"{name} 99")
    assert key_of(fake()) != changed


def test_sources_are_followed_through_imports_and_no_further(fakes):
    helper = fakes.with_name("fake_helper.py")
    helper.write_text("from dmuon.kernels.gpu.arch import ARCHS\n")
    other = fakes.with_name("fake_other.py")
    other.write_text("x = 1\n")
    fakes.write_text("import numpy\n\ndef build(spec):\n    from dmuon.kernels.gpu import fake_helper\n")

    def digest() -> str:
        source_digest.cache_clear()
        return source_digest("fake_kernel")

    before = digest()
    other.write_text("x = 2\n")
    assert digest() == before
    helper.write_text("from dmuon.kernels.gpu.arch import arch_of\n")
    assert digest() != before
    with pytest.raises(ValueError, match=r"no module is called dmuon\.kernels\.gpu\.not_there"):
        source_digest("not_there")


def test_a_key_imports_no_dsl(fakes):
    body = """
from dmuon.kernels.gpu.cache import key_of
from dmuon.kernels.gpu.binary import KernelSpec
key_of(KernelSpec("triton", "triton_kernels.symmetric_kernel", "sm_80"))
key_of(KernelSpec("cute", "cute_kernels.symmetric_sm90_kernel", "sm_90a"))
assert not {"torch", "triton", "tilelang", "cutlass", "tvm"} & set(sys.modules), sys.modules
"""
    assert start_process(fakes, body).wait(60) == 0


@pytest.mark.parametrize("damage", ["cut", "empty", "bit", "longer", "garbage", "other"])
def test_a_damaged_file_is_as_good_as_none_and_told_by_health(cache, damage):
    cache.store(binary(fake()))
    [file] = cache.folder.iterdir()
    data = bytearray(file.read_bytes())
    if damage == "cut":
        del data[-100:]
    elif damage == "empty":
        data.clear()
    elif damage == "bit":
        data[len(data) // 2] ^= 1
    elif damage == "longer":
        data += b"more"
    elif damage == "garbage":
        data = bytearray(b"garbage" * 1000)
    elif damage == "other":
        data = bytearray(encode(binary(fake(tile=1))))
    file.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load(fake()) is None
    assert len(cache.health().damaged) == (
        damage != "other"
    )  # that one is sound, only not what was asked for
    cache.store(binary(fake()))
    assert cache.load(fake()) == binary(fake()) and not cache.health().damaged


def test_another_format_is_refused(monkeypatch):
    data = encode(binary(fake()))
    monkeypatch.setattr(cache_module, "_FORMAT", 2)
    with pytest.raises(Damaged, match="format 1"):
        decode(data)


def test_health(cache, monkeypatch):
    empty = cache.health()
    assert (empty.binaries, empty.size_bytes, empty.failed, empty.damaged) == (
        0,
        0,
        (),
        (),
    ) and empty.writable
    cache.store(binary(fake()))
    cache.store_failure(fake(tile=2), "out of registers")
    health = cache.health()
    assert health.binaries == 1 and health.size_bytes > 1000
    assert [line.split(": ")[1] for line in health.failed] == ["out of registers"]


def test_failures_are_remembered_for_a_day_and_forgotten_when_built(cache):
    spec = fake()
    assert cache.failure(spec) is None
    cache.store_failure(spec, "boom")
    assert cache.failure(spec) == "boom" and cache.failure(fake(tile=2)) is None
    [file] = cache.folder.iterdir()
    yesterday = time.time() - 1.01 * 86400
    os.utime(file, (yesterday, yesterday))
    assert cache.failure(spec) is None
    cache.store_failure(spec, "boom")
    cache.store(binary(spec))
    assert cache.failure(spec) is None
    file.write_text("not json")
    assert cache.failure(spec) is None


def test_where_nothing_can_be_written_it_warns_once(fakes, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache = BinaryCache(blocked / "binaries")
    with pytest.warns(UserWarning, match="cannot be kept in .*Not a directory.*DMUON_CACHE") as caught:
        cache.store(binary(fake()))
        cache.store(binary(fake(tile=2)))
        cache.store_failure(fake(), "boom")
    assert len(caught) == 1 and cache.load(fake()) is None and cache.failure(fake()) is None
    with cache.lock(fake(), 1) as held:
        assert not held


def test_a_full_disk_leaves_nothing_half_written(cache, monkeypatch):
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        cache.store(binary(fake()))
    assert list(cache.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("{}/x", "{}/x/binaries"), ("{}/x.db", "{}/x.db.binaries"), ("{}/x.sqlite3", "{}/x.sqlite3.binaries")],
)
def test_the_folder_follows_the_store(tmp_path, monkeypatch, setting, expected):
    monkeypatch.setenv("DMUON_CACHE", setting.format(tmp_path))
    assert default_folder() == Path(expected.format(tmp_path))
    monkeypatch.delenv("DMUON_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert default_folder() == tmp_path / "dmuon" / "binaries"


def test_a_lock_is_held_by_one_and_leaves_no_file(tmp_path):
    path, inside, most = tmp_path / "lock", [], []

    def work() -> None:
        for _ in range(5):
            with file_lock(path, 60) as held:
                assert held
                inside.append(None)
                most.append(len(inside))
                time.sleep(0.002)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 20 and max(most) == 1 and not path.exists()


def test_a_lock_waits_only_so_long_and_ends_with_its_holder(fakes, tmp_path):
    path, ready = tmp_path / "lock", tmp_path / "ready"
    body = f"""
import time
from pathlib import Path
from dmuon.kernels.gpu.locks import file_lock
with file_lock(Path({str(path)!r}), 9):
    Path({str(ready)!r}).touch()
    time.sleep(600)
"""
    holder = start_process(fakes, body)
    while not ready.exists():
        assert holder.poll() is None
        time.sleep(0.02)
    with file_lock(path, 0.1) as held:
        assert not held
    holder.kill()
    holder.wait()
    with file_lock(path, 5) as held:
        assert held
