"""Hooks that are told how each matrix was moved, for logs."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dmuon.batching import Piece
from dmuon.lr_adjust import AdjustRule
from dmuon.matrix import Matrix


@dataclass(frozen=True, eq=False)
class MatrixUpdate:
    """How one matrix was moved in a step. Its tensors are 0-D, on the matrix's device; norms are Frobenius's, in fp64.

    Attributes:
        name: of the parameter; ``"group0.param3"`` where parameters were given without names.
        index: of the matrix in its parameter: experts of a stack in their order, one after the other for each split.
        rows, cols: fan-out and fan-in.
        gradient_norm: of its gradient as the step found it, after clipping.
        update_norm: of what the step added to the weight, learning rate included, weight decay not.
        weight_norm: of the weight before the step.
        orthogonality_error: ‖O Oᵀ − I‖_F / √m of the orthogonalised momentum O with m rows, or of its transpose if it
            has fewer columns; 1 for a momentum of zero. None where no hook asked for it.
    """

    name: str
    index: int
    rows: int
    cols: int
    gradient_norm: Tensor
    update_norm: Tensor
    weight_norm: Tensor
    orthogonality_error: Tensor | None = None

    @property
    def update_rms(self) -> Tensor:
        """The root-mean-square entry of the update."""
        return self.update_norm / math.sqrt(self.rows * self.cols)


UpdateHook = Callable[[MatrixUpdate], object]


class Measurements:
    """What is measured of a step's matrices while they are moved. Nothing waits for the device.

    Args:
        rules: what a group's ``adjust_lr`` may name.
        orthogonality: whether to measure it too, which costs a product of each matrix with itself.
    """

    def __init__(self, rules: Mapping[str, AdjustRule], orthogonality: bool) -> None:
        self._rules, self._orthogonality = rules, orthogonality
        self._of: dict[tuple[Tensor, int, int], tuple[Tensor, ...]] = {}

    def add(self, batch: Sequence[Piece], directions: Sequence[Tensor]) -> None:
        """Measure ``batch``, about to be moved along ``directions``, (count, rows, cols) each."""
        for piece, direction in zip(batch, directions, strict=True):
            matrix, group = piece.update.matrix, piece.update.group
            scale = abs(self._rules[group["adjust_lr"]](matrix.rows, matrix.cols)) * group["lr"]
            columns = [_norms(piece.gradient()), _norms(direction) * scale, _norms(piece.parameter())]
            if self._orthogonality:
                columns.append(_orthogonality_errors(direction))
            for k, values in enumerate(zip(*(column.unbind() for column in columns), strict=True)):
                self._of[piece.update.parameter, matrix.start, piece.start + k] = values

    def reports(
        self,
        groups: Sequence[Mapping[str, Any]],
        matrices: Mapping[Tensor, Sequence[Matrix]],
        masters: Mapping[Any, Tensor],
    ) -> Iterator[MatrixUpdate]:
        """What was measured, in the order of the parameters.

        Args:
            groups: of the optimizer.
            matrices: of each parameter.
            masters: what was moved in place of a parameter.
        """
        for g, group in enumerate(groups):
            for p, parameter in enumerate(group["params"]):
                name = group["param_names"][p] if "param_names" in group else f"group{g}.param{p}"
                each = [(matrix, k) for matrix in matrices[parameter] for k in range(matrix.batch)]
                for index, (matrix, k) in enumerate(each):
                    key = (masters.get(parameter, parameter), matrix.start, k)
                    if key in self._of:
                        gradient, update, weight, *error = self._of[key]
                        shape = matrix.rows, matrix.cols
                        yield MatrixUpdate(name, index, *shape, gradient, update, weight, *error)


class UpdateHooks:
    """The hooks of an optimizer.

    Args:
        rules: what a group's ``adjust_lr`` may name.
    """

    def __init__(self, rules: Mapping[str, AdjustRule]) -> None:
        self._rules = rules
        self._hooks: OrderedDict[int, tuple[UpdateHook, bool]] = OrderedDict()

    def register(self, hook: UpdateHook, orthogonality: bool) -> RemovableHandle:
        """Have ``hook`` called from the next step on, until the handle's ``remove()``.

        Raises:
            TypeError: it cannot be called, or ``orthogonality`` is no bool.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {hook!r}")
        if not isinstance(orthogonality, bool):
            raise TypeError(f"orthogonality must be True or False, got {orthogonality!r}")
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = (hook, orthogonality)
        return handle

    def begin(self) -> Measurements | None:
        """What is to measure a step; None if nobody wants to know."""
        if not self._hooks:
            return None
        return Measurements(self._rules, any(orthogonality for _, orthogonality in self._hooks.values()))

    def call(self, reports: Iterable[MatrixUpdate]) -> None:
        """Tell every hook."""
        hooks = [hook for hook, _ in self._hooks.values()]
        for report in reports:
            for hook in hooks:
                hook(report)


def _norms(matrices: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=(-2, -1), dtype=torch.float64)
    return norms


def _orthogonality_errors(matrices: Tensor) -> Tensor:
    wide = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    product = wide @ wide.mT if wide.shape[-2] <= wide.shape[-1] else wide.mT @ wide
    product.diagonal(dim1=-2, dim2=-1).sub_(1)
    return _norms(product) / math.sqrt(product.shape[-1])
