"""``gram_ns``: orthogonalise matrices by Newton–Schulz, in the form and on the kernels that suit them best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from dmuon.kernels.choose import (
    METHODS,
    NSChoice,
    Problem,
    computing_dtype,
    current_chooser,
    device_key,
    heuristic_choice,
)
from dmuon.kernels.coefficients import CoefficientSet, resolve_coefficients
from dmuon.kernels.overlap import overlap, same_memory
from dmuon.kernels.precision import PRECISIONS, precision_name, resolve_precision
from dmuon.kernels.restarts import default_restarts
from dmuon.kernels.run import run_ns


@torch.no_grad()
def gram_ns(
    G: Tensor,
    *,
    coefficients: str | CoefficientSet | Sequence[Sequence[float]] = "polar_express",
    restarts: Literal["auto"] | Sequence[int] = "auto",
    precision: str = "auto",
    method: str = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """Orthogonalise each matrix of ``G`` (…, m, n) by Newton–Schulz: U S Vᵀ ↦ U p(S) Vᵀ, with p(S) ≈ 1.

    p is the composition of one odd quintic per step, applied to G / ‖G‖_F. Two forms compute it: *standard*,
    X ← (aI + bR + cR²) X with R = X Xᵀ at every step, and *Gram* (gram-newton-schulz, Dao-AILab), which
    iterates on the small R instead and touches X only at the end and at restarts. They differ in speed and
    rounding, not in the polynomial. Which runs, and on which kernels, is looked up (what ``dmuon-tune`` kept)
    or follows :func:`~dmuon.kernels.choose.heuristic_choice`.

    The result does not depend on G's scale. A zero matrix gives zero; a NaN or Inf makes its own matrix NaN
    and leaves the others of a batch alone. G is only read, and no gradient flows through. Beyond the result,
    memory holds one copy of G in the working precision and four m×m matrices per matrix (m the smaller side),
    their rows padded where that is faster, and what torch's own products need meanwhile.

    Args:
        G: fp64, fp32, bf16 or fp16; at least 2-D; any strides; m > n as well as m < n.
        coefficients: ``"polar_express"`` (Amsel et al., arXiv 2505.16932), ``"keller_jordan"``, ``"you"``, a
            :class:`CoefficientSet`, or one (a, b, c) per step.
        restarts: 0-based steps run right after a restart of the Gram form; ``"auto"`` takes the fewest that
            keep it stable in the working precision (:func:`~dmuon.kernels.restarts.default_restarts`).
        precision: working precision ``"fp64"``, ``"fp32"``, ``"bf16"`` or ``"fp16"``; ``"auto"`` is fp64 for
            fp64 input, else fp16 on CUDA and fp32 elsewhere. Small bf16 matrices are computed in fp32 where that
            is faster (:func:`~dmuon.kernels.choose.computing_dtype`).
        method: ``"gram"``, ``"standard"`` or ``"auto"``.
        out: where to write, of G's shape and device and any of the four dtypes. May be ``G`` itself.

    Returns:
        ``out``, or a new contiguous tensor of G's shape and dtype.

    Raises:
        TypeError: ``G`` or ``out`` is no dense tensor of a supported dtype, or ``coefficients`` or ``restarts`` are
            of the wrong kind.
        ValueError: ``G`` is less than 2-D or empty, ``out`` does not match, or an option is unknown.
    """
    _check_matrix("G", G)
    polynomials = resolve_coefficients(coefficients)
    dtype = resolve_precision(precision, G)
    fixed = _check_restarts(restarts, len(polynomials), method)
    if out is not None:
        _check_out(out, G)
    if G.is_meta:
        return torch.empty_like(G, memory_format=torch.contiguous_format) if out is None else out
    m, n = sorted(G.shape[-2:])
    batch, device = G.numel() // (m * n), device_key(G.device)
    problem = Problem("gram_ns", batch, m, n, precision_name(dtype), device, polynomials.key)
    choice = choose_ns(problem, polynomials, fixed, method)
    return run_ns(G, choice, polynomials, computing_dtype(problem), out)


def choose_ns(
    problem: Problem,
    coefficients: CoefficientSet,
    restarts: tuple[int, ...] | None = None,
    method: str = "auto",
) -> NSChoice:
    """The tuned or heuristic choice, bent to what the caller fixed."""
    chooser = current_chooser()
    choice = chooser.choose(problem) if chooser is not None else None
    if choice is None:
        choice = heuristic_choice(problem, coefficients)
    if restarts is not None:
        return replace(choice, method="gram", restarts=restarts)
    if method == "standard":
        return replace(choice, method="standard", restarts=())
    if method == "gram" and choice.method != "gram":
        return replace(
            choice, method="gram", restarts=default_restarts(coefficients, computing_dtype(problem))
        )
    return choice


def _check_matrix(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be dense, got layout {tensor.layout}; call .to_dense() first")
    if tensor.dtype not in PRECISIONS.values():
        raise TypeError(f"{name} must be fp64, fp32, bf16 or fp16, got {tensor.dtype}; convert it first")
    if tensor.ndim < 2:
        raise ValueError(f"{name} must have at least 2 dimensions (…, m, n), got shape {tuple(tensor.shape)}")
    if tensor.numel() == 0:
        raise ValueError(f"{name} has no elements, got shape {tuple(tensor.shape)}; skip empty matrices")


def _check_restarts(
    restarts: Literal["auto"] | Sequence[int], steps: int, method: str
) -> tuple[int, ...] | None:
    """The caller's restarts; ``None`` for "auto"."""
    if method != "auto" and method not in METHODS:
        raise ValueError(f"method must be 'auto', 'gram' or 'standard', got {method!r}")
    if isinstance(restarts, str):
        if restarts != "auto":
            raise ValueError(f"restarts must be 'auto' or a sequence of steps, got {restarts!r}")
        return None
    if not isinstance(restarts, Sequence):
        raise TypeError(f"restarts must be 'auto' or a sequence of steps, got {type(restarts).__name__}")
    places: tuple[Any, ...] = tuple(restarts)
    whole = all(type(place) is int and 1 <= place < steps for place in places)
    if not whole or any(first >= second for first, second in pairwise(places)):
        raise ValueError(f"restarts must be increasing steps from 1 to {steps - 1}, got {list(places)}")
    if method == "standard":
        raise ValueError("restarts belong to the Gram form: leave them at 'auto' or choose method='gram'")
    return places


def _check_out(out: Tensor, G: Tensor) -> None:
    _check_matrix("out", out)
    if out.shape != G.shape or out.device != G.device:
        raise ValueError(
            f"out must have G's shape {tuple(G.shape)} on {G.device}, got {tuple(out.shape)} on {out.device}"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise ValueError(
            "out must not be expanded: several of its elements share memory; pass a contiguous one"
        )
    if overlap(out, G) and not same_memory(out, G):
        raise ValueError("out overlaps G in memory; pass G itself or separate memory")
