"""One matrix inside a parameter: its shape, and how to see it there without copying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor


@dataclass(frozen=True)
class Matrix:
    """``batch`` matrices of ``rows`` × ``cols`` (fan-out × fan-in) that live in a parameter of ``shape``.

    The recipe that finds them has three independent parts, all of them views:

    * ``flat``: dimensions 1, 2, … are one (a convolution's kernel), flattened in the order in which they
      lie in memory, so that a channels-last weight needs no copy. Orthogonalising commutes with permuting
      columns, so the order does not change the update as long as a gradient is read in the order of its
      parameter: :meth:`read` does that.
    * ``transposed``: the parameter stores fan-in × fan-out.
    * ``start``: the first of the ``rows`` output rows, when a fused weight is split.
    """

    shape: tuple[int, ...]
    rows: int
    cols: int
    batch: int = 1
    transposed: bool = False
    flat: bool = False
    start: int = 0

    def view(self, parameter: Tensor) -> Tensor:
        """The (batch, rows, cols) view of ``parameter``: shares its storage, so writing to it writes through.

        Raises:
            ValueError: ``parameter`` has another shape, or strides that no view can follow.
        """
        self._check(parameter)
        if not self.flat:
            return self._lay_out(parameter)
        try:
            merged = parameter.permute(_memory_order(parameter)).view(self.shape[0], -1)
        except RuntimeError as error:
            raise ValueError(
                f"a parameter of shape {self.shape} and strides {parameter.stride()} cannot be viewed "
                "as a matrix; make it contiguous first"
            ) from error
        return self._lay_out(merged)

    def read(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """``tensor``, a gradient or momentum, as (batch, rows, cols) in the layout of ``view(parameter)``.

        A view where ``tensor`` has the strides of ``parameter``; a convolution's gradient in another memory
        format is copied, so the result is for reading only.

        Raises:
            ValueError: ``tensor`` or ``parameter`` has another shape.
        """
        self._check(tensor)
        self._check(parameter)
        if not self.flat:
            return self._lay_out(tensor)
        return self._lay_out(tensor.permute(_memory_order(parameter)).reshape(self.shape[0], -1))

    def column(self, parameter: Tensor) -> Tensor:
        """One entry of each row of all matrices in ``parameter``, with as many dimensions: a view.

        (out, 1) of an ``nn.Linear``, (1, out) of a transposed layer, (experts, out, 1) of a stack.
        """
        self._check(parameter)
        if not self.flat:
            return parameter.narrow(-2 if self.transposed else -1, 0, 1)
        if self.transposed:
            return parameter.narrow(0, 0, self.batch)
        first_of_each_row = (slice(None), *[slice(1)] * (parameter.ndim - 1))
        return parameter[first_of_each_row]

    def view_column(self, column: Tensor, parameter: Tensor) -> Tensor:
        """``column``, of the shape and strides of ``column(parameter)``, as (batch, rows, 1): a view to write to."""
        if self.flat:
            column = column.permute(_memory_order(parameter)).view(column.shape[0], -1)
        return self._lay_out(column)

    def _check(self, tensor: Tensor) -> None:
        if tuple(tensor.shape) != self.shape:
            raise ValueError(f"a tensor of shape {self.shape} is needed, got {tuple(tensor.shape)}")

    def _lay_out(self, tensor: Tensor) -> Tensor:
        if tensor.ndim == 2:
            tensor = tensor.view(self.batch, -1, tensor.shape[1])
        if self.transposed:
            tensor = tensor.mT
        return tensor.narrow(-2, self.start, self.rows)


def split_rows(matrix: Matrix, sizes: Sequence[int], name: str) -> tuple[Matrix, ...]:
    """Cut ``matrix`` into consecutive blocks of ``sizes`` output rows.

    Raises:
        ValueError: the sizes do not add up to the rows, or ``matrix`` is a grouped convolution's.
    """
    if sum(sizes) != matrix.rows:
        raise ValueError(
            f"splits for {name!r}: the sizes {tuple(sizes)} add up to {sum(sizes)}, but its shape "
            f"{matrix.shape} has {matrix.rows} output rows"
        )
    if matrix.flat and matrix.batch > 1:
        raise ValueError(
            f"splits for {name!r}: rows of a convolution in {matrix.batch} groups cannot be split"
        )
    starts = accumulate(sizes, initial=0)
    return tuple(replace(matrix, rows=size, start=start) for start, size in zip(starts, sizes))  # noqa: B905


def _memory_order(tensor: Tensor) -> list[int]:
    strides = tensor.stride()
    return [0, *sorted(range(1, tensor.ndim), key=lambda dim: -strides[dim])]
