"""From a spec to its binary: from memory, from disk, or by compiling it once on this machine."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dmuon.kernels.gpu.binary import Binary, KernelSpec, Unsupported
from dmuon.kernels.gpu.cache import BinaryCache, default_folder
from dmuon.kernels.gpu.pool import TIMEOUT_S, BuildCancelled, BuildFailed, Pool


@dataclass(frozen=True)
class Outcome:
    """What became of a spec.

    Args:
        status: ``"compiled"``, ``"cached"`` or ``"failed"``.
        binary: ``None`` if it failed.
        reason: why it failed.
        seconds: spent, waiting for other processes included.
    """

    spec: KernelSpec
    status: str
    binary: Binary | None
    reason: str | None
    seconds: float


Progress = Callable[[KernelSpec, "Outcome | None"], None]
"""Called when a spec's compilation starts, with ``None``, and when it is done."""


def binary_for(spec: KernelSpec) -> Binary:
    """The binary of ``spec``. The first call may compile; later ones, in any process of this machine, load.

    ``DMUON_COMPILE=off`` forbids compiling, for jobs that must not wait: ``dmuon-tune compile`` goes before them.

    Raises:
        Unsupported: it cannot be compiled, or compiling it has failed, today or in this process; or it is not
            compiled and compiling is off.
        ValueError: ``DMUON_COMPILE`` is neither ``on`` nor ``off``.
    """
    known = _known.get(spec)
    if known is None:
        outcome = _obtain(spec, _cache(default_folder()), _compile)
        known = _known[spec] = outcome.binary or outcome.reason or ""
    if isinstance(known, str):
        raise Unsupported(known)
    return known


def compile_all(
    specs: Iterable[KernelSpec],
    *,
    jobs: int | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
    cache: BinaryCache | None = None,
) -> list[Outcome]:
    """Compile what of ``specs`` is not in the cache, ``jobs`` at a time, and keep it there.

    A failure stops nothing, and earlier failures are tried again. On KeyboardInterrupt the compilers are killed,
    and what was finished is kept.

    Args:
        specs: equal ones are compiled once.
        jobs: how many at a time; as many as there are cores if ``None``.
        timeout_s: for one kernel.
        progress: called in this thread.
        cache: the default one if ``None``.

    Returns:
        one outcome for each different spec, in their order.
    """
    cache = cache or BinaryCache()
    wanted = list(dict.fromkeys(specs))
    events: queue.Queue[tuple[KernelSpec, Outcome | None] | BaseException] = queue.Queue()
    outcomes: dict[KernelSpec, Outcome] = {}
    with Pool(jobs, timeout_s) as pool, ThreadPoolExecutor(pool.jobs) as threads:

        def compile_one(spec: KernelSpec) -> Binary:
            events.put((spec, None))
            return pool.build(spec)

        def obtain(spec: KernelSpec) -> None:
            try:
                events.put((spec, _obtain(spec, cache, compile_one, retry=True)))
            except BuildCancelled:
                pass
            except BaseException as error:
                events.put(error)

        for spec in wanted:
            threads.submit(obtain, spec)
        try:
            while len(outcomes) < len(wanted):
                event = events.get()
                if isinstance(event, BaseException):
                    raise event
                spec, outcome = event
                if outcome is not None:
                    outcomes[spec] = outcome
                if progress is not None:
                    progress(spec, outcome)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            pool.close()
    return [outcomes[spec] for spec in wanted]


_known: dict[KernelSpec, Binary | str] = {}
"""Of this process: binaries, and reasons of failure."""


def _obtain(
    spec: KernelSpec, cache: BinaryCache, build: Callable[[KernelSpec], Binary], retry: bool = False
) -> Outcome:
    """Load ``spec`` or build it, as the only process that does, and remember how that ended."""
    start = time.monotonic()

    def outcome(status: str, result: Binary | str) -> Outcome:
        seconds = time.monotonic() - start
        if isinstance(result, str):
            return Outcome(spec, status, None, result, seconds)
        return Outcome(spec, status, result, None, seconds)

    binary = cache.load(spec)
    if binary is not None:
        return outcome("cached", binary)
    with cache.lock(spec, timeout_s=2 * TIMEOUT_S):
        binary = cache.load(spec)  # whoever held the lock may have built it
        if binary is not None:
            return outcome("cached", binary)
        failure = None if retry else cache.failure(spec)
        if failure is not None:
            return outcome("failed", failure)
        try:
            binary = build(spec)
        except Unsupported as error:  # such as no nvcc here: another machine's answer may differ
            return outcome("failed", str(error))
        except BuildFailed as error:
            reason = f"compiling {spec.module} for {spec.arch} failed: {error}"
            cache.store_failure(spec, reason)
            return outcome("failed", reason)
        cache.store(binary)
        return outcome("compiled", binary)


def _compile(spec: KernelSpec) -> Binary:
    setting = os.environ.get("DMUON_COMPILE", "on")
    if setting not in ("on", "off"):
        raise ValueError(f"DMUON_COMPILE must be on or off, got {setting!r}")
    if setting == "off":
        raise Unsupported(
            f"{spec.module} is not compiled for {spec.arch} and DMUON_COMPILE is off; before the job, run "
            f"dmuon-tune compile MODEL --arch {spec.arch}"
        )
    return _pool(os.getpid()).build(spec)


@lru_cache
def _cache(folder: Path) -> BinaryCache:
    """One for each folder, since it warns but once."""
    return BinaryCache(folder)


@lru_cache
def _pool(process: int) -> Pool:
    """This process's; a forked one must not talk to its parent's compilers."""
    return Pool()
