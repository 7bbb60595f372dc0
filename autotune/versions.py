"""What a timing depends on besides the problem: library versions, the driver, and the kernels' sources."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from dmuon.kernels.backends import BACKENDS, source_hash
from dmuon.tuning_cache import Trial

DRIVER = "cuda_driver"
"""The entry of a CUDA trial's ``versions`` that holds the driver's version, beside the distributions'."""


def versions_now(backends: Iterable[str], device: str) -> dict[str, str]:
    """The versions that timings of ``backends`` on ``device`` (a device key) depend on, read from metadata.

    Nothing is imported. A distribution that is not installed has the version ``"not installed"``.

    Raises:
        KeyError: a name is not a backend.
    """
    distributions = sorted({name for backend in backends for name in BACKENDS[backend].requires})
    versions = {name: _installed(name) for name in distributions}
    if device.startswith("cuda"):
        versions[DRIVER] = _cuda_driver()
    return versions


def valid(trial: Trial) -> bool:
    """Whether ``trial`` still speaks for what is installed now: same kernel sources, versions and driver.

    A trial of a backend that this installation does not know is not valid.
    """
    backends = trial.backend.split("+")
    if not all(name in BACKENDS for name in backends):
        return False
    if trial.source_hash != source_hash(backends):
        return False
    return trial.versions == versions_now(backends, trial.device)


@lru_cache
def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


@lru_cache
def _cuda_driver() -> str:
    """The driver's own version (such as "580.65.06") from NVML, which needs no CUDA context."""
    for library in ("libnvidia-ml.so.1", "nvml.dll"):
        try:
            nvml = ctypes.CDLL(library)
        except OSError:
            continue
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            return text.value.decode()
    return "none"
