"""What a training step asks for: a model's blocks, with what is owned in each and how much they compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dmuon.models import ModelShapes
from dmuon.policy import Routing

EXPERTS_PER_TOKEN = 8


@dataclass(frozen=True)
class Block:
    """The parameters that are gathered, used and freed together.

    Args:
        name: the module's, empty for what is in no block.
        owned: the parameters that Muon moves.
        rest: elements of the others.
        products: multiply-adds of one token's forward.
    """

    name: str
    owned: tuple[Routing, ...]
    rest: int
    products: float

    @property
    def numel(self) -> int:
        return sum(routing.numel for routing in self.owned) + self.rest


@dataclass(frozen=True)
class Workload:
    """A model in ``blocks``, in the order of their forwards, and the ``root`` around them."""

    name: str
    root: Block
    blocks: tuple[Block, ...]

    @property
    def numel(self) -> int:
        return self.root.numel + sum(block.numel for block in self.blocks)

    @property
    def owned(self) -> tuple[Routing, ...]:
        """The parameters that Muon moves: the root's, then in the order of the forward."""
        return tuple(routing for block in (self.root, *self.blocks) for routing in block.owned)

    @property
    def rest(self) -> int:
        """Elements of the parameters that Muon does not move."""
        return self.root.rest + sum(block.rest for block in self.blocks)


def workload_of(shapes: ModelShapes) -> Workload:
    """The blocks of a model: what shares its name up to the first number, such as ``model.layers.3``.

    Every element of a weight multiplies each token once; an embedding only where it is also the head, and of a
    stack of experts :data:`EXPERTS_PER_TOKEN` at most. Scores of attention are not counted.
    """
    found: dict[str, list[Routing]] = {"": []}
    for routing in shapes.parameters:
        found.setdefault(_block_name(routing.name), []).append(routing)
    root, *blocks = (_block(name, routings) for name, routings in found.items())
    return Workload(shapes.name, root, tuple(blocks))


def _block(name: str, routings: Iterable[Routing]) -> Block:
    routings = list(routings)
    return Block(
        name,
        owned=tuple(routing for routing in routings if routing.algorithm == "muon"),
        rest=sum(routing.numel for routing in routings if routing.algorithm != "muon"),
        products=sum(map(_products, routings)),
    )


def _products(routing: Routing) -> float:
    if len(routing.shape) < 2 or (routing.reason.startswith("embedding") and not routing.aliases):
        return 0.0
    experts = max((matrix.batch for matrix in routing.matrices), default=1)
    return routing.numel * min(1.0, EXPERTS_PER_TOKEN / experts)


def _block_name(name: str) -> str:
    parts = name.split(".")
    number = next((k for k, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])
