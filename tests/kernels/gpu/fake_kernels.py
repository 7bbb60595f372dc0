"""A stand-in for kernels whose compiler does as it is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dmuon.kernels.gpu
from dmuon.kernels.gpu import load, pool, sources
from dmuon.kernels.gpu.binary import KernelSpec

_REAL_START = pool._START

PTX = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry fake(.param .u64 x, .param .u32 n)
.reqntid 128, 1, 1
{
    ret;
}
"""

_SOURCE = f'''
import os, sys, time
from pathlib import Path
from dmuon.kernels.gpu.binary import Binary, Unsupported
from dmuon.kernels.gpu.ptx_text import entry_of, params_of, threads_of

PTX = """{PTX}"""

def build(spec):
    does, log = spec.options.get("does", "well"), spec.options.get("log")
    if log:
        with open(log, "a") as file:
            file.write(f"{{os.getpid()}}\\n")
    print("a compiler talks")
    os.write(1, b"a library too\\n")
    if does == "raise":
        raise RuntimeError("no such intrinsic")
    if does == "unsupported":
        raise Unsupported("needs a compiler that is not here")
    if does == "abort":
        sys.stderr.write("LLVM ERROR: cannot select\\n")
        sys.stderr.flush()
        os.abort()
    if does == "exit":
        os._exit(3)
    if does == "garbage":
        for number in range(3, 20):
            try:
                os.write(number, b"garbage" * 100)
            except OSError:
                pass
    if does == "hang":
        time.sleep(600)
    time.sleep(spec.options.get("seconds", 0))
    extra = {{"pid": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}}
    return Binary(spec, entry_of(PTX), threads_of(PTX), 4096, params_of(PTX), PTX, b"cubin", (2, 1, 1), extra)
'''


def fake(does: str = "well", dsl: str = "triton", arch: str = "sm_90a", **options: Any) -> KernelSpec:
    """A spec whose build succeeds, or does what ``does`` says; equal options are an equal spec."""
    return KernelSpec(dsl, "fake_kernel", arch, {"does": does, **options})


def _knowing_fakes(folder: Path) -> str:
    """Code that makes the fakes in ``folder`` importable. It skips the package's own import, and torch with it."""
    return f"""
import sys
from importlib import import_module, util
spec = util.find_spec("dmuon.kernels")
sys.modules["dmuon.kernels"] = util.module_from_spec(spec)
import_module("dmuon.kernels.gpu").__path__.append({str(folder)!r})
"""


def start_process(module: Path, body: str) -> subprocess.Popen[bytes]:
    """Run ``body`` in a new interpreter that knows the fakes in the file ``module``, and whose workers do."""
    folder = module.parent
    start = f"""
sys.path.append({str(Path(__file__).parent)!r})
from dmuon.kernels.gpu import load, pool
pool._START = {_knowing_fakes(folder) + _REAL_START!r}
from fake_kernels import fake
"""
    command = [sys.executable, "-c", _knowing_fakes(folder) + start + body]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make :func:`fake` specs buildable, here and in compiler processes; the cache is ``tmp_path / "cache"``.

    Returns the module's file.
    """
    folder = tmp_path / "fakes"
    folder.mkdir()
    (folder / "fake_kernel.py").write_text(_SOURCE)
    monkeypatch.setattr(dmuon.kernels.gpu, "__path__", [*dmuon.kernels.gpu.__path__, str(folder)])
    monkeypatch.setattr(pool, "_START", _knowing_fakes(folder) + _REAL_START)
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DMUON_COMPILE", raising=False)
    monkeypatch.setattr(load, "_known", {})
    sources.source_digest.cache_clear()
    return folder / "fake_kernel.py"
