"""Backends whose kernels are compiled for a GPU: each a table of kernel families, none of which loads a DSL."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels.backends.base import Product
from dmuon.kernels.coefficients import Triple
from dmuon.kernels.gpu.arch import Arch, arch_of
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.small_calls import SmallCall

_SHARED_SOURCES = tuple(f"gpu/{name}.py" for name in ("arch", "binary", "calls", "driver", "ptx_text"))
LINE_BYTES = 16
"""On a GPU, rows of working matrices start at multiples of this, as wide copies need."""

_PREPARED = 1024
"""Launches that a product keeps ready: the allocator hands out the same addresses again and again."""


@dataclass(frozen=True)
class Family:
    """Where a kernel family is, and which of a backend's operations it serves. ``sums`` is that of the kernel which
    adds up what a configuration with ``splits`` leaves in scratch memory."""

    module: str
    attribute: str
    ops: tuple[str, ...]
    sums: Family | None = None

    @property
    def loaded(self) -> Any:
        """The :class:`~dmuon.kernels.gpu.family.ProductFamily`, or ``SmallFamily`` for the op ``gram_ns``."""
        return getattr(importlib.import_module(f"dmuon.kernels.gpu.{self.module}"), self.attribute)

    def stages(self, config: Mapping[str, Any]) -> tuple[Any, ...]:
        """The kernels that a call launches, one after the other."""
        return (self.loaded, self.sums.loaded) if self.sums and "splits" in config else (self.loaded,)


class CompiledBackend:
    """A backend made of :class:`Family` entries; a configuration says in ``"kernel"`` which of them it is for.

    Args:
        name: of the backend.
        package: the DSL's import name.
        distribution: the DSL's distribution, whose version timings depend on.
        families: by the name that configurations use.
    """

    def __init__(self, name: str, package: str, distribution: str, families: Mapping[str, Family]) -> None:
        self.name, self._package, self._families = name, package, dict(families)
        self.requires = ("torch", distribution)
        self._built: dict[tuple[str, frozenset[tuple[str, Any]]], Product] = {}

    @property
    def sources(self) -> tuple[str, ...]:
        own = (source for family in self._families.values() for source in family.loaded.sources)
        return ("backends/compiled.py", *_SHARED_SOURCES, *sorted(set(own)))

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"it needs a CUDA GPU, not {device.type}"
        if arch_of(device) is None:
            return "there is no CUDA GPU that its kernels are built for"
        if importlib.util.find_spec(self._package) is None:
            return f"{self.requires[1]} is not installed"
        return None

    def configs(self, op: str, m: int, n: int, dtype: str, arch: Arch | None = None) -> list[dict[str, Any]]:
        if arch is None:
            return []
        found = []
        for name, family in self._families.items():
            if op in family.ops:
                args = (m, n, dtype, arch) if op == "gram_ns" else (op, m, n, dtype, arch)
                found += [{"kernel": name, **config} for config in family.loaded.configs(*args)]
        return found

    def check(self, op: str, config: Mapping[str, Any]) -> None:
        family, own = self._split(op, config)
        if op == "gram_ns":
            family.loaded.check(own)
        else:
            family.loaded.check(op, own)

    def build(self, op: str, config: Mapping[str, Any]) -> Product:
        self.check(op, config)
        # One product for each configuration: it keeps the launches that it made.
        key = op, frozenset(config.items())
        if key not in self._built:
            family, own = self._split(op, config)
            if op == "gram_ns":
                self._built[key] = _Whole(self.name, family.loaded, own)
            elif "splits" in own:
                self._built[key] = _Divided(self.name, op, family.stages(own), own)
            else:
                self._built[key] = _Ready(self.name, op, family.stages(own), own)
        return self._built[key]

    def specs(
        self, m: int, n: int, dtype: str, arch: Arch, steps: tuple[Triple, ...], restarts: tuple[int, ...]
    ) -> list[KernelSpec]:
        """All that tuning (m, n) matrices could time in working precision ``dtype``, wide or tall: for compiling
        ahead, on any machine. ``steps`` and ``restarts`` are those of the iteration; the matrices are fp32, or
        scaled already where an optimizer's step runs what was tuned."""
        calls: list[ProductCall | SmallCall] = []
        for wide in (True, False):
            X, G = laid_out(m, n, dtype, wide), laid_out(m, n, "fp32", wide)
            calls += [ProductCall("gram", X, None, None, laid_out(m, m, dtype))]
            calls += [SmallCall(G, G, dtype, steps, restarts, normalize=True)]
            calls += [SmallCall(X, X, dtype, steps, restarts)]
        R = laid_out(m, m, dtype)
        calls += [
            ProductCall("symmetric_product", R, R, C, R, 1.0, beta) for C, beta in ((None, 0.0), (R, 1.0))
        ]
        found: dict[KernelSpec, None] = {}
        for call in calls:
            op = "gram_ns" if isinstance(call, SmallCall) else call.op
            for config in self.configs(op, m, n, dtype, arch):
                family, own = self._split(op, config)
                with suppress(Unsupported):
                    found |= dict.fromkeys(stage.spec(call, own, arch) for stage in family.stages(own))
        return list(found)

    def _split(self, op: str, config: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
        names = [name for name, family in self._families.items() if op in family.ops]
        if not names:
            ops = sorted({op for family in self._families.values() for op in family.ops})
            raise ValueError(f"the {self.name} backend has {', '.join(ops)}, not {op}")
        if config.get("kernel") not in names:
            raise ValueError(
                f"{self.name} takes for {op} a configuration with kernel in {names}, got {dict(config)}"
            )
        own = {key: value for key, value in config.items() if key != "kernel"}
        return self._families[config["kernel"]], own


def laid_out(rows: int, columns: int, dtype: str, by_rows: bool = True) -> Matrices:
    """A matrix as run_ns lays out its working memory, at no real address."""
    size = {"fp32": 4}.get(dtype, 2)
    line = -(-(columns if by_rows else rows) * size // LINE_BYTES) * LINE_BYTES // size
    strides = (line, 1) if by_rows else (1, line)
    return Matrices(LINE_BYTES, dtype, 1, rows, columns, line * (rows if by_rows else columns), *strides)


class _Launcher:
    """Turns calls into launches of one kernel after the other, and keeps those it made.

    Args:
        stages: for each kernel, what to compile for a call, and the launch that performs it.
    """

    def __init__(
        self, backend: str, *stages: tuple[Callable[..., KernelSpec], Callable[..., Launch]]
    ) -> None:
        self._backend, self._stages = backend, stages
        self._prepared = lru_cache(_PREPARED)(self._prepare)

    def run(self, call: ProductCall | SmallCall, device: torch.device) -> None:
        for launch in self._prepared(call, device):
            launch()

    def arch(self, device: torch.device) -> Arch:
        arch = arch_of(device)
        if arch is None:
            raise Unsupported(
                f"the {self._backend} backend needs a CUDA GPU, and the operands are on {device}"
            )
        return arch

    def _prepare(self, call: ProductCall | SmallCall, device: torch.device) -> tuple[Callable[[], None], ...]:
        from dmuon.kernels.gpu.driver import prepared
        from dmuon.kernels.gpu.load import binary_for

        arch = self.arch(device)
        binaries = [binary_for(specify(call, arch)) for specify, _ in self._stages]
        launches = [
            launch(call, binary, device) for (_, launch), binary in zip(self._stages, binaries, strict=True)
        ]
        # A grid without blocks has nothing to do, and the driver refuses it.
        return tuple(
            prepared(binary, launch, device)
            for binary, launch in zip(binaries, launches, strict=True)
            if launch.grid[0]
        )


class _Ready:
    """One of the three products under one configuration."""

    def __init__(self, backend: str, op: str, families: tuple[Any, ...], config: dict[str, Any]) -> None:
        def stage(family: Any) -> tuple[Callable[..., KernelSpec], Callable[..., Launch]]:
            def launch(call: ProductCall, binary: Binary, device: torch.device) -> Launch:
                made: Launch = family.launch(call, config, binary, _multiprocessors(device))
                return made

            return lambda call, arch: family.spec(call, config, arch), launch

        self._op, self._config, self._family = op, config, families[0]
        self._launcher = _Launcher(backend, *map(stage, families))

    def __call__(
        self,
        A: Tensor,
        *others: Tensor,
        alpha: float = 1,
        beta: float = 0,
        C: Tensor | None = None,
        diag: float = 0,
    ) -> Tensor:
        *second, out = others
        B = Matrices.of(second[0]) if second else None
        added = Matrices.of(C) if C is not None and beta else None
        call = ProductCall(
            self._op, Matrices.of(A), B, added, Matrices.of(out), alpha, beta if added else 0.0, diag
        )
        self._run(call, out.device)
        return out

    def _run(self, call: ProductCall, device: torch.device) -> None:
        self._launcher.run(call, device)


class _Divided(_Ready):
    """One under a configuration that divides tiles, with memory for their parts: from PyTorch's allocator, which
    hands out again what a stream has done with, and to a captured graph what stays the graph's."""

    def _run(self, call: ProductCall, device: torch.device) -> None:
        self._launcher.arch(device)
        shape = self._family.parts(call, self._config, _multiprocessors(device))
        scratch = torch.empty(shape, dtype=torch.float32, device=device)
        super()._run(replace(call, scratch=Matrices.of(scratch)), device)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Whole:
    """The whole iteration of small matrices under one configuration: ``run(X, out, dtype, steps, restarts)``.

    With ``normalize`` it scales each (m, n) matrix of X by its norm first, like
    :func:`~dmuon.kernels.normalize.normalized_copy`.
    """

    def __init__(self, backend: str, family: Any, config: dict[str, Any]) -> None:
        self._launcher = _Launcher(
            backend,
            (
                lambda call, arch: family.spec(call, config, arch),
                lambda call, binary, device: family.launch(call, config, binary),
            ),
        )

    def __call__(
        self,
        X: Tensor,
        out: Tensor,
        dtype: str,
        steps: tuple[Triple, ...],
        restarts: tuple[int, ...],
        *,
        normalize: bool = True,
    ) -> Tensor:
        call = SmallCall(Matrices.of(X), Matrices.of(out), dtype, steps, restarts, normalize)
        self._launcher.run(call, out.device)
        return out


TRITON = CompiledBackend(
    "triton",
    "triton",
    "triton",
    {
        "symmetric": Family(
            "triton_kernels.symmetric",
            "SYMMETRIC",
            ("gram", "symmetric_product"),
            sums=Family("triton_kernels.sums", "SUMS", ()),
        ),
        "apply": Family("triton_kernels.apply", "APPLY", ("apply",)),
        "small": Family("triton_kernels.small", "SMALL", ("gram_ns",)),
    },
)
TILELANG = CompiledBackend(
    "tilelang",
    "tilelang",
    "tilelang",
    {
        "symmetric": Family("tilelang_kernels.symmetric", "SYMMETRIC", ("gram", "symmetric_product")),
        "small": Family("tilelang_kernels.small", "SMALL", ("gram_ns",)),
    },
)
CUTE = CompiledBackend(
    "cute",
    "cutlass",
    "nvidia-cutlass-dsl",
    {
        "sm90": Family("cute_kernels.symmetric_sm90", "SYMMETRIC_SM90", ("gram", "symmetric_product")),
        "sm80": Family("cute_kernels.symmetric_sm80", "SYMMETRIC_SM80", ("gram", "symmetric_product")),
    },
)
