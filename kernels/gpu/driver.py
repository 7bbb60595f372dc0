"""Launching binaries through the CUDA driver, with nothing but ``libcuda`` and PyTorch's streams."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from dmuon.kernels.gpu.binary import Binary, Launch, TensorMap, Unsupported, pack

LIBRARIES = ("libcuda.so.1", "libcuda.so")

_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGNMENT = 128, 64
_DTYPES = {"fp16": 6, "fp32": 7, "bf16": 9}  # CU_TENSOR_MAP_DATA_TYPE_…
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_…
_PROMOTION_128_BYTES = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_NOT_FOR_THIS_DRIVER = (
    200,
    209,
    222,
)  # CUDA_ERROR_INVALID_IMAGE, …_NO_BINARY_FOR_GPU, …_UNSUPPORTED_PTX_VERSION
_ENCODED_MAPS = 4096


_HANDLE, _OUT = ctypes.c_void_p, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, _OUT),
    "cuGetErrorString": (ctypes.c_int, _OUT),
    "cuDriverGetVersion": (_OUT,),
    "cuDeviceGet": (_OUT, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, ctypes.c_int),
    "cuCtxGetCurrent": (_OUT,),
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuModuleLoadData": (_OUT, ctypes.c_char_p),
    "cuModuleGetFunction": (_OUT, _HANDLE, ctypes.c_char_p),
    "cuFuncSetAttribute": (_HANDLE, ctypes.c_int, ctypes.c_int),
    "cuLaunchKernelEx": (ctypes.c_void_p, _HANDLE, ctypes.c_void_p, ctypes.c_void_p),
    "cuTensorMapEncodeTiled": (
        *(_OUT, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
        *(ctypes.c_void_p,) * 4,
        *(ctypes.c_int,) * 4,
    ),
}


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``; of its value, a union, the dimensions of a cluster."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("cluster", ctypes.c_uint * 3),
        ("rest", ctypes.c_char * 52),
    )


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


class Driver:
    """The functions of ``libcuda`` that launching needs.

    Args:
        library: with those functions, or a stand-in.

    Raises:
        Unsupported: it lacks one of them.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        for name, types in _FUNCTIONS.items():
            try:
                getattr(library, name).argtypes = types
            except AttributeError:
                raise Unsupported(
                    f"the CUDA driver is too old, it has no {name}; 12.0 or later does"
                ) from None
        self.check(library.cuInit(0), "initialising the CUDA driver")
        self._contexts: dict[int, int] = {}
        self._functions: dict[tuple[int, str, bytes], ctypes.c_void_p] = {}
        self.encode = lru_cache(_ENCODED_MAPS)(self._encode)

    def check(self, code: int, what: str) -> None:
        """Raise RuntimeError about ``what`` unless ``code`` is success."""
        if code:
            raise RuntimeError(self._problem(code, what))

    def _problem(self, code: int, what: str) -> str:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(name))
        self.library.cuGetErrorString(code, ctypes.byref(text))
        words = [each.value.decode() for each in (name, text) if each.value]
        return f"{what}: {': '.join(words) or f'CUDA error {code}'}"

    def _version(self) -> str:
        version = ctypes.c_int()
        self.library.cuDriverGetVersion(ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def context(self, device: int) -> int:
        """The primary context of a device, which is the one that PyTorch uses."""
        if device not in self._contexts:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self.check(self.library.cuDeviceGet(ctypes.byref(handle), device), f"finding cuda:{device}")
            code = self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
            self.check(code, f"taking the context of cuda:{device}")
            self._contexts[device] = context.value or 0
        return self._contexts[device]

    def is_current(self, context: int) -> bool:
        """Whether this thread is at ``context``; it may be new, or at another device."""
        found = ctypes.c_void_p()
        self.check(self.library.cuCtxGetCurrent(ctypes.byref(found)), "asking for the current context")
        return found.value == context

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Make ``context`` this thread's for a while."""
        self.check(self.library.cuCtxPushCurrent_v2(context), "entering a context")
        try:
            yield
        finally:
            self.check(self.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())), "leaving a context")

    def function(self, device: int, binary: Binary) -> ctypes.c_void_p:
        """The kernel, loaded in the current context, which is that of ``device``."""
        key = (device, binary.entry, binary.cubin)
        if key not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            code = self.library.cuModuleLoadData(ctypes.byref(module), binary.cubin)
            what = f"loading {binary.entry}, compiled for {binary.spec.arch}, on cuda:{device}"
            if code in _NOT_FOR_THIS_DRIVER:
                raise Unsupported(f"{self._problem(code, what)}; the driver supports CUDA {self._version()}")
            self.check(code, what)
            code = self.library.cuModuleGetFunction(ctypes.byref(function), module, binary.entry.encode())
            self.check(code, f"looking up {binary.entry} in its cubin")
            if binary.shared_bytes:
                code = self.library.cuFuncSetAttribute(
                    function, _MAX_DYNAMIC_SHARED_BYTES, binary.shared_bytes
                )
                self.check(code, f"giving {binary.entry} {binary.shared_bytes} bytes of shared memory")
            self._functions[key] = function
        return self._functions[key]

    def _encode(self, tensor_map: TensorMap) -> bytes:
        """The 128 bytes of a descriptor: :attr:`encode`, which remembers them."""
        buffer = ctypes.create_string_buffer(_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
        start = -(-ctypes.addressof(buffer) // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT
        rank = len(tensor_map.shape)
        code = self.library.cuTensorMapEncodeTiled(
            start,
            _DTYPES[tensor_map.dtype],
            rank,
            tensor_map.address,
            (ctypes.c_uint64 * rank)(*tensor_map.shape),
            (ctypes.c_uint64 * max(rank - 1, 1))(*tensor_map.strides),
            (ctypes.c_uint32 * rank)(*tensor_map.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,  # not interleaved
            _SWIZZLES[tensor_map.swizzle],
            _PROMOTION_128_BYTES,
            0,  # out of bounds is zero
        )
        self.check(code, f"encoding {tensor_map}")
        return ctypes.string_at(start, _TENSOR_MAP_BYTES)


def prepared(binary: Binary, launch: Launch, device: torch.device) -> Callable[[], None]:
    """A function that performs ``launch`` on PyTorch's current stream of ``device``, whichever that is by then.

    All that can be done beforehand is done here: loading the kernel (once per device), encoding tensor maps,
    packing parameters. The function itself neither allocates nor synchronises, so that a CUDA graph can capture
    it; prepare outside the capture.

    Raises:
        Unsupported: there is no CUDA driver, or it is too old for launches such as this or for the compiler.
        ValueError: the arguments do not fit the binary's parameters.
        RuntimeError: the driver refused; the message names kernel and cause. So does the function.
    """
    driver = _driver()
    index = torch.cuda.current_device() if device.index is None else device.index
    return _Prepared(driver, index, binary, launch)


class _Prepared:
    """A launch with all that the driver reads of it, kept for as long as it may be called."""

    def __init__(self, driver: Driver, device: int, binary: Binary, launch: Launch) -> None:
        self._driver, self._device, self._context = driver, device, driver.context(device)
        with driver.current(self._context):
            self._function = driver.function(device, binary)
            self._buffer = ctypes.create_string_buffer(pack(binary, launch, driver.encode))
        # A pointer to each parameter, not one to them all: where tensor maps need it, ptxas shifts parameters from
        # where the PTX has them, and only the driver knows by how much.
        start = ctypes.addressof(self._buffer)
        offsets = (start + param.offset for param in binary.params)
        self._params = (ctypes.c_void_p * len(binary.params))(*offsets)
        self._cluster = LaunchAttribute(id=_CLUSTER_DIMENSION, cluster=binary.cluster)
        self._config = LaunchConfig(
            grid=launch.grid,
            block=(binary.threads, 1, 1),
            shared_bytes=binary.shared_bytes,
            attributes=ctypes.pointer(self._cluster),
            attribute_count=int(binary.cluster != (1, 1, 1)),
        )
        self._reference = ctypes.byref(self._config)
        self._what = f"launching {binary.entry} with a grid of {launch.grid}"
        # Another thread may perform it on another stream.
        self._lock = threading.Lock()

    def __call__(self) -> None:
        if self._driver.is_current(self._context):
            self._launch()
        else:
            with self._driver.current(self._context):
                self._launch()

    def _launch(self) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with self._lock:
            self._config.stream = stream
            code = self._driver.library.cuLaunchKernelEx(self._reference, self._function, self._params, None)
        self._driver.check(code, self._what)


@lru_cache
def _driver() -> Driver:
    for name in LIBRARIES:
        try:
            return Driver(ctypes.CDLL(name))
        except OSError:
            continue
    raise Unsupported(f"there is no CUDA driver: none of {', '.join(LIBRARIES)} can be loaded")
