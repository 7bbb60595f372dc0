"""Hooks that let a model's calls and its backward drive publication and reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from dmuon.ownership.buckets import Bucket, OwnedMatrix
from dmuon.ownership.publisher import Publisher
from dmuon.ownership.reducer import Reducer


class Runtime:
    """Attaches ``publisher`` and ``reducer`` to ``model``, whose owned matrices are in ``buckets``."""

    def __init__(
        self, model: nn.Module, buckets: Sequence[Bucket], publisher: Publisher, reducer: Reducer
    ) -> None:
        self._buckets, self._publisher, self._reducer = buckets, publisher, reducer
        # Forward calls whose backward is still to come, by bucket.
        self._calls = [0] * len(buckets)
        self._in_backward = self._used = False
        model.register_forward_pre_hook(_eager(self._before_model))
        model.register_forward_hook(_eager(self._after_model))
        for index, bucket in enumerate(buckets):
            bucket.module.register_forward_pre_hook(partial(_eager(self._before_forward), index))
            bucket.module.register_forward_hook(partial(_eager(self._after_forward), index))
            for matrix in bucket.matrices:
                arrived = partial(self._arrived, index, matrix)
                matrix.parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def finish(self, call: str, check: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Bring the gradients of all backwards since the last call to the masters. Collective.

        ``check`` may raise before, and returns what must be equal on all ranks; all of them give one, or none does.
        """
        if self._used or check is not None:
            self._used = self._in_backward = False
            self._calls = [0] * len(self._calls)
            self._reducer.finish(call, check)

    def _arrived(self, index: int, matrix: OwnedMatrix, parameter: Tensor) -> None:
        if not self._publisher.shown(index):
            raise RuntimeError(
                f"the backward used {matrix.name!r} while bucket {self._buckets[index].name!r} was not published: "
                "losses must depend on what the bucket's module returns in tensors, sequences, mappings or "
                "dataclasses, not on what it keeps elsewhere"
            )
        self._reducer.arrived(index, matrix)

    def _before_model(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._reducer.close_round()
        self._in_backward = False

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            # Where blocks are checkpointed, only the model's own output tells that the backward has begun.
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if outputs:
                register_multi_grad_hook(outputs, self._enter_backward, mode="any")

    def _enter_backward(self, gradient: Tensor) -> None:
        # Gradients may have been dropped since the forward, which left nothing used.
        self._in_backward = self._used = True

    def _before_forward(self, index: int, module: nn.Module, args: Any) -> None:
        self._used = self._used or torch.is_grad_enabled()
        self._publisher.before_forward(index, self._in_backward)

    def _after_forward(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        kept = torch.is_grad_enabled() and bool(outputs)
        if kept:
            counted = not self._in_backward
            self._calls[index] += counted
            register_multi_grad_hook(outputs, partial(self._before_backward, index, counted), mode="any")
        if not self._in_backward:
            self._publisher.after_forward(index, kept)

    def _before_backward(self, index: int, counted: bool, gradient: Tensor) -> None:
        self._in_backward = self._used = True
        self._calls[index] -= counted
        self._publisher.before_backward(index)
        self._reducer.passed(k for k in self._publisher.after(index) if self._calls[k] <= 0)


def _eager(hook: Callable[..., None]) -> Callable[..., None]:
    """``hook``, which torch.compile is to call and not to trace: tracing would record its writes to parameters."""
    untraced: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return untraced


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in what a module returned: tensors, sequences, mappings and dataclasses of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
