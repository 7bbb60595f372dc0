"""The whole way with a real compiler: a Triton kernel built in another process, loaded in a third without Triton."""

from __future__ import annotations

import pytest
from fake_kernels import install, start_process

from dmuon.kernels.backends.compiled import TRITON
from dmuon.kernels.gpu import pool
from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.load import compile_all
from dmuon.kernels.gpu.ptx_text import entry_of, params_of

START = pool._START


def test_a_triton_kernel_is_built_here_and_loaded_without_triton(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    module = install(tmp_path, monkeypatch)
    monkeypatch.setattr(pool, "_START", START)
    specs = TRITON.specs(32, 32, "bf16", ARCHS["sm_80"], ((1.5, -0.5, 0.0),), ())
    [outcome] = compile_all([spec for spec in specs if spec.module.endswith("symmetric_kernel")][:1], jobs=1)
    assert outcome.status == "compiled", outcome.reason
    binary = outcome.binary
    assert binary is not None and binary.cubin.startswith(b"\x7fELF")
    assert binary.entry == entry_of(binary.ptx) and binary.params == params_of(binary.ptx)

    body = f"""
import time
from dmuon.kernels.gpu.binary import KernelSpec
spec = KernelSpec.from_text({outcome.spec.text!r})
load._cache(load.default_folder()).load(spec)  # the first time reads and digests the sources
start = time.perf_counter()
binary = load.binary_for(spec)
seconds = time.perf_counter() - start
assert binary.entry == {binary.entry!r} and len(binary.cubin) == {len(binary.cubin)}
assert seconds < 0.1, seconds
heavy = {{"torch", "triton", "tilelang", "cutlass"}} & set(sys.modules)
assert not heavy, heavy
"""
    assert start_process(module, body).wait(60) == 0
