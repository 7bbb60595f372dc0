"""Compiling a spec in this process. Training processes never do: they load what a compiler process built."""

from __future__ import annotations

from importlib import import_module

from dmuon.kernels.gpu.binary import Binary, KernelSpec


def build_here(spec: KernelSpec) -> Binary:
    """Import the spec's module, and with it the DSL, and compile. No GPU is needed.

    Raises:
        Exception: whatever the kernel's ``build`` or the DSL's compiler raises.
    """
    binary: Binary = import_module(f"dmuon.kernels.gpu.{spec.module}").build(spec)
    return binary
