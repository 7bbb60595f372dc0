"""What the launcher asks of the CUDA driver, on a stand-in compiled against the real header."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dmuon.kernels.gpu import driver, toolchain
from dmuon.kernels.gpu.binary import (
    Binary,
    KernelSpec,
    Launch,
    Param,
    TensorMap,
    Unsupported,
    f32,
    i32,
    pointer,
)
from dmuon.kernels.gpu.driver import prepared

CONTEXT = "0xc0000000064"
SPEC = KernelSpec("triton", "fake_kernel", "sm_90a")
PARAMS = (Param(0, 8), Param(8, 4), Param(12, 4), Param(64, 128))
BINARY = Binary(SPEC, "fake", 384, 200 << 10, PARAMS, "", b"machine code", (2, 1, 1))
MAP = TensorMap(0x7F0000000100, "bf16", (4096, 512, 3), (8192, 1 << 33), (64, 128, 1), 128)
LAUNCH = Launch((132, 2, 1), (pointer(0x123456789ABC), i32(-2), f32(1.5), MAP))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    headers, compiler = next(toolchain._headers(), None), shutil.which("cc")
    if headers is None or compiler is None:
        pytest.skip("needs cc and cuda.h, which the triton wheel has")
    path = tmp_path_factory.mktemp("driver") / "libfake.so"
    source = Path(__file__).with_name("fake_cuda.c")
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", f"-I{headers}"]
    subprocess.run([*command, "-o", path, source], check=True)
    library = ctypes.CDLL(str(path))
    library.fake_log.restype = ctypes.c_char_p
    library.fake_set_current.argtypes = [ctypes.c_void_p]
    return library


@pytest.fixture
def fake(library, monkeypatch):
    """The driver's log, one line a call."""
    monkeypatch.setattr(driver, "LIBRARIES", (library._name,))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=0x5000 + index)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    driver._driver.cache_clear()
    library.fake_set_current(None)
    library.fake_clear()
    (ctypes.c_int * 16).in_dll(library, "fake_param_sizes")[:] = [8, 4, 4, 128] + [0] * 12
    fails(library, b"")
    yield lambda: library.fake_log().decode().splitlines()
    driver._driver.cache_clear()


def fails(library: ctypes.CDLL, function: bytes, code: int = 1) -> None:
    ctypes.c_char_p.in_dll(library, "fake_failing").value = function
    ctypes.c_int.in_dll(library, "fake_failure").value = code


def test_a_launch_from_start_to_end(fake):
    run = prepared(BINARY, LAUNCH, torch.device("cuda", 0))
    assert fake() == [
        "cuInit 0",
        "cuDeviceGet 0",
        "cuDevicePrimaryCtxRetain 100",
        f"cuCtxPushCurrent {CONTEXT}",
        f"cuModuleLoadData {CONTEXT} machine code",
        "cuModuleGetFunction 0xb00000000000 fake",
        "cuFuncSetAttribute 0xf00000000000 shared 204800",
        "cuTensorMapEncodeTiled bf16 0x7f0000000100 shape 4096 512 3 strides 8192 8589934592 box 64/1 128/1 1/1 "
        "swizzle 128 plain",
        "cuCtxPopCurrent",
    ]
    run()
    encoded = b"map".hex() + "5a" * 125
    assert fake()[9:] == [
        f"cuCtxPushCurrent {CONTEXT}",
        f"cuLaunchKernelEx 0xf00000000000 ctx {CONTEXT} grid 132 2 1 block 384 1 1 shared 204800 stream 0x5000 "
        f"cluster 2 1 1 extra (nil) params bc9a785634120000 feffffff 0000c03f {encoded}",
        "cuCtxPopCurrent",
    ]


def test_in_the_current_context_a_launch_is_one_call(fake, library):
    run = prepared(BINARY, LAUNCH, torch.device("cuda", 0))
    library.fake_set_current(int(CONTEXT, 16))
    library.fake_clear()
    run()
    run()
    assert [line.split()[0] for line in fake()] == ["cuLaunchKernelEx"] * 2


def test_no_cluster_and_no_shared_memory_need_no_attributes(fake):
    prepared(replace(BINARY, cluster=(1, 1, 1), shared_bytes=0), LAUNCH, torch.device("cuda", 0))()
    assert "cluster" not in fake()[-2] and not any("cuFuncSetAttribute" in line for line in fake())


def test_a_kernel_is_loaded_once_for_each_device_and_a_map_encoded_once(fake):
    other = replace(LAUNCH, grid=(1, 1, 1))
    for device in ("cuda:0", "cuda", "cuda:1", "cuda:0"):
        prepared(BINARY, LAUNCH, torch.device(device))()
        prepared(BINARY, other, torch.device(device))()
    names = [line.split()[0] for line in fake()]
    assert names.count("cuModuleLoadData") == 2 and names.count("cuTensorMapEncodeTiled") == 1
    streams = [line.split("stream ")[1].split()[0] for line in fake() if "cuLaunchKernelEx" in line]
    assert streams == [*["0x5000"] * 2, *["0x5001"] * 4, *["0x5000"] * 2]  # cuda is cuda:1 here


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (b"cuInit", "initialising the CUDA driver"),
        (b"cuModuleLoadData", "loading fake, compiled for sm_90a, on cuda:0"),
        (b"cuModuleGetFunction", "looking up fake in its cubin"),
        (b"cuFuncSetAttribute", "giving fake 204800 bytes of shared memory"),
        (b"cuTensorMapEncodeTiled", r"encoding TensorMap\(address=139.*'bf16'"),
        (b"cuLaunchKernelEx", r"launching fake with a grid of \(132, 2, 1\)"),
    ],
)
def test_what_the_driver_refuses_names_the_kernel(fake, library, function, says):
    fails(library, function)
    with pytest.raises(RuntimeError, match=f"{says}.*: CUDA_ERROR_INVALID_VALUE: invalid argument"):
        prepared(BINARY, LAUNCH, torch.device("cuda", 0))()
    pushed = sum("Push" in line for line in fake())
    assert pushed == sum("Pop" in line for line in fake())


def test_an_error_without_a_name_shows_its_number(fake, library):
    fails(library, b"cuLaunchKernelEx", 999)
    with pytest.raises(RuntimeError, match="CUDA error 999"):
        prepared(BINARY, LAUNCH, torch.device("cuda", 0))()


@pytest.mark.parametrize("code", [200, 209, 222])
def test_a_driver_older_than_the_compiler_is_unsupported(fake, library, code):
    fails(library, b"cuModuleLoadData", code)
    with pytest.raises(Unsupported, match=rf"loading fake.*error {code}; the driver supports CUDA 12\.8"):
        prepared(BINARY, LAUNCH, torch.device("cuda", 0))


def test_arguments_that_do_not_fit_are_refused(fake):
    with pytest.raises(ValueError, match="fake takes 4 arguments, got 1"):
        prepared(BINARY, Launch((1, 1, 1), (i32(1),)), torch.device("cuda", 0))


def test_no_driver_or_an_old_one_is_unsupported(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "LIBRARIES", (str(tmp_path / "libcuda.so.1"),))
    with pytest.raises(Unsupported, match=r"no CUDA driver: none of .*libcuda\.so\.1"):
        prepared(BINARY, LAUNCH, torch.device("cuda", 0))
    monkeypatch.setattr(driver, "LIBRARIES", ("libm.so.6",))
    driver._driver.cache_clear()
    with pytest.raises(Unsupported, match="too old, it has no cuInit"):
        prepared(BINARY, LAUNCH, torch.device("cuda", 0))


def test_threads_launch_on_their_own_streams(fake, library, monkeypatch):
    local = threading.local()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=local.stream))
    run = prepared(replace(BINARY, cluster=(1, 1, 1)), LAUNCH, torch.device("cuda", 0))
    library.fake_set_current(int(CONTEXT, 16))
    library.fake_clear()

    def work(stream: int) -> None:
        local.stream = stream
        for _ in range(10):
            run()

    threads = [threading.Thread(target=work, args=(0x9000 + k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    streams = [line.split("stream ")[1].split()[0] for line in fake()]
    assert sorted(streams) == sorted(f"{0x9000 + k:#x}" for k in range(4) for _ in range(10))
