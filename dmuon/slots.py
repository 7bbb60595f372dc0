"""What is known of a parameter before anyone decides: its name, logical shape and the kind of its layer.

A :class:`Slot` needs no tensor, so a model on the meta device, a checkpoint's header and a table of published
dimensions are all described, and routed, alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

KINDS = ("linear", "linear_transposed", "conv", "conv_transposed", "embedding", "norm", "head", "other")

# Wrappers (torch.compile, FSDP1, activation checkpointing, PEFT) put these into names.
_WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer|modules_to_save\.\w+)\."
)
_EMBEDDINGS = {"embed", "embeds", "embedding", "embeddings", "emb", "wte", "wpe"}
# As bare parameters: cls_token, pos_enc, relative_position_bias_table.
_EMBEDDED = {"token", "tokens", "table", "latents", "pos", "position", "positional"}
_PROJECTIONS = {"proj", "projection", "projector", "linear", "mlp"}
_HEADS = {"head", "score", "classifier", "embed_out", "unembed"}  # and all that end with _head
_ROOT_HEADS = {"output", "fc"}  # heads at the top of a model, ordinary layers inside a block


@dataclass(frozen=True)
class Slot:
    """A parameter as a policy sees it.

    ``shape`` is the logical (unsharded) shape; ``kind`` one of :data:`KINDS`; ``groups`` a convolution's;
    ``aliases`` the other names of the same tensor; ``modules`` the modules that hold it, if any are known.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "other"
    groups: int = 1
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    modules: tuple[nn.Module, ...] = field(default=(), compare=False, repr=False)

    @property
    def clean_name(self) -> str:
        """:attr:`name` without what wrappers insert (``_orig_mod.``, ``base_layer.``, …)."""
        return clean(self.name)


def clean(name: str) -> str:
    """``"module.lm_head._orig_mod.weight"`` → ``"lm_head.weight"``."""
    return _WRAPPERS.sub("", name).removeprefix("module.")


def slots_of_model(model: nn.Module) -> list[Slot]:
    """The distinct parameters of ``model`` in registration order; a tied tensor is one slot with aliases."""
    heads = _output_weights(model)
    found: dict[int, tuple[nn.Parameter, list[str], list[nn.Module], list[str]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            _, names, modules, kinds = found.setdefault(id(parameter), (parameter, [], [], []))
            names.append(leaf)
            modules.append(module)
            kinds.append(_kind(leaf, tuple(parameter.shape), module, id(parameter) in heads))
    slots = []
    for parameter, names, modules, kinds in found.values():
        kind = _strongest(kinds)
        groups = getattr(modules[kinds.index(kind)], "groups", 1) if kind.startswith("conv") else 1
        shape, trainable = tuple(parameter.shape), parameter.requires_grad
        slots.append(Slot(names[0], shape, kind, groups, trainable, tuple(names[1:]), tuple(modules)))
    return slots


def slots_of_named(tensors: Iterable[tuple[str, Any]]) -> list[Slot]:
    """Slots of (name, tensor) pairs with no module known: the name and the shape must do.

    Anything with a ``shape`` will do for a tensor; one given twice is one slot.
    """
    found: dict[int, tuple[Any, list[str]]] = {}
    for name, tensor in tensors:
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    slots = []
    for tensor, names in found.values():
        shape = tuple(int(size) for size in tensor.shape)
        kind = _strongest([kind_of_name(name, shape) for name in names])
        # One input channel is a depthwise filter far more often than a layer that reads a single channel.
        groups = shape[0] if kind == "conv" and shape[1] == 1 else 1
        trainable = getattr(tensor, "requires_grad", True)
        slots.append(Slot(names[0], shape, kind, groups, trainable, tuple(names[1:])))
    return slots


def kind_of_name(name: str, shape: tuple[int, ...]) -> str:
    """The kind of layer that ``name`` and ``shape`` suggest; ``"other"`` where they say nothing."""
    path = [part for part in clean(name).split(".") if not part.isdigit()]
    leaf, holder = path[-1] if path else "", path[-2] if len(path) > 1 else ""
    if is_head(name):
        return "head"
    words, leaf_words = set(holder.lower().split("_")), set(leaf.lower().split("_"))
    if any("norm" in word for word in words):
        return "norm"
    embedded = words & (_EMBEDDINGS | {"bias"}) and not words & _PROJECTIONS
    if len(shape) < 4 and (embedded or leaf_words & (_EMBEDDINGS | _EMBEDDED)):
        return "embedding"
    if len(shape) >= 4 or (len(shape) == 3 and any("conv" in word for word in words)):
        return "conv"
    return "other"


def is_head(name: str) -> bool:
    """Whether ``name`` is an output head's: ``lm_head.weight``, ``model.score.weight``, ``fc.weight``."""
    path = [part for part in clean(name).split(".")[:-1] if not part.isdigit() and part != "model"]
    if not path:
        return False
    return path[-1] in _HEADS or path[-1].endswith("_head") or (len(path) == 1 and path[0] in _ROOT_HEADS)


def _strongest(kinds: list[str]) -> str:
    # Of a tied tensor's kinds the embedding's decides, then the head's: both are AdamW's.
    return min(kinds, key=lambda kind: {"embedding": 0, "head": 1}.get(kind, 2))


def _kind(name: str, shape: tuple[int, ...], module: nn.Module, output: bool) -> str:
    type_names = {base.__name__ for base in type(module).__mro__}
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or hasattr(module, "num_embeddings"):
        return "embedding"
    if any("Norm" in type_name for type_name in type_names):
        return "norm"
    if output or is_head(name):
        return "head"
    if isinstance(module, _ConvTransposeNd):
        return "conv_transposed"
    if isinstance(module, _ConvNd):
        return "conv"
    if "Conv1D" in type_names and hasattr(module, "nf"):
        return "linear_transposed"  # transformers' GPT-2 layer: (in, out)
    if isinstance(module, nn.Linear) or (hasattr(module, "in_features") and hasattr(module, "out_features")):
        return "linear"
    if len(shape) == 3 and getattr(module, "is_transposed", False):
        return "linear_transposed"  # transformers' experts that store (experts, in, out)
    guess = kind_of_name(name, shape)
    return guess if guess in ("embedding", "conv") else "other"


def _output_weights(model: nn.Module) -> set[int]:
    found: set[int] = set()
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        if not callable(getter):
            continue
        try:
            head = getter()
        except (AttributeError, NotImplementedError, TypeError):
            continue
        if isinstance(head, nn.Module):
            found.update(id(parameter) for parameter in head.parameters())
    return found
