"""Importing what may raise, hang or take the interpreter down with it: in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# The current folder leaves the path, as a file in it may have the module's name. Ending by os._exit keeps a
# crash while the interpreter shuts down from being taken for one of the import.
_CHILD = """
import importlib, os, sys
sys.path = [folder for folder in sys.path if folder]
importlib.import_module(sys.argv[1])
os._exit(0)
"""


@dataclass(frozen=True)
class Probe:
    """What importing ``module`` came to: ``problem`` is ``None`` if it went well, else says what happened."""

    module: str
    problem: str | None
    seconds: float


def probe_import(module: str, timeout_s: float = 60.0) -> Probe:
    """Import ``module`` in a new interpreter, waiting for at most ``timeout_s`` seconds."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, module],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TILELANG_CACHE_DIR": str(Path(scratch))},  # else it makes one at home
            start_new_session=True,
        )
        try:
            code = child.wait(timeout_s)
            output.seek(0)
            problem = _problem(code, output.read().decode(errors="replace"))
        except subprocess.TimeoutExpired:
            problem = f"still importing after {timeout_s:g} s"
        finally:
            _end(child)
    return Probe(module, problem, time.perf_counter() - start)


def _problem(code: int, output: str) -> str | None:
    if code == 0:
        return None
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = lines[-1] if lines else "it said nothing"
    if code > 0:
        return f"import failed: {said}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"import ended the interpreter with {name}: {said}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and whatever it started."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()
