"""Batches of matrices that kernels move on a GPU, from gradient to weight, replayed from CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from dmuon.batching import Piece, Update
from dmuon.graphs import Replays, replayable
from dmuon.kernels.choose import Problem, device_key
from dmuon.kernels.coefficients import resolve_coefficients
from dmuon.kernels.gpu.binary import Unsupported
from dmuon.kernels.gpu.triton_kernels.elementwise import fill_table, scalars_of
from dmuon.kernels.gram_ns import choose_ns
from dmuon.kernels.precision import precision_name, resolve_precision
from dmuon.kernels.step import Step, step_arch
from dmuon.lr_adjust import AdjustRule

_WEIGHTS = (torch.float32, torch.bfloat16)
_GRADIENTS = (*_WEIGHTS, torch.float16)
_WORKING = (torch.float16, torch.bfloat16)


class FusedSteps:
    """Makes steps in kernels.

    Args:
        rules: what a group's ``adjust_lr`` may name.
        replays: where batches are recorded.
    """

    def __init__(self, rules: Mapping[str, AdjustRule], replays: Replays) -> None:
        self._rules, self._replays = rules, replays
        self._served: dict[Step, bool] = {}

    def step_of(self, update: Update) -> Step | None:
        """What moves ``update``, whose momentum has not been advanced; ``None`` if kernels cannot, or cannot now."""
        weight, gradient, momentum = update.parameter, update.gradient, update.momentum
        arch = step_arch(weight.device)
        working = resolve_precision(update.group["precision"], momentum)
        dtypes_served = (
            weight.dtype in _WEIGHTS
            and momentum.dtype == weight.dtype
            and gradient.dtype in _GRADIENTS
            and working in _WORKING
        )
        if arch is None or not dtypes_served or update.matrix.transposed or _is_variant(update):
            return None
        if not all(_is_plain(tensor) for tensor in (weight, gradient, momentum)):
            return None
        if weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The host makes the table, which a graph of the whole step would not repeat.
            return None
        addresses = _addresses(update, 0, min(update.matrix.batch, 2))  # the others are as far apart
        step = Step(
            arch,
            update.matrix.rows,
            update.matrix.cols,
            precision_name(weight.dtype),
            precision_name(gradient.dtype),
            precision_name(working),
            update.group["nesterov"],
            # A gradient may lie anywhere in a bucket of DDP's.
            state_aligned=all(address % 16 == 0 for each in addresses for address in each[:2]),
            weights_aligned=all(weight % 16 == 0 for _, _, weight in addresses),
        )
        if step not in self._served:
            self._served[step] = _load(step, weight.device)
        return step if self._served[step] else None

    def move(self, step: Step, batch: Sequence[Piece], counter: Tensor) -> None:
        """Advance the momenta of a batch and move its weights; count on ``counter`` what is not finite."""
        first = batch[0].update
        polynomials = resolve_coefficients(first.group["coefficients"])
        device, (m, n) = first.parameter.device, sorted((step.rows, step.cols))

        def work(table: Tensor) -> None:
            problem = Problem("gram_ns", len(table), m, n, step.dtype, device_key(device), polynomials.key)
            step.run(table, counter, choose_ns(problem, polynomials), polynomials)

        table = self._table(batch, pinned=device.type == "cuda")
        if replayable(device):
            buffer = self._replays.buffer(tuple(table.shape), table.dtype, device)
            buffer.copy_(table, non_blocking=True)
        else:
            buffer = table.to(device, non_blocking=True)
        self._scale_on_device(batch, scalars_of(buffer))
        if replayable(device):
            self._replays.run((step, polynomials.key), buffer, work)
        else:
            work(buffer)
        for piece in batch:
            # Autograd does not see what kernels write.
            increment_version((piece.update.parameter, piece.update.momentum))

    def _table(self, batch: Sequence[Piece], *, pinned: bool) -> Tensor:
        addresses, scalars = [], []
        for piece in batch:
            group = piece.update.group
            lr = 0.0 if isinstance(group["lr"], Tensor) else group["lr"]
            factors = (self._factor(piece) * lr, 1 - lr * group["weight_decay"])
            addresses += _addresses(piece.update, piece.start, piece.stop)
            scalars += [(1 - group["momentum"], group["momentum"], *factors)] * piece.count
        return fill_table(addresses, scalars, pinned=pinned)

    def _scale_on_device(self, batch: Sequence[Piece], scalars: Tensor) -> None:
        """Fill in what follows from learning rates that are tensors, which the host does not read."""
        stop = 0
        for piece in batch:
            start, stop = stop, stop + piece.count
            lr = piece.update.group["lr"]
            if isinstance(lr, Tensor):
                scalars[start:stop, 2].fill_(lr * self._factor(piece))
                scalars[start:stop, 3].fill_(1 - lr * piece.update.group["weight_decay"])

    def _factor(self, piece: Piece) -> float:
        """Of the learning rate, with the sign of the step."""
        matrix, group = piece.update.matrix, piece.update.group
        factor = self._rules[group["adjust_lr"]](matrix.rows, matrix.cols)
        return factor if group["maximize"] else -factor


def _addresses(update: Update, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Of gradient, momentum and weight of matrices ``start`` to ``stop``, which are contiguous."""
    matrix, tensors = update.matrix, (update.gradient, update.momentum, update.parameter)
    first, apart = matrix.start * matrix.cols, update.parameter.numel() // matrix.batch
    (g, g_size), (b, b_size), (w, w_size) = ((each.data_ptr(), each.itemsize) for each in tensors)
    offsets = [first + k * apart for k in range(start, stop)]
    return [(g + k * g_size, b + k * b_size, w + k * w_size) for k in offsets]


def _is_variant(update: Update) -> bool:
    """Whether the step is to be more than the kernels make of it."""
    group = update.group
    cautious = group["cautious_decay"] and group["weight_decay"]
    return bool(group["normuon_beta2"] is not None or cautious or update.rounded)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the elements are where ``data_ptr`` says, one after the other."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous()


def _load(step: Step, device: torch.device) -> bool:
    """Have all kernels of ``step`` at hand before anything is changed; warn if they are not to be had."""
    try:
        step.load(device)
    except Unsupported as reason:
        _report(str(reason))
        return False
    return True


@lru_cache
def _report(reason: str) -> None:
    """Warn, once for each reason."""
    warnings.warn(
        f"Muon's steps run on torch's operations, not on kernels of their own: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
