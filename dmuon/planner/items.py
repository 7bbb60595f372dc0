"""What is to be owned: parameters, each with the matrices in it, in the order of the forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dmuon.policy import Routing

Shape = tuple[int, int]
"""(rows, cols), as matrices are batched: a transpose is another shape."""


@dataclass(frozen=True)
class Item:
    """One parameter, which goes to one owner whole.

    Args:
        name: the parameter's.
        stacks: (count, rows, cols) of the matrices in it: one stack for most; several for a weight that is split.
        bucket: what travels with it; equal for the matrices of one block.
        itemsize: bytes of an element of its master weight.
    """

    name: str
    stacks: tuple[tuple[int, int, int], ...]
    bucket: str = ""
    itemsize: int = 4

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(count * rows * cols for count, rows, cols in self.stacks)

    @property
    def kept_bytes(self) -> int:
        """What its owner keeps from step to step: the master weight, its momentum, its mean gradient."""
        return 3 * self.numel * self.itemsize

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for items that a plan may exchange."""
        return (self.stacks, self.itemsize)


def items_of(
    routings: Iterable[Routing],
    buckets: Mapping[str, str] | None = None,
    itemsize: int | Mapping[str, int] = 4,
) -> list[Item]:
    """The items among ``routings``: those that Muon updates, in their order.

    Args:
        routings: of one model, in the order of its forward.
        buckets: name → bucket; None to go by the names: everything up to the first number in it.
        itemsize: bytes of an element, of all or by name.
    """
    return [
        Item(
            routing.name,
            tuple((matrix.batch, matrix.rows, matrix.cols) for matrix in routing.matrices),
            _block(routing.name) if buckets is None else buckets[routing.name],
            itemsize if isinstance(itemsize, int) else itemsize[routing.name],
        )
        for routing in routings
        if routing.algorithm == "muon"
    ]


def _block(name: str) -> str:
    """``"model.layers.3.mlp.up_proj.weight"`` → ``"model.layers.3"``; empty where there is no number."""
    parts = name.split(".")
    return next((".".join(parts[: k + 1]) for k, part in enumerate(parts) if part.isdigit()), "")
