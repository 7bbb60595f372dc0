"""Which parameters Muon updates, and as which matrices.

By default every weight of a linear layer, every convolution (flattened to fan-out × fan-in), every stack of
experts and every other trainable parameter of two or three dimensions; everything else (embeddings, output
heads, norms, biases, vectors, LoRA factors) is AdamW's. docs/policy.md has the rules in full.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from dmuon.matrix import Matrix, split_rows
from dmuon.slots import Slot, clean, slots_of_model, slots_of_named

__all__ = ["Matrix", "MatrixPolicy", "Routing", "Selector", "Slot"]

Selector = str | type[nn.Module] | Callable[[Slot], bool]


@dataclass(frozen=True)
class Routing:
    """Where one parameter goes, and why.

    ``algorithm`` is ``"muon"``, ``"adamw"`` or ``"frozen"``; ``reason`` says why in a few words; ``matrices``
    are what Muon orthogonalises (empty for the others); ``aliases`` are further names of the same tensor.
    """

    name: str
    shape: tuple[int, ...]
    algorithm: str
    reason: str
    matrices: tuple[Matrix, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def reasons_of(routings: Iterable[Routing]) -> str:
    """How many parameters went where for which reason: ``"4 x LoRA factor, 2 x bias"``."""
    reasons = Counter(routing.reason for routing in routings)
    return ", ".join(f"{count} x {reason}" for reason, count in reasons.items())


@dataclass(frozen=True)
class MatrixPolicy:
    """The rules, with the caller's overrides.

    ``exclude`` sends what it selects to AdamW and ``include`` makes matrices of what the defaults leave to
    AdamW; ``exclude`` wins. A selector is a name glob (``"*.gate.weight"``), a module type (its own
    parameters, not those of its children), or a predicate on a :class:`Slot`.

    ``splits`` cuts fused weights: a name glob to the sizes, in output features, of the matrices in it.
    ``{"*.qkv.weight": (4096, 1024, 1024)}`` cuts the rows of an ``nn.Linear``, the columns of a transformers
    ``Conv1D`` and the rows of each expert in a stack.

    A frozen parameter stays frozen and a vector stays AdamW's whatever the overrides say. The first match
    decides; a selector that matches nothing in a model is warned about.

    Raises:
        ValueError: ``splits`` holds no sizes, or one that is no positive integer.
        TypeError: a selector is neither string, module type nor callable.
    """

    include: Sequence[Selector] = ()
    exclude: Sequence[Selector] = ()
    splits: Mapping[str, Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for field, selectors in (("include", self.include), ("exclude", self.exclude)):
            if isinstance(selectors, str):
                raise TypeError(f"{field} is a list of selectors: write [{selectors!r}], not {selectors!r}")
            for each in selectors:
                if not isinstance(each, str) and not callable(each):
                    raise TypeError(f"{field} holds name globs, module types and predicates, got {each!r}")
        for glob, sizes in (self.splits or {}).items():
            if not sizes or not all(type(size) is int and size > 0 for size in sizes):
                raise ValueError(f"splits[{glob!r}] must be positive integers, got {sizes!r}")

    def route_model(self, model: nn.Module) -> list[Routing]:
        """One :class:`Routing` per distinct parameter of ``model``, in registration order, by logical shape.

        Raises:
            ValueError: the sizes of a split do not add up.
        """
        return self.route_slots(slots_of_model(model))

    def route_named(self, named_tensors: Iterable[tuple[str, Any]]) -> list[Routing]:
        """As :meth:`route_model` for (name, tensor) pairs: names and shapes stand in for the unknown modules.

        Anything with a ``shape`` passes for a tensor. Names that say nothing leave the shape to decide: two
        and three dimensions are matrices, more are convolutions.
        """
        return self.route_slots(slots_of_named(named_tensors))

    def route_slots(self, slots: Sequence[Slot]) -> list[Routing]:
        """Route slots that describe one whole model."""
        overrides: dict[str, Iterable[Selector]] = {
            "include": self.include,
            "exclude": self.exclude,
            "splits": self.splits or (),
        }
        for field, selectors in overrides.items():
            for selector in selectors:
                if not any(_matches(selector, slot) for slot in slots):
                    warnings.warn(f"{field}: {_label(selector)} matches no parameter", stacklevel=3)
        return [self.route(slot) for slot in slots]

    def route(self, slot: Slot) -> Routing:
        """Decide on one parameter: a pure function of ``slot`` and the overrides."""

        def to(algorithm: str, reason: str, matrices: tuple[Matrix, ...] = ()) -> Routing:
            return Routing(slot.name, slot.shape, algorithm, reason, matrices, slot.aliases)

        if not slot.trainable:
            return to("frozen", "takes no gradient")
        if 0 in slot.shape:
            return to("adamw", "empty")
        if len(slot.shape) < 2:
            return to("adamw", _reason_for_adamw(slot) or "vector or scalar")
        excluded = _first_match(self.exclude, slot)
        if excluded is not None:
            return to("adamw", f"excluded by {excluded}")
        included = _first_match(self.include, slot)
        reason = _reason_for_adamw(slot) if included is None else None
        if reason is not None:
            return to("adamw", reason)
        matrix, reason = _matrix_of(slot)
        if included is not None:
            reason = f"{reason}, included by {included}"
        elif min(matrix.rows, matrix.cols) == 1:
            return to("adamw", "a vector in shape: one side is 1")
        return self._to_muon(to, slot, matrix, reason)

    def _to_muon(self, to: Callable[..., Routing], slot: Slot, matrix: Matrix, reason: str) -> Routing:
        for glob, sizes in (self.splits or {}).items():
            if _matches(glob, slot):
                blocks = " + ".join(map(str, sizes))
                return to("muon", f"{reason}, split into {blocks}", split_rows(matrix, sizes, slot.name))
        return to("muon", reason, (matrix,))


def _reason_for_adamw(slot: Slot) -> str | None:
    if any("lora" in part.lower().split("_") for part in slot.clean_name.split(".")):
        return "LoRA factor"
    if _is_bias(slot):
        return "bias"
    if slot.kind == "embedding":
        return f"embedding, tied to {', '.join(slot.aliases)}" if slot.aliases else "embedding"
    if slot.kind == "head":
        return "output head"
    if slot.kind == "norm":
        return "normalisation"
    if slot.clean_name.endswith("A_log"):
        return "state-space decay rates"
    return None


def _matrix_of(slot: Slot) -> tuple[Matrix, str]:
    shape, groups = slot.shape, slot.groups
    if slot.kind == "conv_transposed":
        # The adjoint of a convolution: its weight is stored as that convolution's, (in, out × kernel).
        rows, cols = math.prod(shape[1:]), shape[0] // groups
        return Matrix(shape, rows, cols, groups, transposed=True, flat=True), "transposed convolution"
    if slot.kind == "conv" or len(shape) > 3:
        matrix = Matrix(shape, shape[0] // groups, math.prod(shape[1:]), groups, flat=True)
        return matrix, "convolution" if groups == 1 else f"convolution in {groups} groups"
    transposed = slot.kind == "linear_transposed"
    rows, cols = (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])
    batch = shape[0] if len(shape) == 3 else 1
    if len(shape) == 3:
        return Matrix(shape, rows, cols, batch, transposed), f"stack of {batch}"
    reason = "linear layer" if slot.kind in ("linear", "linear_transposed") else "2-D parameter"
    return Matrix(shape, rows, cols, batch, transposed), reason


def _is_bias(slot: Slot) -> bool:
    return "bias" in slot.clean_name.rpartition(".")[2].split("_")


def _first_match(selectors: Iterable[Selector], slot: Slot) -> str | None:
    return next((_label(selector) for selector in selectors if _matches(selector, slot)), None)


def _matches(selector: Selector, slot: Slot) -> bool:
    if isinstance(selector, str):
        names = (slot.name, *slot.aliases)
        return any(fnmatchcase(name, selector) for name in (*names, *map(clean, names)))
    if isinstance(selector, type):
        return any(isinstance(module, selector) for module in slot.modules)
    return bool(selector(slot))


def _label(selector: Selector) -> str:
    return repr(selector) if isinstance(selector, str) else getattr(selector, "__name__", repr(selector))
