"""What is handed to collectives, by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
}


class Traffic(TorchDispatchMode):
    """Counts bytes by kind of collective while it is entered: of the whole tensor, which is the larger buffer.

    ``bytes``: by kind; ``calls``: the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes first: what it makes of the call comes here again
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and (kind := _kind(name)):
            self.bytes[kind] += max(map(_size, (*args, result)))
            self.calls[kind] += 1
        return result


def count(run: Callable[[], object]) -> Traffic:
    """What ``run`` hands to collectives from this thread."""
    with Traffic() as traffic:
        run()
    return traffic


def _kind(name: str) -> str | None:
    return next((kind for start, kind in KINDS.items() if name.strip("_").startswith(start)), None)


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0
