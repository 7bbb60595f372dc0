"""Which kernels to compile ahead: those that tuning could time for a set of shapes on an architecture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from dmuon.kernels.backends import BACKENDS
from dmuon.kernels.backends.compiled import TRITON, CompiledBackend
from dmuon.kernels.choose import Problem
from dmuon.kernels.coefficients import resolve_coefficients
from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import KernelSpec
from dmuon.kernels.precision import PRECISIONS
from dmuon.kernels.restarts import default_restarts
from dmuon.kernels.step import step_specs

HALF = ("fp16", "bf16")
"""The precisions that GPU kernels compute in."""


def compiling_backends(names: Sequence[str]) -> list[CompiledBackend]:
    """The backends called ``names`` whose DSL is installed; all of that kind if none is named.

    Raises:
        ValueError: a named one does not exist, has nothing to compile, or lacks its DSL.
    """
    known = {name: each for name, each in BACKENDS.items() if isinstance(each, CompiledBackend)}
    for name in names:
        if name not in known:
            raise ValueError(f"--backend {name}: those with kernels to compile are {', '.join(known)}")
        for distribution in known[name].requires:
            if not _installed(distribution):
                raise ValueError(f"--backend {name}: {distribution} is not installed")
    usable = {name: each for name, each in known.items() if all(map(_installed, each.requires))}
    return [usable[name] for name in dict.fromkeys(names)] if names else list(usable.values())


def specs_ahead(
    backends: Iterable[CompiledBackend],
    sides: Iterable[tuple[int, int]],
    arch: Arch,
    precisions: Iterable[str],
    coefficients: str,
) -> dict[KernelSpec, str]:
    """Every kernel that tuning (m, n) matrices, m ≤ n, could time on ``arch``, and those that an optimizer's step
    puts around them, with the backend's name."""
    polynomials = resolve_coefficients(coefficients)
    standard = tuple(range(1, len(polynomials)))
    sides = list(sides)
    found: dict[KernelSpec, str] = {}
    for backend in backends:
        for precision in precisions:
            forms = {default_restarts(polynomials, PRECISIONS[precision]), standard}
            for m, n in sides:
                for restarts in forms:
                    for spec in backend.specs(m, n, precision, arch, polynomials.steps, restarts):
                        found[spec] = backend.name
                if backend is TRITON:
                    found |= dict.fromkeys(step_specs(m, n, precision, arch), backend.name)
    return found


def specs_of(problems: Sequence[Problem], names: Sequence[str], arch: Arch) -> dict[KernelSpec, str]:
    """Every kernel that tuning ``problems`` with the backends ``names`` (all, if none) could time."""
    usable = [each for each in compiling_backends(()) if not names or each.name in names]
    found: dict[KernelSpec, str] = {}
    for problem in problems:
        if problem.dtype in HALF:
            name = problem.coefficients.partition(":")[0]
            found |= specs_ahead(usable, [(problem.m, problem.n)], arch, [problem.dtype], name)
    return found


def kernel_name(spec: KernelSpec) -> str:
    """Such as ``"symmetric_sm90"``."""
    return spec.module.rpartition(".")[2].removesuffix("_kernel")


def _installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
