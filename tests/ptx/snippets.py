"""Hand-written PTX as kernels, for tests of the interpreter itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, TensorMap, pointer
from dmuon.kernels.gpu.ptx_text import params_of
from ptx.interpreter import run
from ptx.memory import Memory
from ptx.report import Report

_REGISTERS = """
    .reg .pred %p<32>;
    .reg .b16 %h<64>;
    .reg .b32 %r<256>;
    .reg .f32 %f<256>;
    .reg .b64 %rd<64>;
    .reg .f64 %fd<32>;
"""


def kernel(
    body: str,
    pointers: int,
    maps: int = 0,
    *,
    threads: int = 32,
    shared: int = 0,
    cluster: tuple[int, int, int] = (1, 1, 1),
    head: str = "",
    target: str = "sm_90a",
) -> Binary:
    """A kernel around ``body``.

    It finds tensors' addresses in ``%rd0``, ``%rd1``, …, its thread in ``%r0``, and addresses of tensor maps as
    ``map0``, ``map1``, …; dynamic shared memory is ``smem``. ``head`` goes before the entry.
    """
    params = [f".param .u64 pointer{k}" for k in range(pointers)]
    params += [f".param .align 64 .b8 map{k}[128]" for k in range(maps)]
    loads = "\n".join(f"    ld.param.u64 %rd{k}, [pointer{k}];" for k in range(pointers))
    text = f"""
.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
{head}
.visible .entry snippet({", ".join(params)})
.reqntid {threads}, 1, 1
{{
{_REGISTERS}
{loads}
    mov.u32 %r0, %tid.x;
{body}
    ret;
}}
"""
    return Binary(
        KernelSpec("ptx", "snippets", target), "snippet", threads, shared, params_of(text), text, b"", cluster
    )


def call(
    body: str,
    *tensors: torch.Tensor,
    maps: tuple[TensorMap, ...] = (),
    grid: tuple[int, int, int] = (1, 1, 1),
    seed: int | None = None,
    late: bool | None = None,
    races: bool = True,
    max_steps: int = 100_000,
    **options: Any,
) -> Report:
    """Runs ``body`` on ``tensors``, which are the memory that it may touch."""
    binary = kernel(body, len(tensors), len(maps), **options)
    args = (*(pointer(tensor.data_ptr()) for tensor in tensors), *maps)
    memory = Memory.of(*tensors)
    return run(binary, Launch(grid, args), memory, seed=seed, late=late, races=races, max_steps=max_steps)


def evaluate(
    statements: str, *inputs: np.ndarray[Any, Any], result: Any, **options: Any
) -> np.ndarray[Any, Any]:
    """``statements`` on each element of ``inputs``, one a thread.

    The inputs are in ``a``, ``b``, ``c``; the result is left in ``d``: registers of their types' widths.
    """
    size = inputs[0].size
    threads = -(-size // 32) * 32
    arrays = [np.resize(np.ascontiguousarray(x), threads) for x in inputs]
    tensors = [torch.from_numpy(x.view(np.uint8).copy()) for x in arrays]
    out = np.zeros(threads, result)
    out_tensor = torch.from_numpy(out.view(np.uint8))
    lines = []
    names = "abc"
    for place, (name, array) in enumerate(zip(names, arrays, strict=False)):
        lines.append(_address(place, array.itemsize, place))
        lines.append(
            f".reg .b{8 * max(array.itemsize, 2)} {name}; ld.global.b{8 * array.itemsize} {name}, [%rd{20 + place}];"
        )
    lines.append(_address(len(arrays), out.itemsize, len(arrays)))
    lines.append(f".reg .b{8 * max(out.itemsize, 2)} d;")
    lines.append(statements)
    lines.append(f"st.global.b{8 * out.itemsize} [%rd{20 + len(arrays)}], d;")
    call("\n".join(lines), *tensors, out_tensor, threads=threads, **options)
    return out[:size]


def _address(place: int, size: int, tensor: int) -> str:
    return f"mul.wide.u32 %rd40, %r0, {size}; add.s64 %rd{20 + place}, %rd{tensor}, %rd40;"
