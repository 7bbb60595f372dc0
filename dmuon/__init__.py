"""Distributed Muon at the cost of AdamW. Everything here loads on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmuon.muon import Muon as Muon
    from dmuon.ownership.checkpoint import load_checkpoint as load_checkpoint
    from dmuon.ownership.checkpoint import save_checkpoint as save_checkpoint
    from dmuon.ownership.consistency import check_consistency as check_consistency
    from dmuon.ownership.export import full_state_dict as full_state_dict
    from dmuon.ownership.grad_scaler import GradScaler as GradScaler
    from dmuon.ownership.gradients import clip_grad_norm_ as clip_grad_norm_
    from dmuon.ownership.gradients import set_requires_gradient_sync as set_requires_gradient_sync
    from dmuon.ownership.materialize import materialize as materialize
    from dmuon.ownership.owned import own as own
    from dmuon.ownership.probe import measure_network as measure_network
    from dmuon.policy import MatrixPolicy as MatrixPolicy
    from dmuon.report import describe as describe
    from dmuon.update_hooks import MatrixUpdate as MatrixUpdate

__version__ = "0.1.0"

_EXPORTS = {
    "GradScaler": "dmuon.ownership.grad_scaler",
    "Muon": "dmuon.muon",
    "MatrixPolicy": "dmuon.policy",
    "MatrixUpdate": "dmuon.update_hooks",
    "check_consistency": "dmuon.ownership.consistency",
    "clip_grad_norm_": "dmuon.ownership.gradients",
    "describe": "dmuon.report",
    "full_state_dict": "dmuon.ownership.export",
    "load_checkpoint": "dmuon.ownership.checkpoint",
    "materialize": "dmuon.ownership.materialize",
    "measure_network": "dmuon.ownership.probe",
    "own": "dmuon.ownership.owned",
    "save_checkpoint": "dmuon.ownership.checkpoint",
    "set_requires_gradient_sync": "dmuon.ownership.gradients",
}

__all__ = [
    "GradScaler",
    "MatrixPolicy",
    "MatrixUpdate",
    "Muon",
    "__version__",
    "check_consistency",
    "clip_grad_norm_",
    "describe",
    "full_state_dict",
    "load_checkpoint",
    "materialize",
    "measure_network",
    "own",
    "save_checkpoint",
    "set_requires_gradient_sync",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
