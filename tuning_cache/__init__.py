"""The store of trials: one SQLite file that many processes share, and the entries shipped with DMuon."""

from __future__ import annotations

from dmuon.tuning_cache.claims import Claim
from dmuon.tuning_cache.database import StoreUnavailable, StoreWarning
from dmuon.tuning_cache.paths import default_path
from dmuon.tuning_cache.shipped import shipped_trials
from dmuon.tuning_cache.store import Health, Store
from dmuon.tuning_cache.trial import STATUSES, Trial

__all__ = [
    "STATUSES",
    "Claim",
    "Health",
    "Store",
    "StoreUnavailable",
    "StoreWarning",
    "Trial",
    "default_path",
    "shipped_trials",
]
