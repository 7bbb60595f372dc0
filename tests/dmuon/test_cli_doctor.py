"""`dmuon-tune doctor`, and the probe that imports kernel compilers out of process."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cli_helpers import invoke, trial

from dmuon.cli import doctor as doctor_module
from dmuon.cli.probe import probe_import
from dmuon.tuning_cache import Store


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Where the default store is."""
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "cache" / "tuning.db"


MODULES = {
    "dsl_fine": "import sys; print('loud'); sys.stderr.write('louder')",
    "dsl_raises": "raise ImportError('libfancy.so.7: no such file')",
    "dsl_aborts": "import os; os.abort()",
    "dsl_hangs": "import time; time.sleep(600)",
    "dsl_exits": "import sys; sys.exit(3)",
    "dsl_crashes_at_exit": "import atexit, os; atexit.register(os.abort)",
    "dsl_hangs_in_a_child": (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(__file__ + '.pid', 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    ),
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    folder = tmp_path / "modules"
    folder.mkdir()
    for name, body in MODULES.items():
        (folder / f"{name}.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.mark.case(row="T3")
@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("dsl_fine", None),
        ("dsl_crashes_at_exit", None),
        ("dsl_raises", "ImportError: libfancy.so.7: no such file"),
        ("dsl_aborts", "SIGABRT"),
        ("dsl_exits", "import failed"),
        ("dsl_not_there", "No module named 'dsl_not_there'"),
    ],
)
def test_probe(modules, module, says):
    problem = probe_import(module).problem
    assert (problem is None) if says is None else (says in (problem or ""))


def test_probe_gives_up_on_an_import_that_hangs_and_ends_what_it_started(modules):
    start = time.monotonic()
    assert probe_import("dsl_hangs_in_a_child", timeout_s=2).problem == "still importing after 2 s"
    assert time.monotonic() - start < 15
    grandchild = Path("/proc") / (modules / "dsl_hangs_in_a_child.py.pid").read_text()
    if Path("/proc/self").exists():
        assert not grandchild.exists() or "(zombie)" in (grandchild / "status").read_text()


def test_probe_ignores_files_in_the_current_folder(modules, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(modules)
    assert "No module named" in (probe_import("dsl_aborts").problem or "")


@pytest.fixture
def compilers(modules, monkeypatch):
    """Pretend that compilers of all kinds are installed."""
    found = {"fine": "dsl_fine", "raising": "dsl_raises", "aborting": "dsl_aborts", "hanging": "dsl_hangs"}
    monkeypatch.setattr(doctor_module, "_COMPILERS", {**found, "absent": "dsl_not_there"})
    monkeypatch.setattr(doctor_module, "_version", lambda name: None if name == "absent" else "1.0")


@pytest.mark.case(row="T3")
def test_doctor_reports_what_fails_and_is_not_harmed(path, compilers):
    Store(path).record([trial()])
    report = json.loads(invoke("doctor", "--json", "--timeout", "2").stdout)
    problems = {each["name"]: each["problem"] for each in report["software"]}
    assert problems.pop("torch") is None and problems.pop("fine") is None
    assert "libfancy" in problems["raising"] and "SIGABRT" in problems["aborting"]
    assert "still importing" in problems["hanging"] and problems["absent"] == "not installed"
    assert report["devices"][0]["name"] == "cpu" and report["devices"][0]["key"].startswith("cpu:")
    assert {"backend": "torch", "device": "cpu", "problem": None} in report["backends"]
    assert report["store"]["rows"] == 1 and report["store"]["problem"] is None

    text = invoke("doctor", "--timeout", "2").stdout
    assert max(map(len, text.splitlines())) <= 80
    for word in ("Devices", "Libraries", "Backends", "Store", "SIGABRT", "not installed", "1 trial"):
        assert word in text


def test_doctor_names_the_library_that_keeps_a_backend_from_running(monkeypatch):
    class NeedsBroken:
        requires = ("torch", "broken")

        def unavailable(self, device):
            raise AssertionError("asked although its library is known to crash")

    monkeypatch.setattr("dmuon.kernels.backends.BACKENDS", {"fancy": NeedsBroken()})
    software = [
        doctor_module.Software("torch", "2", None),
        doctor_module.Software("broken", "1", "import failed: boom"),
    ]
    device = doctor_module.Device("cpu", "cpu:x:2", "")
    [report] = doctor_module.judge_backends([device], software)
    assert report.problem == "broken: import failed: boom"


def test_doctor_on_a_store_that_is_not_there_or_not_sound(path, monkeypatch):
    monkeypatch.setattr(doctor_module, "_COMPILERS", {"absent": "dsl_not_there"})
    assert "not there yet" in invoke("doctor").stdout
    assert not path.parent.exists()
    path.parent.mkdir()
    path.write_bytes(b"garbage" * 99)
    result = invoke("doctor", code=1)
    assert "file is not a database" in " ".join(result.stdout.split())
    assert path.read_bytes() == b"garbage" * 99
    assert json.loads(invoke("doctor", "--json", code=1).stdout)["store"]["problem"]
