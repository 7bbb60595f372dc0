"""How gradients get to the owners.

A round sends every bucket once, from the last to the first. All ranks send the same sequence of buckets, whatever
gradients each of them has; what a rank does not have goes as zeros, and what comes after its bucket has gone waits
for the next round. So neither an unused parameter nor one that is used twice can make ranks wait for each other, and
since a step adds up all its rounds it does not matter in which of them a gradient travels.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from dmuon.ownership.buckets import Bucket, OwnedMatrix
from dmuon.ownership.control import Control, digest
from dmuon.ownership.presence import Presence
from dmuon.ownership.routes import Pending, Routes
from dmuon.ownership.tensor_parallel import wrapped


class Reducer:
    """Collects the gradients of ``buckets``, and reduces each to the owners.

    Args:
        buckets: in one order on all ranks.
        routes: how they travel.
        control: to agree on what was sent.
        dtype: on the wire.
        presence: of the owned parameters in the model.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        routes: Routes,
        control: Control,
        dtype: torch.dtype,
        presence: Presence,
    ) -> None:
        self._buckets, self._routes, self._control, self._dtype = buckets, routes, control, dtype
        self._presence = presence
        self._pending: deque[tuple[Bucket, Pending]] = deque()
        self._waiting = [{id(matrix) for matrix in bucket.matrices} for bucket in buckets]
        self._complete = [False] * len(buckets)
        self._next, self._rounds, self._open = len(buckets) - 1, 0, False
        self.synchronizing = True
        self.stepped = False
        """Whether there was a step, perhaps a skipped one, since gradients were last dropped."""

    def arrived(self, index: int, matrix: OwnedMatrix) -> None:
        """A gradient of ``matrix``, of bucket ``index``, has accumulated."""
        matrix.collect(self._dtype)
        if not self.synchronizing:
            return
        self._open = True
        self._waiting[index].discard(id(matrix))
        if not self._waiting[index]:
            self._complete[index] = True
            self._send_complete()

    def passed(self, indices: Iterable[int]) -> None:
        """No further gradient is expected in these buckets: what is missing is not coming."""
        if not self.synchronizing:
            return
        for index in indices:
            # One that this round has sent already is not to go again.
            if index <= self._next:
                self._complete[index] = True
        self._send_complete()

    def close_round(self) -> None:
        """A new forward begins: what the last backward left out is not coming."""
        if self._open:
            self._open = False
            self._send_until(self._needed_rounds())

    def finish(self, call: str, check: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Bring this step's gradients to the masters. Collective: every rank calls it as often as the others.

        A parameter that had no gradient on any rank gets none.

        Args:
            call: what the user has called, the same on all ranks.
            check: raises what is wrong on this rank, and returns what must be equal on all.

        Raises:
            RuntimeError: an owned parameter has been changed or removed, on this rank or on another; ``check`` raised
                on another rank; or ranks differ in the call or in what ``check`` returned.
            Exception: what ``check`` raises.
        """
        matrices = [matrix for bucket in self._buckets for matrix in bucket.matrices]
        failure: Exception | None = None
        facts: dict[str, Any] = {"call": call}
        try:
            facts |= check() if check else {}
            self._presence.check()
            for bucket in self._buckets:
                bucket.check()
        except Exception as error:
            failure = error
        mine, arrivals = digest(facts), [matrix.arrived for matrix in matrices]
        failed, most, least, rounds, *arrived = self._control.largest(
            [failure is not None, mine, -mine, self._needed_rounds(), *arrivals]
        )
        if failed or most != -least:
            advice = "All ranks must clip, scale losses and step alike, with equal groups and options"
            self._control.agree(failure or facts, call, advice)
        self._send_until(rounds)
        while self._pending:
            self._absorb_oldest()
        added = False
        for matrix, anywhere in zip(matrices, arrived, strict=True):
            if matrix.master is not None and matrix.total is not None and anywhere:
                total = wrapped(matrix.total.to(matrix.master.dtype), matrix.master)
                added = added or matrix.master.grad is not None
                matrix.master.grad = total if matrix.master.grad is None else matrix.master.grad + total
            matrix.total, matrix.arrived = None, False
        self._rounds, self._open = 0, False
        if added and self.stepped:
            warnings.warn(
                "owned gradients were added to those of the last step, which nobody dropped: call "
                "optimizer.zero_grad(), since model.zero_grad() does not reach them",
                stacklevel=2,
            )

    def _needed_rounds(self) -> int:
        """How many whole rounds send everything that this rank has."""
        unsent = [k for k, b in enumerate(self._buckets) if any(m.unsent is not None for m in b.matrices)]
        begun = self._next < len(self._buckets) - 1
        missed = begun and any(k > self._next for k in unsent)
        return self._rounds + int(begun or bool(unsent)) + int(missed)

    def _send_complete(self) -> None:
        while self._complete[self._next]:
            self._send()

    def _send_until(self, rounds: int) -> None:
        while self._rounds < rounds:
            self._send()

    def _send(self) -> None:
        """Send the next bucket in turn."""
        index, bucket = self._next, self._buckets[self._next]
        # Never wait here: the rank waited for may be waiting for this one in FSDP.
        while self._pending and self._pending[0][1].done:
            self._absorb_oldest()
        self._pending.append((bucket, self._routes.reduce(bucket.pack(self._dtype), bucket.sizes)))
        self._waiting[index] = {id(matrix) for matrix in bucket.matrices}
        self._complete[index] = False
        self._next = (index - 1) % len(self._buckets)
        self._rounds += index == 0

    def _absorb_oldest(self) -> None:
        bucket, transfer = self._pending.popleft()
        with self._routes.statistics.waiting("reduce", bucket.name):
            received = transfer.wait()
        bucket.absorb(received, self._routes.size)
