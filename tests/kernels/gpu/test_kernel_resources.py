"""What is read from cubins, and the occupancy that follows, against NVIDIA's own calculator."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile

import pytest
from fake_kernels import PTX, fake

from dmuon.kernels.gpu import toolchain
from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary, Unsupported
from dmuon.kernels.gpu.ptx_text import params_of
from dmuon.kernels.gpu.resources import instructions, occupancy, resources_of
from dmuon.kernels.gpu.roofline import DEVICES, SPLITS, best_splits, symmetric_estimate

CALCULATOR = r"""
#include <limits.h>
#include <cuda_occupancy.h>

int blocks(int major, int minor, int threads_per_sm, int shared_per_sm, int threads, int registers, int shared) {
    cudaOccDeviceProp device = {0};
    device.computeMajor = major, device.computeMinor = minor;
    device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = threads_per_sm;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536, device.warpSize = 32;
    device.sharedMemPerBlock = 49152, device.sharedMemPerMultiprocessor = shared_per_sm;
    device.sharedMemPerBlockOptin = shared_per_sm - 1024, device.reservedSharedMemPerBlock = 1024;
    device.numSms = 100;
    cudaOccFuncAttributes kernel = {0};
    kernel.maxThreadsPerBlock = INT_MAX, kernel.numRegs = registers;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, kernel.maxDynamicSharedSizeBytes = shared_per_sm - 1024;
    cudaOccDeviceState state = {0};
    state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult result;
    int error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
    return error ? -error : result.activeBlocksPerMultiprocessor;
}
"""

CUDA = r"""
#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(256) kernel(float *x, const uint4 *y, uint4 *z) {
    __shared__ float s[300];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    float a[32];
    for (int i = 0; i < 99; i++) a[int(x[i]) & 31] += s[i];
    x[threadIdx.x] = a[int(x[0]) & 31] + s[255 - threadIdx.x];
    z[threadIdx.x] = y[threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    headers, compiler = next(toolchain._headers(), None), shutil.which("cc")
    if headers is None or compiler is None or not (headers / "cuda_occupancy.h").exists():
        pytest.skip("needs cc and cuda_occupancy.h, which the triton wheel has")
    folder = tmp_path_factory.mktemp("occupancy")
    (folder / "blocks.c").write_text(CALCULATOR)
    library = folder / "libblocks.so"
    command = [compiler, "-shared", "-fPIC", "-O2", f"-I{headers}", "-o", library, folder / "blocks.c"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_occupancy_is_what_nvidia_computes(calculator, arch):
    for threads in (32, 64, 96, 128, 160, 256, 384, 512, 768, 1024):
        for registers in (16, 24, 32, 40, 63, 64, 65, 90, 128, 168, 232, 255):
            for shared in (0, 1, 1000, 8 << 10, 15 << 10, 48 << 10, 49 << 10, 98 << 10, 99 << 10):
                expected = calculator.blocks(
                    *arch.capability,
                    arch.threads_per_sm,
                    arch.shared_bytes_per_sm,
                    *(threads, registers, shared),
                )
                assert expected >= 0
                blocks, limit = occupancy(arch, threads, registers, shared)
                assert blocks == expected, (threads, registers, shared, limit)


def test_the_limit_is_named():
    arch = ARCHS["sm_90a"]
    assert occupancy(arch, 128, 255, 1 << 10) == (2, "registers")
    assert occupancy(arch, 128, 64, 100 << 10) == (2, "shared memory")
    assert occupancy(arch, 1024, 16, 0) == (2, "threads")
    assert occupancy(arch, 32, 16, 0) == (32, "blocks")


def test_instructions_are_counted_by_what_they_move():
    assembly = """
        /*0010*/                   LDGSTS.E.BYPASS.LTC128B.128 [R1], desc[UR4][R2.64] ;
        /*0020*/              @P0  LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0030*/             @!P1  STG.E desc[UR4][R2.64], R4 ;
        /*0040*/              @UP2 UTMALDG.3D.MULTICAST [UR8], [UR4], UR6, desc[UR7] ;
        /*0050*/                   UTMASTG.2D [UR8], [UR4] ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0070*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0080*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0090*/                   STS.U16 [R1], R2 ;
        /*00a0*/                   STL.64 [R1], R2 ;
        /*00b0*/                   LDSM.16.M88.4 R4, [R1] ;
        /*00c0*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;
        /*00d0*/                   LDGDEPBAR ;
        /*00e0*/                   ULDC.64 UR4, c[0x0][0x118] ;
        /*00f0*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
    """
    assert instructions(assembly) == {
        "LDGSTS.128": 1,
        "LDG.128": 1,
        "STG.32": 1,
        "UTMALDG.3D": 1,
        "UTMASTG.2D": 1,
        "HGMMA.64x128x16": 1,
        "HMMA.16816": 2,
        "STS.16": 1,
        "STL.64": 1,
        "LDSM": 1,
        "UTCHMMA": 1,
    }


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_a_cubin_is_examined(arch):
    try:
        ptx, cubin = toolchain.compile_cuda(CUDA, arch)
        toolchain.tool("cuobjdump")
    except Unsupported as error:
        pytest.skip(str(error))
    found = resources_of(Binary(fake(arch=arch), "kernel", 256, 10_000, (), ptx, cubin))
    assert found.static_shared_bytes == 1200 and found.dynamic_shared_bytes == 10_000
    assert 8 < found.registers < 128 and found.local_bytes >= 128
    assert found.instructions["LDG.128"] == found.instructions["STG.128"] == 1
    assert any(name.startswith("STL") for name in found.instructions)
    arch_ = ARCHS[arch]
    assert (found.blocks_per_sm, found.limit) == occupancy(arch_, 256, found.registers, 11_200)
    assert found.occupancy == found.blocks_per_sm * 256 / arch_.threads_per_sm


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_parameters_have_the_sizes_that_the_cubin_expects(arch):
    """The driver copies each by the cubin's size from where the binary's layout has it."""
    code = """
struct alignas(64) Map { unsigned long long words[16]; };
extern "C" __global__ void kernel(int a, const __grid_constant__ Map map, float *p, short b, long long c, char d) {
    p[a] = map.words[threadIdx.x] + b + c + d;
}
"""
    try:
        ptx, cubin = toolchain.compile_cuda(code, arch)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [str(toolchain.tool("cuobjdump")), "-elf", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except Unsupported as error:
        pytest.skip(str(error))
    infos = re.findall(r"Ordinal : 0x([0-9a-f]+)\s+Offset  : 0x[0-9a-f]+\s+Size    : 0x([0-9a-f]+)", text)
    expected = [size for _, size in sorted((int(ordinal, 16), int(size, 16)) for ordinal, size in infos)]
    params = params_of(ptx)
    assert [param.size for param in params] == expected == [4, 128, 8, 2, 8, 1]
    assert [param.offset for param in params] == [0, 64, 192, 200, 208, 216]


def test_what_is_no_cubin_is_an_error():
    try:
        toolchain.tool("cuobjdump")
    except Unsupported as error:
        pytest.skip(str(error))
    with pytest.raises(RuntimeError, match="cuobjdump failed"):
        resources_of(Binary(fake(), "fake", 128, 0, (), PTX, b"no cubin"))


def test_a_roof_is_no_lower_than_either_bound():
    device = next(each for each in DEVICES if each.name == "H200")
    large = symmetric_estimate(device, 4096, 16384)
    assert large.bound == "compute" and large.tflops == pytest.approx(device.tflops)
    assert large.ms == pytest.approx(4096 * 4097 * 16384 / 989.4e12 * 1e3)
    thin = symmetric_estimate(device, 4096, 16)
    assert thin.bound == "memory" and thin.ms == pytest.approx(2 * (4096 * 16 + 4096**2) / 4800e9 * 1e3)
    assert symmetric_estimate(device, 64, 512, batch=64).ms == pytest.approx(
        64 * symmetric_estimate(device, 64, 512).ms
    )


def test_tiles_cost_their_waves():
    device = next(each for each in DEVICES if each.name == "H200")
    one, two = (symmetric_estimate(device, m, 8192, tile=128) for m in (15 * 128, 16 * 128))
    assert two.compute_ms == pytest.approx(2 * one.compute_ms)  # 120 and 136 tiles on 132 multiprocessors
    assert one.compute_ms > symmetric_estimate(device, 15 * 128, 8192).compute_ms


def test_dividing_the_last_wave_pays_where_it_leaves_multiprocessors_idle():
    device = next(each for each in DEVICES if each.name == "H200")
    # 136 tiles: a wave of 132, and one of 4 that takes as long.
    whole, divided = (symmetric_estimate(device, 2048, 8192, tile=128, splits=splits) for splits in (1, 16))
    assert divided.compute_ms == pytest.approx(whole.compute_ms / 2 * (1 + 1 / 16))
    assert divided.sums_ms == pytest.approx(2e-3 + 2 * 4 * 16 * 128**2 * 4 / 4800e9 * 1e3)
    assert divided.ms == divided.compute_ms + divided.sums_ms < 0.65 * whole.ms
    assert best_splits(device, 2048, 8192, 128) in SPLITS
    # Complete waves have nothing to divide, nor is a short inner dimension worth it.
    assert best_splits(device, 11 * 128, 8192, 128) > 1 == best_splits(device, 128 * 11, 256, 128)
    full = next(device.multiprocessors * k for k in range(1, 99) if _triangular(device.multiprocessors * k))
    side = int((8 * full + 1) ** 0.5 - 1) // 2
    assert best_splits(device, side * 128, 8192, 128) == 1


def _triangular(number):
    return int((8 * number + 1) ** 0.5) ** 2 == 8 * number + 1
