"""When buckets are published and freed.

Every decision here follows from calls of modules and from the backward's arrival at them, which all ranks see in the
same order; never from whether a gradient came, which they do not. So all ranks publish alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from dmuon.ownership.buckets import Bucket
from dmuon.ownership.routes import Pending, Routes


class Publisher:
    """Keeps the published copies of ``buckets``.

    Args:
        buckets: in the order of registration.
        routes: how they travel.
        reshard: free a bucket after its forward and publish it again for its backward.
    """

    def __init__(self, buckets: Sequence[Bucket], routes: Routes, reshard: bool) -> None:
        self._buckets, self._routes, self._reshard = buckets, routes, reshard
        self._under_way: dict[int, Pending] = {}
        self._shown: set[int] = set()
        # The order of use: by registration until the first forward has shown it.
        self._order = list(range(len(buckets)))
        self._seen: list[int] | None = []
        self._of_master: dict[Tensor, int] = {
            m.master: k for k, b in enumerate(buckets) for m in b.matrices if m.master is not None
        }
        # What the step is still to publish, in this order, and how many masters each bucket waits for.
        self._queue: list[int] = []
        self._waiting: Counter[int] = Counter()

    def shown(self, index: int) -> bool:
        """Whether bucket ``index`` has arrived and not been freed since."""
        return index in self._shown

    def before_forward(self, index: int, recomputing: bool) -> None:
        """Bucket ``index`` is about to be used; in a recomputation the backward prefetches, not this."""
        if self._seen is not None and index not in self._seen:
            self._seen.append(index)
        self._buckets[index].check()
        self._show(index)
        if not recomputing:
            self._publish_neighbour(index, 1)

    def after_forward(self, index: int, kept: bool) -> None:
        """Bucket ``index`` has been used; ``kept`` if a backward is to follow.

        The last one and the model's own are then needed first.
        """
        needed_at_once = kept and (index == self._order[-1] or not self._buckets[index].name)
        if self._reshard and not needed_at_once:
            self._free(index)

    def before_backward(self, index: int) -> None:
        """The backward has come to bucket ``index``, and is done with those after it."""
        self._settle_order()
        for later in self.after(index):
            self._free(later)
        self._show(index)
        self._publish_neighbour(index, -1)

    def after(self, index: int) -> list[int]:
        """The buckets whose backward is over when it comes to ``index``: later ones, none inside the other."""
        bucket = self._buckets[index]
        later = [(k, self._buckets[k]) for k in self._order[self._order.index(index) + 1 :]]
        return [k for k, other in later if not (other.contains(bucket) or bucket.contains(other))]

    @contextmanager
    def published(self, index: int) -> Iterator[None]:
        """Have bucket ``index`` published inside, and afterwards as before. Collective."""
        kept = index in self._shown or index in self._under_way
        self._show(index)
        yield
        if not kept:
            self._free(index)

    def place(self, master: Tensor) -> int:
        """How early in the forward a master of this rank is used, once :meth:`refresh` has been called."""
        return self._order.index(self._of_master[master])

    def refresh(self, due: Iterable[Tensor] = ()) -> None:
        """Hide everything, for the masters are changing, and start to publish what is needed first.

        All ranks publish the same buckets, in the same order on each lane, and each rank as soon as its own masters
        are ready.

        Args:
            due: masters that :meth:`moved` will be called with. Their buckets wait for them.
        """
        self._settle_order()
        if self._reshard:
            # The model's own bucket surrounds the others, so the first of those is needed as soon.
            self._queue = self._order[: 1 if self._buckets[self._order[0]].name else 2]
        else:
            self._queue = list(self._order)
        for index in range(len(self._buckets)):
            self._free(index, keep=index in self._queue)
        self._waiting = Counter(self._of_master[master] for master in due)
        self._publish_ready()

    def moved(self, master: Tensor) -> None:
        """``master``, of those that were due, has its new value."""
        index = self._of_master[master]
        self._waiting[index] -= 1
        if not self._waiting[index]:
            self._publish_ready()

    def _publish_ready(self) -> None:
        """Publish in order, on each lane until a bucket has to wait."""
        blocked: set[int] = set()
        for index in list(self._queue):
            lane = index % self._routes.lanes
            if self._waiting[index]:
                blocked.add(lane)
            if lane not in blocked:
                self._queue.remove(index)
                self._publish(index)

    def _settle_order(self) -> None:
        if self._seen:
            self._order = [*self._seen, *(k for k in self._order if k not in self._seen)]
            self._seen = None

    def _publish_neighbour(self, index: int, distance: int) -> None:
        place = self._order.index(index) + distance
        if 0 <= place < len(self._order):
            self._publish(self._order[place])

    def _publish(self, index: int) -> None:
        if index in self._shown or index in self._under_way:
            return
        bucket = self._buckets[index]
        bucket.load()
        self._under_way[index] = self._routes.publish(bucket.flat, bucket.sizes, index % self._routes.lanes)

    def _show(self, index: int) -> None:
        self._publish(index)
        if index in self._under_way:
            self._wait(index)
            self._buckets[index].show()
            self._shown.add(index)

    def _wait(self, index: int) -> None:
        with self._routes.statistics.waiting("publish", self._buckets[index].name):
            self._under_way.pop(index).wait()

    def _free(self, index: int, keep: bool = False) -> None:
        """Take bucket ``index`` away, but ``keep`` its memory for a publication that follows at once."""
        if index in self._under_way:
            self._wait(index)
        elif index not in self._shown:
            return
        self._shown.discard(index)
        if keep:
            self._buckets[index].hide()
        else:
            self._buckets[index].free()
