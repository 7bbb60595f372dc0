"""NVIDIA's command-line compilers and libraries, wherever this machine has them.

Triton's wheel brings ``ptxas``, ``cuobjdump``, ``nvdisasm`` and CUDA's headers, and PyTorch's CUDA wheels bring
NVRTC: so a machine needs no CUDA toolkit, and where it has one, that is preferred.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from dmuon.kernels.gpu.binary import Unsupported

_STANDARD = "-std=c++17"
_REMEDY = "set CUDA_HOME to a CUDA toolkit, or install tilelang[nvcc]"


def tool(name: str) -> Path:
    """The program ``name``, from a CUDA toolkit or a wheel.

    Raises:
        Unsupported: this machine has none; the message says what brings it.
    """
    found = next(_tools(name), None)
    if found is None:
        raise Unsupported(
            f"found no {name}: put a CUDA toolkit's bin folder on PATH, or set CUDA_HOME"
            + ("" if name == "nvcc" else ", or install the triton wheel")
        )
    return found


def assemble(ptx: str, arch: str) -> bytes:
    """PTX → cubin.

    Raises:
        Unsupported: no ``ptxas`` here, or none that is new enough for this PTX.
        RuntimeError: ``ptxas`` refused it; the message is its own.
    """
    tool("ptxas")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        said = ""
        for name in ("ptxas", "ptxas-blackwell"):
            for program in _tools(name):
                command = [str(program), f"-arch={arch}", "-O3", str(source), "-o", str(target)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode == 0:
                    return target.read_bytes()
                said = done.stderr.strip()
                # An old one knows neither the PTX's version nor the arch; the next may.
                if "Unsupported .version" not in said and "is not defined for option" not in said:
                    raise RuntimeError(f"ptxas failed: {said}")
    raise Unsupported(f"no ptxas here is new enough: {said}")


def compile_cuda(source: str, arch: str, includes: Sequence[str | Path] = ()) -> tuple[str, bytes]:
    """CUDA C++ → (PTX, cubin), by nvcc, or by NVRTC where there is none.

    NVRTC has no standard library: what only it needs belongs under ``#ifdef __CUDACC_RTC__``.

    Args:
        arch: such as ``"sm_90a"``.
        includes: folders of headers, beside CUDA's own.

    Raises:
        Unsupported: no compiler here; the message says what brings one.
        RuntimeError: the compiler refused it; the message is its own.
    """
    nvcc = next(_tools("nvcc"), None)
    ptx = _by_nvcc(nvcc, source, arch, includes) if nvcc else _by_nvrtc(source, arch, includes)
    return ptx, assemble(ptx, arch)


def _by_nvcc(nvcc: Path, source: str, arch: str, includes: Sequence[str | Path]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        code, target = Path(folder, "kernel.cu"), Path(folder, "kernel.ptx")
        code.write_text(source)
        options = [_STANDARD, "-O3", "--expt-relaxed-constexpr", f"-arch={arch}"]
        done = subprocess.run(
            [nvcc, *options, *(f"-I{folder}" for folder in includes), "-ptx", code, "-o", target],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"nvcc failed: {done.stderr.strip()}")
        return target.read_text()


def _by_nvrtc(source: str, arch: str, includes: Sequence[str | Path]) -> str:
    nvrtc = _nvrtc()
    headers = next((root for root in _headers() if (root / "cccl").is_dir()), None)
    if headers is None:
        raise Unsupported(f"found NVRTC but not CUDA's C++ headers: {_REMEDY}, or the nvidia-cuda-cccl wheel")
    options = [
        f"--gpu-architecture={arch.replace('sm_', 'compute_')}",
        _STANDARD,
        "--device-as-default-execution-space",
        *(f"--include-path={folder}" for folder in (*includes, headers, headers / "cccl")),
    ]
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), array):
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise RuntimeError(f"NVRTC failed: {log.strip()}")
        return _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc() -> ctypes.CDLL:
    in_wheels = [path for path in _in_wheels("lib/libnvrtc.so.*") if ".alt." not in path.name]
    libraries = [root / "lib64" / "libnvrtc.so" for root in _toolkits()] + sorted(in_wheels, reverse=True)
    for library in libraries:
        if library.exists():
            # NVRTC asks for its built-ins by name alone, which finds them only if they are loaded.
            for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(library))
    raise Unsupported(f"found neither nvcc nor NVRTC: {_REMEDY}")


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"NVRTC failed with error {code}")


def _text(size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer))
    return buffer.value.decode(errors="replace")


def _tools(name: str) -> Iterator[Path]:
    """Every ``name`` here, the preferred one first: those of one toolkit fit together."""
    found = shutil.which(name)
    folders = [root / "bin" for root in _toolkits()]
    paths = [Path(found)] if found else []
    paths += [folder / name for folder in folders]
    paths += _in_wheels(f"bin/{name}")
    paths += [root / "bin" / name for root in _triton()]
    return (path for path in dict.fromkeys(paths) if os.access(path, os.X_OK))


def _toolkits() -> list[Path]:
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return [Path(root) for root in (*named, "/usr/local/cuda")]


def _headers() -> Iterator[Path]:
    roots = [*(root / "include" for root in _toolkits()), *_in_wheels("include")]
    roots += [root / "include" for root in _triton()]
    return (root for root in roots if (root / "cuda_fp16.h").exists())


def _in_wheels(pattern: str) -> list[Path]:
    """Files of NVIDIA's wheels: ``nvidia/<library>/…``."""
    spec = find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return [path for root in roots for path in Path(root).glob(f"*/{pattern}")]


def _triton() -> list[Path]:
    """The folder that holds Triton's copies of NVIDIA's tools; nothing is imported."""
    spec = find_spec("triton")
    return [Path(root, "backends/nvidia") for root in (spec.submodule_search_locations or ())] if spec else []
