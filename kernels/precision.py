"""Working precisions: their names, the default for a tensor, and how coarsely each rounds."""

from __future__ import annotations

import torch

PRECISIONS: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in PRECISIONS.items()}


def precision_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` → ``"bf16"``. Raises TypeError for a dtype no iteration runs in."""
    if dtype not in _NAMES:
        raise TypeError(f"Newton-Schulz runs in {', '.join(map(str, _NAMES))}, got {dtype}")
    return _NAMES[dtype]


def resolve_precision(precision: str, G: torch.Tensor) -> torch.dtype:
    """The working dtype for input ``G``.

    ``"auto"`` is fp64 for fp64 input, else fp16 on CUDA (tensor cores; one restart keeps it stable) and fp32
    elsewhere. Any other name is taken at its word.

    Raises:
        ValueError: ``precision`` is none of ``"auto"``, ``"fp64"``, ``"fp32"``, ``"bf16"``, ``"fp16"``.
    """
    if precision == "auto":
        if G.dtype == torch.float64:
            return torch.float64
        return torch.float16 if G.device.type == "cuda" else torch.float32
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be 'auto' or one of {', '.join(PRECISIONS)}, got {precision!r}")
    return PRECISIONS[precision]
