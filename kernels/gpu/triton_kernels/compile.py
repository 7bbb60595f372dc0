"""From a Triton kernel to a :class:`Binary`, on any machine: compiling needs no GPU. Imports Triton."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from dmuon.kernels.gpu.arch import arch_named
from dmuon.kernels.gpu.binary import Binary, KernelSpec
from dmuon.kernels.gpu.ptx_text import entry_of, params_of, threads_of
from dmuon.kernels.gpu.toolchain import assemble


def compile_triton(
    spec: KernelSpec,
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    num_warps: int,
    num_stages: int,
    registers: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Binary:
    """Compile the ``@triton.jit`` or ``@gluon.jit`` function ``fn`` for ``spec.arch``.

    A launch passes :data:`~dmuon.kernels.gpu.triton_kernels.operands.HIDDEN_ARGS` after ``fn``'s own arguments.

    Args:
        signature: type of each run-time argument, such as ``"*bf16"``, ``"i32"``, ``"fp32"``; with ``":16"``
            after it, its value is a multiple of 16 (an address in bytes, a number in units), and so for other
            powers of two.
        constexprs: value of each ``tl.constexpr`` argument.
        registers: of a thread, at most. Given the most there are, nothing is spilled that need not be; ``None``
            lets ptxas trade a few spills for more blocks on a multiprocessor.
        extra: goes into the binary's ``extra``.

    Raises:
        ValueError: an argument of ``fn`` is in neither mapping, or a name is in none of its arguments.
        RuntimeError: the kernel wants scratch memory, which launches do not provide.
    """
    names = list(fn.arg_names)
    if sorted(names) != sorted([*signature, *constexprs]):
        raise ValueError(f"{fn.__name__} takes {names}, got {[*signature, *constexprs]}")
    types, attributes = dict.fromkeys(names, "constexpr"), {}
    for name, kind in signature.items():
        types[name], _, divisor = kind.partition(":")
        if divisor:
            attributes[(names.index(name),)] = [["tt.divisibility", int(divisor)]]
    made = GluonASTSource if fn.is_gluon() else ASTSource
    source = made(fn, types, dict(constexprs), attributes)
    options = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "num_ctas": 1,
        # Triton's default changes between versions.
        "enable_fp_fusion": True,
        "maxnreg": registers,
    }
    major, minor = arch_named(spec.arch).capability
    target = GPUTarget("cuda", 10 * major + minor, 32)
    # Binaries are cached by whoever asked for this one; Triton's own cache would only grow beside it.
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        compiled = triton.compile(source, target=target, options=options)
    if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
        raise RuntimeError(
            f"{fn.__name__} was compiled to use scratch memory, which its launches do not have"
        )
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    if (
        not fn.is_gluon()
        and "wgmma.fence" in ptx
        and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    ):
        ptx = _fenced(ptx)
        cubin = assemble(ptx, spec.arch)
    return Binary(
        spec=spec,
        entry=entry_of(ptx),
        threads=threads_of(ptx),
        shared_bytes=compiled.metadata.shared,
        params=params_of(ptx),
        ptx=ptx,
        cubin=cubin,
        extra=dict(extra or {}),
    )


def _fenced(ptx: str) -> str:
    """Before 3.7, Triton lets wgmma read what cp.async wrote without a fence between the two proxies."""
    wgmma = "wgmma.fence.sync.aligned;"
    return ptx.replace(wgmma, f"fence.proxy.async.shared::cta;\n\t{wgmma}")
