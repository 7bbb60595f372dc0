"""The step of matrices whose shards lie on the ranks of a tensor-parallel group.

Momentum and decay are elementwise, and every rank makes those of its own shards. For Newton–Schulz, each matrix is
brought together on one of the ranks, which sends everyone its part of the result. So is a matrix that all of them have
whole, of which nothing but the result travels: computed once it is the same everywhere. What shards do not cut, as
experts of a stack that is divided by experts, does not travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from typing import Any

import torch
from torch import Tensor

from dmuon.batching import BATCH_ELEMENTS, Piece, Update, batches
from dmuon.matrix import Matrix
from dmuon.matrix_step import MatrixStep
from dmuon.ownership.exchange import Transfer
from dmuon.ownership.tensor_parallel import TensorParallel, shard_dim, shares
from dmuon.shards import local


@dataclass(eq=False)
class _Job:
    """One parameter: its matrices, by the shape of the whole, and this rank's part of it.

    ``dim`` is divided over the ranks; None where each has all. ``at`` is the rank that orthogonalises.
    """

    updates: list[Update]
    weight: Tensor
    dim: int | None
    at: int = 0

    @property
    def shape(self) -> torch.Size:
        return self.updates[0].parameter.shape

    @property
    def cost(self) -> int:
        matrices = [update.matrix for update in self.updates]
        return sum(m.batch * m.rows * m.cols * min(m.rows, m.cols) for m in matrices)

    def part(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """What ``rank`` has of ``whole``."""
        if self.dim is None:
            return whole
        start, stop = shares(self.shape[self.dim], ranks)[rank]
        return whole.narrow(self.dim, start, stop - start)


class TensorStep:
    """Makes updates together with the other ranks of a tensor-parallel group, which are to make the same ones.

    Args:
        group: the ranks.
        step: of whole matrices.
    """

    def __init__(self, group: TensorParallel, step: MatrixStep) -> None:
        self._exchange, self._step = group.exchange, step

    def run(self, updates: Sequence[Update]) -> Iterator[Tensor]:
        """As :meth:`MatrixStep.run`, of weights that may be DTensors on the group's mesh. Collective."""
        uncut, jobs = [], []
        for _, members in groupby(updates, key=lambda update: id(update.parameter)):
            mine = list(members)
            dim = shard_dim(mine[0].parameter)
            if dim == 0 and mine[0].parameter.ndim == 3 and not mine[0].matrix.flat:
                uncut += mine
            else:
                jobs.append(_Job(mine, local(mine[0].parameter), dim))
        waves = [
            wave
            for _, alike in groupby(sorted(jobs, key=_dtype), key=_dtype)
            for wave in self._waves(list(alike))
        ]
        coming = self._gather(waves[0]) if waves else None
        yield from self._run_uncut(uncut)
        going: tuple[list[_Job], Transfer] | None = None
        for wave, following in zip_longest(waves, waves[1:]):
            arrived, coming = coming, self._gather(following) if following else None
            assert arrived is not None
            before, going = going, (wave, self._scatter(wave, self._orthogonalize(wave, arrived)))
            if before is not None:
                yield from self._move(*before)
        if going is not None:
            yield from self._move(*going)

    def _run_uncut(self, updates: Sequence[Update]) -> Iterator[Tensor]:
        """Of stacks of matrices, those that are here."""
        masters: dict[Tensor, Tensor] = {}
        here = []
        for _, members in groupby(updates, key=lambda update: id(update.parameter)):
            mine = list(members)
            master, weight = mine[0].parameter, local(mine[0].parameter)
            if not weight.numel():
                yield master
                continue
            masters[weight] = master
            tensors = weight, local(mine[0].gradient), local(mine[0].momentum)
            for update in mine:
                matrix = replace(update.matrix, shape=tuple(weight.shape), batch=weight.shape[0])
                here.append(Update(*tensors, matrix, update.group))
        for weight in self._step.run(here):
            yield masters[weight]

    def _waves(self, jobs: list[_Job]) -> list[list[_Job]]:
        """Jobs that are gathered together: of each rank at most a batch's elements, or one.

        The ranks get equal shares of the work, and each runs its own in the order of ``jobs``.
        """
        ranks = range(self._exchange.size)
        loads = [0 for _ in ranks]
        for job in sorted(jobs, key=lambda job: -job.cost):
            job.at = min(ranks, key=lambda rank: loads[rank])
            loads[job.at] += job.cost
        runs = [_runs([job for job in jobs if job.at == rank]) for rank in ranks]
        return [[job for run in wave if run for job in run] for wave in zip_longest(*runs)]

    def _gather(self, wave: list[_Job]) -> Transfer:
        """Advance the momenta of ``wave``, and send each rank what it is to orthogonalise of them."""
        rank, ranks = self._exchange.rank, range(self._exchange.size)
        to_each = [sum(self._sent(job, rank) for job in wave if job.at == r) for r in ranks]
        mine = [job for job in wave if job.at == rank]
        from_each = [sum(self._sent(job, r) for job in mine) for r in ranks]
        sent = wave[0].weight.new_empty(sum(to_each))
        stop = 0
        for job in wave:
            start, stop = stop, stop + self._sent(job, rank)
            self._look_ahead(job, sent[start:stop])
        received = sent.new_empty(sum(from_each))
        return self._exchange.all_to_all("gather", received, from_each, sent, to_each)

    def _sent(self, job: _Job, rank: int) -> int:
        """How many elements ``rank`` sends for ``job``: of what all ranks have, the one that computes needs none."""
        if job.dim is None:
            return job.weight.numel() if rank == job.at else 0
        start, stop = shares(job.shape[job.dim], self._exchange.size)[rank]
        return job.shape.numel() // job.shape[job.dim] * (stop - start)

    def _look_ahead(self, job: _Job, target: Tensor) -> None:
        update = job.updates[0]
        momentum = local(update.momentum)
        gradient = self._step.advance_momentum(
            replace(update, parameter=job.weight, gradient=local(update.gradient), momentum=momentum)
        )
        if not target.numel():
            return
        target = target.view(momentum.shape)
        if update.group["nesterov"]:
            torch.lerp(gradient, momentum, update.group["momentum"], out=target)
        else:
            target.copy_(momentum)

    def _orthogonalize(self, wave: list[_Job], arriving: Transfer) -> list[Tensor]:
        """The whole directions of this rank's jobs."""
        rank, size = self._exchange.rank, self._exchange.size
        with self._exchange.statistics.waiting("gather", ""):
            received = arriving.wait()
        mine = [job for job in wave if job.at == rank]
        wholes = [received.new_empty(job.shape) for job in mine]
        stop = 0
        for source in range(size):
            for job, whole in zip(mine, wholes, strict=True):
                start, stop = stop, stop + self._sent(job, source)
                if stop > start:
                    part = job.part(whole, source, size)
                    part.copy_(received[start:stop].view(part.shape))
        updates, factors = [], {}
        for job, whole in zip(mine, wholes, strict=True):
            for update in job.updates:
                # A look-ahead from the look-ahead to itself is itself.
                updates.append(Update(whole, whole, whole, update.matrix, update.group))
                factors[updates[-1]] = 1.0 if self._factor(job) is not None else self._step.factor(update)
        for batch in batches(updates):
            for piece, direction in zip(batch, self._step.orthogonalized(batch), strict=True):
                factor = factors[piece.update]
                piece.parameter().copy_(direction if factor == 1.0 else direction.mul_(factor))
        return wholes

    def _scatter(self, wave: list[_Job], wholes: list[Tensor]) -> Transfer:
        """Send each rank its parts of the directions, of which ``wholes`` are this one's."""
        rank, ranks = self._exchange.rank, range(self._exchange.size)
        mine = [job for job in wave if job.at == rank]
        parts = [
            [job.part(whole, r, len(ranks)) for job, whole in zip(mine, wholes, strict=True)] for r in ranks
        ]
        to_each = [sum(part.numel() for part in each) for each in parts]
        from_each = [sum(job.weight.numel() for job in wave if job.at == r) for r in ranks]
        sent = wave[0].weight.new_empty(sum(to_each))
        stop = 0
        for part in (part for each in parts for part in each):
            start, stop = stop, stop + part.numel()
            sent[start:stop].view(part.shape).copy_(part)
        received = sent.new_empty(sum(from_each))
        return self._exchange.all_to_all("scatter", received, from_each, sent, to_each)

    def _factor(self, job: _Job) -> float | None:
        """Of the learning rate of all matrices of ``job``; None where these differ, whose directions then have it."""
        first, *others = {self._step.factor(update) for update in job.updates}
        return None if others else first

    def _move(self, wave: list[_Job], arriving: Transfer) -> Iterator[Tensor]:
        with self._exchange.statistics.waiting("scatter", ""):
            received = arriving.wait()
        stop = 0
        for job in wave:
            start, stop = stop, stop + job.weight.numel()
            if stop > start:
                rows = job.weight.view(job.weight.shape[0], -1)
                update = replace(
                    job.updates[0], parameter=rows, matrix=Matrix(tuple(rows.shape), *rows.shape)
                )
                direction = received[start:stop].view(1, *rows.shape)
                factor = self._factor(job)
                self._step.move(Piece(update, 0, 1), direction, 1.0 if factor is None else factor)
            yield job.updates[0].parameter


def check_group(group: Mapping[str, Any]) -> None:
    """Raise a ValueError if a Muon group has an option that takes more than each rank knows."""
    for key, off, why in (
        ("normuon_beta2", None, "its second moment goes by whole rows"),
        ("stochastic_rounding", False, "ranks that have all of a matrix would round it apart"),
    ):
        if group[key] is not off:
            raise ValueError(f"{key}={group[key]} is not to be had with tensor parallelism: {why}")


def _dtype(job: _Job) -> str:
    return str(job.weight.dtype)


def _runs(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """``jobs`` in runs of at most a batch's elements, or of one job."""
    runs: list[list[_Job]] = []
    room = 0
    for job in jobs:
        if job.shape.numel() > room or not runs:
            runs.append([])
            room = max(BATCH_ELEMENTS, job.shape.numel())
        runs[-1].append(job)
        room -= job.shape.numel()
    return runs
