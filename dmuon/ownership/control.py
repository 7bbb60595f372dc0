"""What ranks tell each other beside tensors of the model: small, on the host, rarely."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_NOTHING = "nothing"
_ADVICE = "Every rank must build the same model and pass the same arguments to dmuon.own"


class Control:
    """A gloo group of the mesh's ranks, whatever backend carries the model. Construction is collective.

    Args:
        ranks: global ranks, in the order of the mesh.
        timeout: of its collectives; None for torch's default.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta | None = None) -> None:
        self._group = dist.new_group(list(ranks), timeout, backend="gloo")
        self._rank, self._size = dist.get_rank(self._group), len(ranks)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, on every rank."""
        values: list[Any] = [None] * self._size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_first(self, value: Any) -> Any:
        """The first rank's ``value``, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, group_src=0, group=self._group)
        return values[0]

    def largest(self, values: Sequence[int]) -> list[int]:
        """The maximum over the ranks, entry by entry."""
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor]

    def send_to_first(self, tensor: Tensor) -> None:
        """Send a CPU tensor to the first rank, which waits for it in :meth:`receive`."""
        dist.send(tensor, group=self._group, group_dst=0)

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """What ``rank`` sends here, written to ``like``."""
        dist.recv(like, group=self._group, group_src=rank)
        return like

    def together(self, work: Callable[[], T], what: str) -> T:
        """What ``work`` returns, unless it raises on any rank: then every rank raises, and ``what`` has failed."""
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        self.agree(failure or {}, what)
        return result

    def agree(
        self, facts: dict[str, Any] | Exception, what: str = "dmuon.own", advice: str = _ADVICE
    ) -> None:
        """Raise on every rank unless all ranks hold equal ``facts``.

        A rank that failed before it knew its facts hands in the exception: the others then raise, too, instead of
        waiting for it. ``what`` has failed then. ``advice`` is for those that differ.

        Raises:
            RuntimeError: ranks differ, or another one failed.
            Exception: this rank's own.
        """
        every = self.gather(_reason(facts) if isinstance(facts, Exception) else facts)
        if isinstance(facts, Exception):
            raise facts
        failed = {rank: text for rank, text in enumerate(every) if isinstance(text, str)}
        if failed:
            rank, text = next(iter(failed.items()))
            raise RuntimeError(f"{what} failed on rank {rank}: {text}")
        for rank, other in enumerate(every):
            for key in every[0] | other:
                here, there = every[0].get(key, _NOTHING), other.get(key, _NOTHING)
                if here == there:
                    continue
                here, there = _difference(here, there)
                raise RuntimeError(
                    f"ranks disagree on the {key}: rank 0 has {here}, rank {rank} has {there}. {advice}"
                )


def digest(facts: Mapping[str, Any]) -> int:
    """A number, equal on ranks with equal ``facts`` and, as good as surely, on no others."""
    return int.from_bytes(blake2b(repr(facts).encode(), digest_size=7).digest(), "big")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _difference(here: Any, there: Any) -> tuple[Any, Any]:
    """The first entries that differ where both are lists; else both as they are."""
    if not (isinstance(here, list) and isinstance(there, list)):
        return here, there
    for k in range(max(len(here), len(there))):
        ours, theirs = (side[k] if k < len(side) else _NOTHING for side in (here, there))
        if ours != theirs:
            return ours, theirs
    return here, there
