"""One Newton–Schulz iteration, run exactly as an :class:`NSChoice` says.

Standard and Gram form are one recurrence. From R = X Xᵀ, each step takes P = aI + bR + cR², Q ← P Q and
R ← P R P; X ← Q X ends the iteration. A *restart* does X ← Q X, R ← X Xᵀ, Q ← I in between, and the standard
form X ← P X is the recurrence restarted before every step. Everything in Gram space is a polynomial in R, so
all of it is symmetric and commutes — but for rounding, which decides how each product may be formed:

* P R P is computed as P (R P), never as (P P) R: only the former keeps small eigenvalues accurate.
* R, P, R P and P R P may come from lower blocks and their mirror. But for P, which multiplies Q, whoever reads them
  may do so from the lower half, and then the mirror need not be written.
* P Q is a full product in this order. From its lower triangle alone, the commutator of P and Q would grow
  from step to step: measured in fp16 on clustered spectra, to five times the error of the full product.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels.backends import BACKENDS
from dmuon.kernels.backends.base import Product
from dmuon.kernels.backends.compiled import LINE_BYTES
from dmuon.kernels.choose import NSChoice, ProductChoice
from dmuon.kernels.coefficients import CoefficientSet, Triple
from dmuon.kernels.gpu.binary import Unsupported
from dmuon.kernels.normalize import SMALLEST_PANEL, plain_norm, scaled_copy
from dmuon.kernels.precision import precision_name

_CACHE_BYTES = 16 << 20
"""What a batch's matrices may take together on a CPU: half of a last-level cache, about. More gains nothing, and
costs memory; much less leaves threads without enough matrices."""

_PAGE_BYTES, _CACHE_LINE_BYTES = 4096, 64
"""Entries a page apart share few places of a CPU's first cache: a column of such rows does not fit. With rows one line
longer, mirroring 512×512 in fp32 takes a third of the time, measured. Batches are not padded, nor half precision:
torch copies batches that have gaps, and in bf16 all operands that do."""


def run_ns(
    G: Tensor,
    choice: NSChoice,
    coefficients: CoefficientSet,
    dtype: torch.dtype,
    out: Tensor | None = None,
    *,
    strict: bool = False,
) -> Tensor:
    """The orthogonalised G, (…, rows, cols), computed in ``dtype`` as ``choice`` says.

    Args:
        G: input, only read.
        choice: method, restarts, and the backend of each product.
        coefficients: one polynomial per step.
        dtype: working precision.
        out: result, of G's shape; may be G itself, and must not overlap it otherwise. New and of G's dtype
            if ``None``.
        strict: raise if a kernel of the choice cannot serve these matrices. Otherwise a warning says so once, and
            torch's products run in its place.

    Raises:
        Unsupported: with ``strict``.

    Beyond the result this holds one copy of G in ``dtype`` and four m×m matrices per matrix of a batch, or of
    as many matrices as run at a time.
    """
    if out is None:
        out = torch.empty_like(G, memory_format=torch.contiguous_format)
    if choice.whole is not None and _run_whole(G, choice, coefficients, dtype, out, strict):
        return out
    together = _together(G, choice.loop, dtype) if _one_batch(out) else 1
    if G.ndim > 2 and (together == 1 or together < G.shape[0]):
        for first in range(0, G.shape[0], together):
            # A lone matrix drops its batch dimension: plain products are faster than batches of one.
            part = slice(first, first + together) if together > 1 else first
            run_ns(G[part], choice, coefficients, dtype, out[part], strict=strict)
        return out
    segments = _segments(coefficients.steps, _restarts(choice, coefficients))
    # Where products can scale G as they read it, no copy of it is made.
    norm = plain_norm(G, dtype) if out.dtype == dtype and out.data_ptr() != G.data_ptr() else None
    direct = norm is not None
    if direct and len(segments) == 1:
        working = out
    else:
        working = working_memory(tuple(G.shape), dtype, G.device, lone=G.ndim == 2)
    spare = _spare(out, dtype)
    # X moves between `working` and `spare` at every apply; the last must land where the result is wanted.
    start, other = working, spare
    if spare is not None and (len(segments) % 2 == 0) == (spare is out):
        start, other = spare, working
    if start is not working and start is not out and out.data_ptr() == G.data_ptr():
        # A copy of G in its own memory, in another dtype: it would overwrite what it still has to read.
        start, other = working, None
    given, scale = (G, 1 / norm) if norm is not None else (start, scaled_copy(G, start))

    tall = G.shape[-2] > G.shape[-1]
    source, X, Y, result = (None if t is None else _matrices(t, tall) for t in (given, start, other, out))
    assert source is not None and X is not None and result is not None
    grams = _grams(choice, X)
    _iterate(source, scale, X, Y, result, grams, segments, _Products(choice, strict))
    return out


def _run_whole(
    G: Tensor,
    choice: NSChoice,
    coefficients: CoefficientSet,
    dtype: torch.dtype,
    out: Tensor,
    strict: bool,
    *,
    normalize: bool = True,
) -> bool:
    """Run all in one launch; ``False`` if the kernel cannot serve these matrices."""
    assert choice.whole is not None
    try:
        if not (_one_batch(G) and _one_batch(out)):
            raise Unsupported("the batch dimensions cannot be viewed as one")
        run, tall = _build("gram_ns", choice.whole), G.shape[-2] > G.shape[-1]
        restarts = tuple(_restarts(choice, coefficients))
        X, result = _matrices(G, tall), _matrices(out, tall)
        run(X, result, precision_name(dtype), coefficients.steps, restarts, normalize=normalize)
    except Unsupported as reason:
        if strict:
            raise
        _report(choice.whole.backend, "gram_ns", str(reason))
        return False
    return True


def run_prepared(
    X: Tensor, choice: NSChoice, coefficients: CoefficientSet
) -> tuple[Tensor | None, Tensor, float]:
    """All of an iteration but its last product: (Q, Y, q), with (Q + qI) Y the orthogonalised X.

    Args:
        X: (rows, cols) or (B, rows, cols) in the working precision, of Frobenius norm 1. It is overwritten.
        choice: as for :func:`run_ns`; batches run as one.
        coefficients: one polynomial per step.

    Returns:
        Q (…, m, m) and Y (…, m, n) for the smaller side m: Y is transposed if X is tall. Where one launch runs the
        whole iteration, Q is ``None`` and the orthogonalised matrix is Y, in X's place.
    """
    if choice.whole is not None and _run_whole(X, choice, coefficients, X.dtype, X, False, normalize=False):
        return None, _matrices(X, X.shape[-2] > X.shape[-1]), 0.0
    *before, last = _segments(coefficients.steps, _restarts(choice, coefficients))
    tall, products = X.shape[-2] > X.shape[-1], _Products(choice, False)
    source = _matrices(X, tall)
    free = _grams(choice, source)
    if before:
        target = _matrices(working_memory(tuple(X.shape), X.dtype, X.device), tall)
    for steps in before:
        Q, shift = _polynomial(source, 1.0, free, steps, products)
        source, target = _apply(Q, source, target, 1.0, shift, products), source
    Q, shift = _polynomial(source, 1.0, free, last, products)
    return Q, source, shift


def _restarts(choice: NSChoice, coefficients: CoefficientSet) -> range | tuple[int, ...]:
    """The standard form is the recurrence restarted before every step."""
    return range(1, len(coefficients)) if choice.method == "standard" else choice.restarts


def working_memory(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, lone: bool = False
) -> Tensor:
    """Working memory, its rows padded to LINE_BYTES on a GPU, and for ``lone`` matrices on a CPU where that pays."""
    row = shape[-1] * dtype.itemsize
    if device.type == "cuda":
        row = -(-row // LINE_BYTES) * LINE_BYTES
    elif lone and dtype.itemsize >= 4 and row >= _PAGE_BYTES and row % (_PAGE_BYTES // 2) == 0:
        row += _CACHE_LINE_BYTES
    return torch.empty(*shape[:-1], row // dtype.itemsize, dtype=dtype, device=device)[..., : shape[-1]]


def _grams(choice: NSChoice, X: Tensor) -> list[Tensor]:
    """The working matrices of ``choice``, (…, m, m) for X (…, m, n)."""
    # One step needs R, P and a panel; more steps between restarts also carry Q and a scratch product.
    count, m = 3 if choice.method == "standard" else 4, X.shape[-2]
    return list(working_memory((count, *X.shape[:-2], m, m), X.dtype, X.device, lone=X.ndim == 2))


def _together(G: Tensor, loop: bool, dtype: torch.dtype) -> int:
    """How many entries of G's first dimension run at a time: one with ``loop``, all on a GPU; on a CPU, as many
    matrices as keep what they iterate on in its cache."""
    if G.ndim == 2 or loop:
        return 1
    if G.device.type != "cpu":
        return G.shape[0]
    m, n = sorted(G.shape[-2:])
    entry = (2 * m * n + 4 * m * m) * dtype.itemsize * (G[0].numel() // (m * n))
    largest = max(2, _CACHE_BYTES // entry)
    return -(-G.shape[0] // -(-G.shape[0] // largest))


def _one_batch(out: Tensor) -> bool:
    """Whether all dimensions but the last two can be viewed as one."""
    batch = range(out.ndim - 3)
    return all(out.stride(k) == out.stride(k + 1) * out.shape[k + 1] for k in batch)


class _Products:
    """The products of a choice, built once per call; ``polynomial`` is the ``symmetric_product`` of results that
    ``apply`` reads, and are whole whatever the others keep to."""

    def __init__(self, choice: NSChoice, strict: bool) -> None:
        serve, square = _build if strict else _build_with_fallback, choice.symmetric_product
        self.gram = serve("gram", choice.gram)
        self.symmetric_product = self.polynomial = serve("symmetric_product", square)
        if "lower" in square.config:
            reading = ProductChoice(square.backend, {**square.config, "lower": "read"})
            self.polynomial = serve("symmetric_product", reading)
        self.apply = serve("apply", choice.apply)


def _build(op: str, choice: ProductChoice) -> Product:
    if choice.backend not in BACKENDS:
        raise ValueError(f"no backend is called {choice.backend!r}; there are {', '.join(BACKENDS)}")
    return BACKENDS[choice.backend].build(op, choice.config)


def _build_with_fallback(op: str, choice: ProductChoice) -> Product:
    """The product, or torch's where a kernel turns out not to serve its operands."""
    product = _build(op, choice)
    if choice.backend in ("torch", "blocked"):
        return product

    def run(*operands: Tensor, **scalars: Any) -> Tensor:
        try:
            return product(*operands, **scalars)
        except Unsupported as reason:
            _report(choice.backend, op, str(reason))
            if op == "symmetric_product" and "lower" in choice.config:
                for operand in (*operands[:2], scalars.get("C")):
                    if operand is not None:
                        operand.copy_(operand.tril() + operand.tril(-1).mT)
            return BACKENDS["torch"].build(op, {})(*operands, **scalars)

    return run


@lru_cache(maxsize=256)
def _report(backend: str, op: str, reason: str) -> None:
    """Warn, once for each reason."""
    warnings.warn(
        f"{backend} cannot run {op}: {reason}. Torch's products run instead.", RuntimeWarning, stacklevel=3
    )


def _segments(steps: tuple[Triple, ...], restarts: range | tuple[int, ...]) -> list[tuple[Triple, ...]]:
    """The steps between restarts."""
    if any(place >= len(steps) for place in restarts):
        raise ValueError(f"restarts must be below the {len(steps)} steps, got {list(restarts)}")
    cuts = [0, *restarts, len(steps)]
    return [steps[start:stop] for start, stop in pairwise(cuts)]


def _spare(out: Tensor, dtype: torch.dtype) -> Tensor | None:
    """``out``'s memory as a second working copy: itself in its own dtype, the front part of a wider one.

    Without gaps: torch copies operands that have some before a product in bf16.
    """
    if out.dtype == dtype:
        return out
    if out.dtype.itemsize > dtype.itemsize and out.is_contiguous() and out.stride(-1) == 1:
        return out.view(dtype).flatten()[: out.numel()].view(out.shape)
    return None


def _matrices(tensor: Tensor, tall: bool) -> Tensor:
    """(…, rows, cols) as (B, m, n) with m ≤ n, without a copy where the strides allow it; 2-D stays 2-D."""
    wide = tensor.mT if tall else tensor
    return wide if wide.ndim <= 3 else wide.view(-1, *wide.shape[-2:])


def _iterate(
    source: Tensor,
    scale: float,
    X: Tensor,
    Y: Tensor | None,
    result: Tensor,
    free: list[Tensor],
    segments: list[tuple[Triple, ...]],
    products: _Products,
) -> None:
    """Run all segments on scale·``source`` (2-D or 3-D); the orthogonalised matrix lands in ``result``.

    X, Y and the ``free`` m×m matrices are scratch; ``source`` may be X, and else is only read.
    """
    for k, steps in enumerate(segments):
        Q, shift = _polynomial(source, scale, free, steps, products)
        last = k == len(segments) - 1
        if last and result.dtype == X.dtype:
            _apply(Q, source, result, scale, shift, products)
        elif Y is not None:
            _apply(Q, source, Y, scale, shift, products)
            X, Y = Y, X
        else:
            panel = next(buffer for buffer in free if buffer is not Q)
            _apply_by_panels(Q, source, result if last else X, panel, scale, shift, products)
            source, scale = X, 1.0
            continue
        if last and result.dtype != X.dtype:
            result.copy_(X)
        source, scale = X, 1.0


def _polynomial(
    X: Tensor, scale: float, free: list[Tensor], steps: tuple[Triple, ...], products: _Products
) -> tuple[Tensor, float]:
    """Q and q, with Q + qI the product of the step polynomials of R = scale²·X Xᵀ; Q is one of the ``free`` buffers.

    A lone step leaves q = a out of Q: in half precision, a rounded diagonal a + bR + cR² would cost twice the
    error of all else. Several steps need each P rounded once and used the same in R and Q: there q = 0.
    """
    R, Q, *rest = free
    products.gram(X, R, alpha=scale**2)
    if len(steps) == 1:
        ((a, b, c),) = steps
        return products.polynomial(R, R, Q, alpha=c, beta=b, C=R), a
    for k, (a, b, c) in enumerate(steps):
        if k == 0:
            P = Q
            products.polynomial(R, R, P, alpha=c, beta=b, C=R, diag=a)
        else:
            P, product = rest
            products.polynomial(R, R, P, alpha=c, beta=b, C=R, diag=a)
            products.apply(P, Q, product)
            Q, rest = product, [P, Q]
        if k < len(steps) - 1:
            scratch = rest[-1]
            products.symmetric_product(R, P, scratch)
            products.symmetric_product(P, scratch, R)
    return Q, 0.0


def _apply(Q: Tensor, X: Tensor, target: Tensor, scale: float, shift: float, products: _Products) -> Tensor:
    """target ← scale·(Q + shift·I) X."""
    return products.apply(Q, X, target, alpha=scale, beta=scale * shift, C=X if shift else None)


def _apply_by_panels(
    Q: Tensor, X: Tensor, target: Tensor, panel: Tensor, scale: float, shift: float, products: _Products
) -> None:
    """The same, m columns at a time through ``panel``, or some more at a time if that is little memory; ``target``
    may be X, and may be of another dtype."""
    n, width = X.shape[-1], SMALLEST_PANEL // X[..., 0].numel()
    if width > panel.shape[-1]:
        panel = X.new_empty(*X.shape[:-1], min(width, n))
    for start in range(0, n, panel.shape[-1]):
        part = slice(start, min(start + panel.shape[-1], n))
        columns = panel[..., : part.stop - start]
        target[..., part].copy_(_apply(Q, X[..., part], columns, scale, shift, products))
