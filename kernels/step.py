"""A step of Muon on a GPU: momentum to weights of a batch of equal matrices, in kernels alone.

Momentum, Nesterov's look ahead, scaling and cast take two launches for the whole batch (``prepare``), Newton–Schulz
runs as it was tuned, and its last product moves the weights (``update``). In between, a guard counts what is not
finite. Where one launch runs the whole iteration, another moves the weights (``move``). All that changes from step to
step is in a table in device memory, so a CUDA graph of :meth:`Step.run` may be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels.backends.compiled import laid_out
from dmuon.kernels.choose import NSChoice
from dmuon.kernels.coefficients import CoefficientSet
from dmuon.kernels.gpu.arch import Arch, arch_of
from dmuon.kernels.gpu.binary import KernelSpec
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.triton_kernels.elementwise import CONFIG, parts_of
from dmuon.kernels.gpu.triton_kernels.guard import GUARD, GuardCall
from dmuon.kernels.gpu.triton_kernels.move import MOVE, MoveCall
from dmuon.kernels.gpu.triton_kernels.prepare import PREPARE, PrepareCall
from dmuon.kernels.gpu.triton_kernels.update import UPDATE, UpdateCall
from dmuon.kernels.precision import PRECISIONS
from dmuon.kernels.run import run_prepared, working_memory

_PREPARED = 1024
"""Launches that are kept ready: graphs hold their own, and without graphs the allocator repeats its addresses."""


@dataclass(frozen=True)
class Step:
    """What the kernels of a step depend on.

    Args:
        arch: of the device.
        rows, cols: of each matrix.
        weight_dtype: of weights and momenta, ``"fp32"`` or ``"bf16"``.
        grad_dtype: of gradients, ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        dtype: working precision, ``"fp16"`` or ``"bf16"``.
        nesterov: whether the update looks ahead by one momentum step.
        state_aligned: whether gradients and momenta all start at multiples of 16 bytes.
        weights_aligned: whether weights do.
    """

    arch: Arch
    rows: int
    cols: int
    weight_dtype: str
    grad_dtype: str
    dtype: str
    nesterov: bool
    state_aligned: bool
    weights_aligned: bool

    def specs(self) -> list[KernelSpec]:
        """Every kernel that :meth:`run` could launch around the iteration's own.

        Raises:
            Unsupported: a dtype is not served.
        """
        every = (family.specs(call, config, self.arch) for family, call, config in self._examples())
        return list(dict.fromkeys(chain.from_iterable(every)))

    def load(self, device: torch.device) -> None:
        """Have all of :meth:`specs` compiled and loaded on ``device``; nothing is launched.

        Raises:
            Unsupported: one of them is not to be had; the message says why.
        """
        for family, call, config in self._examples():
            _prepared(family, call, tuple(config.items()), self.arch, device)

    def _examples(self) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
        """One call for each kernel, at no real address, with family and configuration."""
        m, n = sorted((self.rows, self.cols))
        X, square = laid_out(self.rows, self.cols, self.dtype), laid_out(m, m, self.dtype)
        product = self._update(0, square, laid_out(m, n, self.dtype, self.rows <= self.cols), 0.0)
        yield PREPARE, self._prepare(0, 0, X), CONFIG
        yield GUARD, GuardCall(square, 0, 0), CONFIG
        yield GUARD, GuardCall(X, 0, 0), CONFIG
        yield UPDATE, product, UPDATE.config(product)
        yield MOVE, self._move(0, X), CONFIG

    def run(self, table: Tensor, counter: Tensor, choice: NSChoice, coefficients: CoefficientSet) -> None:
        """Advance all momenta in ``table`` and move all weights.

        Neither synchronises nor, after a first run, compiles; allocates working memory alone.

        Args:
            table: int64 (count, FIELDS), on the device; see
                :func:`~dmuon.kernels.gpu.triton_kernels.elementwise.fill_table`.
            counter: int32 (1,), to which the number of matrices is added whose update is not finite.
            choice: how the iteration runs.
            coefficients: one polynomial per step of it.
        """
        count, device = len(table), table.device
        X = working_memory((count, self.rows, self.cols), PRECISIONS[self.dtype], device)
        result = Matrices.of(X)
        partials = _scratch(result, 2, torch.float32, device)
        self._launch(PREPARE, self._prepare(table.data_ptr(), partials.data_ptr(), result), device)
        # A lone matrix drops its batch dimension: plain products are faster than batches of one.
        together = slice(None) if count > 1 and not choice.loop else None
        for part in [together] if together else range(count):
            Q, Y, shift = run_prepared(X[part], choice, coefficients)
            first = table[part].data_ptr()
            self._guard(X[part] if Q is None else Q, counter)
            if Q is None:
                self._launch(MOVE, self._move(first, Matrices.of(X[part])), device)
            else:
                call = self._update(first, Matrices.of(Q), Matrices.of(Y), shift)
                self._launch(UPDATE, call, device, UPDATE.config(call))

    def _prepare(self, table: int, partials: int, result: Matrices) -> PrepareCall:
        dtypes = self.grad_dtype, self.weight_dtype
        return PrepareCall(table, partials, result, *dtypes, self.state_aligned, self.nesterov)

    def _update(self, table: int, Q: Matrices, X: Matrices, shift: float) -> UpdateCall:
        return UpdateCall(table, Q, X, shift, self.weight_dtype, self.weights_aligned)

    def _move(self, table: int, direction: Matrices) -> MoveCall:
        return MoveCall(table, direction, self.weight_dtype, self.weights_aligned)

    def _guard(self, values: Tensor, counter: Tensor) -> None:
        """The last Q tells of X too: a row of X that is not finite makes its own square in R, and so in Q, not."""
        layout = Matrices.of(values)
        found = _scratch(layout, 1, torch.int32, counter.device)
        self._launch(GUARD, GuardCall(layout, found.data_ptr(), counter.data_ptr()), counter.device)

    def _launch(self, family: Any, call: Any, device: torch.device, config: dict[str, Any] = CONFIG) -> None:
        for launch in _prepared(family, call, tuple(config.items()), self.arch, device):
            launch()


def step_specs(m: int, n: int, dtype: str, arch: Arch) -> list[KernelSpec]:
    """The kernels of steps of (m, n) matrices, wide or tall, in working precision ``dtype``: for compiling ahead.

    They are for weights and gradients of one dtype, fp32 or bf16, and Nesterov momentum, as is usual.
    """
    sides = dict.fromkeys(((m, n), (n, m)))
    steps = [
        Step(arch, *each, weight, weight, dtype, nesterov=True, state_aligned=True, weights_aligned=True)
        for each in sides
        for weight in ("fp32", "bf16")
    ]
    return list(dict.fromkeys(spec for step in steps for spec in step.specs()))


@lru_cache
def step_arch(device: torch.device) -> Arch | None:
    """The architecture of ``device`` if steps on it can run in kernels; ``None`` if they cannot."""
    return arch_of(device) if find_spec("triton") is not None else None


def _scratch(matrices: Matrices, fields: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for what each block of a launch over ``matrices`` finds."""
    parts = parts_of(matrices, CONFIG["elements"])
    return torch.empty(matrices.batch, parts, fields, dtype=dtype, device=device)


@lru_cache(_PREPARED)
def _prepared(
    family: Any, call: Any, config: tuple[tuple[str, Any], ...], arch: Arch, device: torch.device
) -> tuple[Callable[[], None], ...]:
    from dmuon.kernels.gpu.driver import prepared
    from dmuon.kernels.gpu.load import binary_for

    binaries = tuple(map(binary_for, family.specs(call, dict(config), arch)))
    launches = family.launches(call, dict(config), binaries)
    return tuple(prepared(*each, device) for each in zip(binaries, launches, strict=True))
