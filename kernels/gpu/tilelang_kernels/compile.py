"""From a TileLang function to a :class:`Binary`, on any machine: compiling needs no GPU. Imports TileLang."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.ptx_text import entry_of, params_of, threads_of
from dmuon.kernels.gpu.toolchain import compile_cuda


@contextmanager
def _quiet_import() -> Iterator[None]:
    """TileLang's import changes PYTHONPATH, which child processes would inherit, and makes a folder at home."""
    path = os.environ.get("PYTHONPATH")
    os.environ.setdefault("TILELANG_CACHE_DIR", str(Path(tempfile.gettempdir(), "dmuon-tilelang")))
    try:
        yield
    finally:
        if path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = path


with _quiet_import():
    import tilelang
    from tilelang import tvm
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""TileLang's names of dtypes."""

_MAP_DTYPES = {6: "fp16", 7: "fp32", 9: "bf16"}
"""By their numbers in CUDA's enumeration CUtensorMapDataType."""

_HELPERS = """
namespace dmuon {
// 16 bytes from global to shared memory, of which `elements` exist (none if negative); the rest becomes zero.
template <class E> __device__ __forceinline__ void copy_in(E *shared, const E *global, int elements) {
  int bytes = max(0, min(elements, 16 / int(sizeof(E)))) * int(sizeof(E));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(unsigned(__cvta_generic_to_shared(shared))), "l"(global), "r"(bytes) : "memory");
}
// The same the other way: 16 bytes at once, or one element at a time at an edge.
template <class E> __device__ __forceinline__ void copy_out(const E *shared, E *global, int elements) {
  if (elements >= 16 / int(sizeof(E))) {
    *reinterpret_cast<uint4 *>(global) = *reinterpret_cast<const uint4 *>(shared);
  } else {
    #pragma unroll 1
    for (int k = 0; k < elements; ++k) global[k] = shared[k];
  }
}
// The maximum of `value` and |x|, or the sum of it and (scale x)^2, over what exists of 16 bytes of elements x.
template <bool sum, class E>
__device__ __forceinline__ float fold(float value, const E *global, int elements, float scale) {
  constexpr int lanes = 16 / sizeof(E);
  uint4 data = make_uint4(0, 0, 0, 0);
  if (elements >= lanes) {
    data = *reinterpret_cast<const uint4 *>(global);
  } else {
    #pragma unroll
    for (int k = 0; k < lanes; ++k) {
      if (k < elements) reinterpret_cast<E *>(&data)[k] = global[k];
    }
  }
  #pragma unroll
  for (int k = 0; k < lanes; ++k) {
    float x = float(reinterpret_cast<E *>(&data)[k]);
    value = sum ? value + (x * scale) * (x * scale) : fmaxf(value, fabsf(x));
  }
  return value;
}
// Of all threads' values, the same in each of them; `scratch` has a float for each warp.
template <bool sum> __device__ __forceinline__ float block_fold(float value, float *scratch) {
  for (int lane = 16; lane; lane /= 2) {
    float other = __shfl_xor_sync(0xffffffffu, value, lane);
    value = sum ? value + other : fmaxf(value, other);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) {
    value = sum ? value + scratch[warp] : fmaxf(value, scratch[warp]);
  }
  return value;
}
}
"""


def lower(function: Any, arch: str, wgmma: bool = True) -> Any:
    """TileLang's artifact for ``arch``: CUDA source, host and device modules.

    Functions guard accesses and place barriers themselves: TileLang's guards would also skip the writing of zeros,
    and it misses barriers in branches.

    Args:
        wgmma: multiply by wgmma where ``arch`` has it, rather than by mma.sync.
    """
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    config = {
        "tl.disable_safe_memory_legalize": True,
        "tl.disable_thread_storage_sync": True,
        "tl.disable_wgmma": not wgmma,
    }
    with target, tvm.transform.PassContext(opt_level=3, config=config):
        return tilelang.lower(function, target=target)


def shared_bytes(artifact: Any) -> int:
    """Dynamic shared memory of a lowered kernel."""
    (device,) = artifact.device_mod.functions.values()
    return int(device.attrs.get("dyn_shared_memory_buf", 0))


def tensor_maps(artifact: Any) -> dict[str, dict[str, Any]]:
    """The tensor maps that the lowered host code encodes, by the kernel parameter's name.

    Of each: ``dtype``; ``shape`` and ``strides`` (bytes) as expressions of the function's parameters, fastest
    dimension first; ``box``; ``swizzle`` in bytes.

    Raises:
        ValueError: one that :class:`~dmuon.kernels.gpu.binary.TensorMap` cannot describe.
    """
    (host,) = artifact.host_mod.functions.values()
    maps = {}
    for name, args in host.attrs.get("tma_descriptor_args", {}).items():
        _, _, kind, rank, _, *rest = args
        shape, strides, box, steps = (rest[k * int(rank) :][: int(rank)] for k in range(4))
        interleave, swizzle, _, fill = (int(arg) for arg in rest[4 * int(rank) :])
        if int(kind) not in _MAP_DTYPES or any(int(step) != 1 for step in steps) or interleave or fill:
            raise ValueError(f"tensor map {name.name} is of an unknown kind: {args}")
        maps[str(name.name)] = {
            "dtype": _MAP_DTYPES[int(kind)],
            "shape": [_expression(size) for size in shape],
            "strides": [_expression(stride) for stride in strides[1:]],
            "box": [int(size) for size in box],
            "swizzle": (0, 32, 64, 128)[swizzle],
        }
    return maps


def compile_tilelang(spec: KernelSpec, function: Any, wgmma: bool = True) -> Binary:
    """Compile for ``spec.arch``. The names of the kernel's parameters, in order, are ``extra["params"]``, since
    TileLang orders them, and drops those it does not use; its tensor maps are ``extra["maps"]``."""
    artifact = lower(function, spec.arch, wgmma)
    source = artifact.kernel_source
    ptx, cubin = compile_cuda(_HELPERS + source, spec.arch, (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR))
    return Binary(
        spec=spec,
        entry=entry_of(ptx),
        threads=threads_of(ptx),
        shared_bytes=shared_bytes(artifact),
        params=params_of(ptx),
        ptx=ptx,
        cubin=cubin,
        extra={"params": _parameters(source), "maps": tensor_maps(artifact)},
    )


def _expression(value: Any) -> str:
    """In Python, of the function's parameters."""
    return str(value).replace("T.int64", "").replace("T.Cast", "")


def _parameters(source: str) -> list[str]:
    """Names of the kernel's parameters, from its declaration in CUDA."""
    found = re.search(r"__global__ void \w+\((.*)\);", source)
    assert found, "the CUDA source declares no kernel"
    return [text.split()[-1] for text in found.group(1).split(",")]
