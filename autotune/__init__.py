"""The shape autotuner: measures how to run each matrix shape fastest, and answers with it from then on."""

from __future__ import annotations

from dmuon.autotune.chooser import TunedChooser, install
from dmuon.autotune.costs import Cost, CostTable
from dmuon.autotune.problems import ns_problem
from dmuon.autotune.report import Outcome, Progress, Report
from dmuon.autotune.tuner import Tuner, tune
from dmuon.autotune.versions import valid

__all__ = [
    "Cost",
    "CostTable",
    "Outcome",
    "Progress",
    "Report",
    "TunedChooser",
    "Tuner",
    "install",
    "ns_problem",
    "tune",
    "valid",
]
