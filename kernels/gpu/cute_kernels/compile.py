"""From a CuTe DSL function to a :class:`Binary`, on any machine: compiling needs no GPU. Imports CuTe DSL."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import cutlass.cute as cute

from dmuon.kernels.gpu.arch import arch_named
from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.ptx_text import entry_of, params_of, threads_of


def compile_cute(
    spec: KernelSpec,
    fn: Any,
    arguments: tuple[Any, ...],
    *,
    shared_bytes: int,
    extra: Mapping[str, Any] | None = None,
) -> Binary:
    """Compile the one kernel that the ``@cute.jit`` function ``fn`` launches, for ``spec.arch``.

    ``fn`` only serves to trace its kernel: launches come from our own host code, so that its grid and its shared
    memory do not matter. Its block does: the kernel is compiled for exactly that many threads.

    Args:
        arguments: what to trace ``fn`` with: fake tensors, pointers and a stream, scalars.
        shared_bytes: dynamic shared memory to ask for at launch.
        extra: goes into the binary's ``extra``.

    Raises:
        ValueError: there is no arch of that name, ``fn`` does not launch exactly one kernel, or the kernel asks
            for more shared memory than the arch has, which CuTe DSL itself would not notice.
    """
    arch = arch_named(spec.arch)
    if shared_bytes > arch.shared_bytes:
        raise ValueError(
            f"{spec.text} needs {shared_bytes} bytes of shared memory, {arch.name} has {arch.shared_bytes}"
        )
    # The files that are kept are named after the function alone, so each compilation needs a folder of its own.
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch.name} --keep-ptx --keep-cubin --dump-dir {folder}"
        artifacts = cute.compile(fn, *arguments, options=options).artifacts
        ptx, cubin = artifacts.PTX, artifacts.CUBIN
    ptx = ptx.rstrip("\0")
    return Binary(
        spec=spec,
        entry=entry_of(ptx),
        threads=threads_of(ptx),
        shared_bytes=shared_bytes,
        params=params_of(ptx),
        ptx=ptx,
        cubin=cubin,
        extra=dict(extra or {}),
    )
