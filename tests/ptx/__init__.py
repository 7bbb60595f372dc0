"""A PTX interpreter on numpy: runs what kernels really compile to, on CPU tensors. See README.md."""

from ptx.interpreter import run
from ptx.memory import Memory
from ptx.owners import Race
from ptx.report import Report
from ptx.scheduler import Deadlock

__all__ = ["Deadlock", "Memory", "Race", "Report", "run"]
