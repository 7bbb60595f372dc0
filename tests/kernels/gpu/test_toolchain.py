"""Finding NVIDIA's compilers, in what order, and what they say when they refuse."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_kernels import PTX

from dmuon.kernels.gpu import toolchain
from dmuon.kernels.gpu.binary import Unsupported
from dmuon.kernels.gpu.ptx_text import entry_of
from dmuon.kernels.gpu.toolchain import assemble, compile_cuda, tool

CUDA = """
#include <cuda_fp16.h>
extern "C" __global__ void scale(__half *x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= __half(2.0f); }
"""

NVRTC = r"""
#include <stdio.h>
#include <string.h>
static char text[4096];
typedef void *program;
int nvrtcCreateProgram(program *p, const char *source, const char *name, int count, void *h, void *i) {
    *p = text;
    return snprintf(text, sizeof text, "source %s;", source) < 0;
}
int nvrtcCompileProgram(program p, int count, const char **options) {
    for (int k = 0; k < count; k++) strcat(strcat(text, " "), options[k]);
    return strstr(text, "wrong") ? 6 : 0;
}
int nvrtcGetPTXSize(program p, size_t *size) { return *size = strlen(text) + 1, 0; }
int nvrtcGetPTX(program p, char *out) { return strcpy(out, text), 0; }
int nvrtcGetProgramLogSize(program p, size_t *size) { return *size = 9, 0; }
int nvrtcGetProgramLog(program p, char *out) { return strcpy(out, "bad code"), 0; }
int nvrtcDestroyProgram(program *p) { return 0; }
"""


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with nothing but the toolkit in the folder this gives, which is empty."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(toolchain, "_toolkits", lambda: [tmp_path / "cuda"])
    monkeypatch.setattr(
        toolchain, "_in_wheels", lambda pattern: list((tmp_path / "wheels").glob(f"*/{pattern}"))
    )
    monkeypatch.setattr(toolchain, "_triton", lambda: [tmp_path / "triton"])
    return tmp_path / "cuda"


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_tools_are_found_on_path_then_in_toolkits_then_in_wheels(bare, tmp_path, monkeypatch):
    with pytest.raises(
        Unsupported, match=r"found no ptxas: put a CUDA toolkit's.*or install the triton wheel"
    ):
        tool("ptxas")
    with pytest.raises(Unsupported, match=r"found no nvcc: .*set CUDA_HOME$"):
        tool("nvcc")
    places = [tmp_path / "triton/bin/ptxas", tmp_path / "wheels/cu13/bin/ptxas", bare / "bin/ptxas"]
    for place in places:
        script(place, "")
        assert tool("ptxas") == place
    on_path = script(tmp_path / "path/ptxas", "")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert tool("ptxas") == on_path
    on_path.chmod(0o644)
    assert tool("ptxas") == places[-1]


def test_a_newer_ptxas_is_tried_when_one_is_too_old(bare, tmp_path):
    script(bare / "bin/ptxas", "echo 'fatal: Unsupported .version 9.9; current version is 8.0' >&2; exit 1")
    with pytest.raises(Unsupported, match=r"no ptxas here is new enough: .*Unsupported \.version 9\.9"):
        assemble(PTX, "sm_90a")
    script(
        tmp_path / "triton/bin/ptxas",
        "echo \"Value 'sm_90a' is not defined for option 'gpu-name'\" >&2; exit 1",
    )
    new = 'while [ "$1" != -o ]; do shift; done; echo cubin > "$2"'
    script(tmp_path / "triton/bin/ptxas-blackwell", new)
    assert assemble(PTX, "sm_90a") == b"cubin\n"


def test_what_ptxas_refuses_is_told(bare):
    script(bare / "bin/ptxas", "echo 'ptxas error: no such register' >&2; exit 255")
    with pytest.raises(RuntimeError, match="ptxas failed: ptxas error: no such register"):
        assemble(PTX, "sm_90a")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_real_tools_compile(arch):
    try:
        tool("nvcc"), tool("ptxas")
    except Unsupported as error:
        pytest.skip(str(error))
    ptx, cubin = compile_cuda(CUDA, arch)
    assert entry_of(ptx) == "scale" and f".target {arch}" in ptx and cubin.startswith(b"\x7fELF")
    with pytest.raises(RuntimeError, match=r"nvcc failed: .*kernel\.cu.*error"):
        compile_cuda("this is no C++", arch)
    with pytest.raises(RuntimeError, match="ptxas failed"):
        assemble(PTX.replace("ret;", "retire;"), arch)


def test_nvrtc_takes_the_place_of_nvcc(bare, tmp_path):
    with pytest.raises(Unsupported, match=r"neither nvcc nor NVRTC: set CUDA_HOME .* tilelang\[nvcc\]"):
        compile_cuda(CUDA, "sm_90a")
    compiler = shutil.which("cc", path=os.defpath)
    if compiler is None:
        pytest.skip("needs cc")
    library = tmp_path / "wheels/cu13/lib/libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    (tmp_path / "nvrtc.c").write_text(NVRTC)
    command = [compiler, "-shared", "-fPIC", "-o", library, tmp_path / "nvrtc.c"]
    subprocess.run(command, check=True, env={"PATH": os.defpath})
    (tmp_path / "triton/include").mkdir(parents=True)
    (tmp_path / "triton/include/cuda_fp16.h").write_text("")
    with pytest.raises(Unsupported, match=r"not CUDA's C\+\+ headers: .* nvidia-cuda-cccl wheel"):
        compile_cuda("code", "sm_90a")
    (bare / "include/cccl").mkdir(parents=True)
    (bare / "include/cuda_fp16.h").write_text("")
    script(bare / "bin/ptxas", 'while [ "$1" != -o ]; do shift; done; echo cubin > "$2"')
    ptx, cubin = compile_cuda("code", "sm_90a", [tmp_path / "own"])
    headers = bare / "include"
    assert ptx == (
        "source code; --gpu-architecture=compute_90a -std=c++17 --device-as-default-execution-space "
        f"--include-path={tmp_path}/own --include-path={headers} --include-path={headers}/cccl"
    )
    assert cubin == b"cubin\n"
    with pytest.raises(RuntimeError, match="NVRTC failed: bad code"):
        compile_cuda("wrong", "sm_90a")
