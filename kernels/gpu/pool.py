"""Compiling in other processes: several at a time, and whatever a compiler does, contained."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dmuon.kernels.gpu.binary import Binary, KernelSpec, Unsupported
from dmuon.kernels.gpu.cache import Damaged, decode
from dmuon.kernels.gpu.worker import BUILT, LENGTH, UNSUPPORTED

TIMEOUT_S = 300.0
"""For one kernel, the DSL's import included. The slowest takes a few seconds on an idle core."""

_LARGEST = 1 << 28
"""Bytes of an answer; PTX and cubin have some hundred thousand."""

_GIVE_UP = 3
"""After so many kernels of a DSL in a row whose compiler crashed or hung, its others are not tried."""

_START = "from dmuon.kernels.gpu.worker import main; main()"


class BuildFailed(Exception):
    """A kernel could not be compiled; the message says why."""


class BuildCancelled(Exception):
    """The pool was closed while a kernel was compiling or waiting to."""


class _TooLong(BuildFailed):
    """The compiler gave no answer in time."""


class _Ended(BuildFailed):
    """The process ended by itself; with ``used``, perhaps for what it did before, or as it had waited enough."""

    def __init__(self, message: str, used: bool) -> None:
        super().__init__(message)
        self.used = used


class Pool:
    """Up to ``jobs`` compiler processes, started as they are needed; a context manager that ends them.

    A process serves one DSL, and no kernel shares a process with another at the same time. Safe for threads.

    Args:
        jobs: as many as this process may use cores, if ``None``.
        timeout_s: for one kernel.
    """

    def __init__(self, jobs: int | None = None, timeout_s: float = TIMEOUT_S) -> None:
        if jobs is not None and jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {jobs}")
        self.jobs = jobs or _cores()
        self._timeout_s = timeout_s
        self._slots = threading.Semaphore(self.jobs)
        self._guard = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._lost: dict[str, int] = {}
        self._closed = False
        self._scratch = tempfile.TemporaryDirectory(prefix="dmuon-compile-", ignore_cleanup_errors=True)

    def build(self, spec: KernelSpec) -> Binary:
        """Compile ``spec``, waiting for a free process.

        Raises:
            Unsupported: the kernel's ``build`` or the toolchain said that it cannot serve; or the compilers of its
                DSL keep crashing or hanging, so that it was not tried.
            BuildFailed: the compiler raised, crashed, took too long, or answered nonsense.
            BuildCancelled: the pool was closed.
        """
        with self._slots:
            while True:
                lost = self._lost.get(spec.dsl, 0)
                if lost >= _GIVE_UP:
                    raise Unsupported(f"not tried: {lost} {spec.dsl} compilers in a row crashed or hung")
                worker = self._take(spec.dsl)
                try:
                    binary = worker.build(spec, self._timeout_s)
                    self._lost[spec.dsl] = 0
                    return binary
                except (_Ended, _TooLong) as error:
                    if not self._closed and not getattr(error, "used", False):
                        self._lost[spec.dsl] = lost + 1
                        raise
                except BuildFailed:
                    if not self._closed:
                        raise
                finally:
                    self._give_back(worker)

    def close(self) -> None:
        """End all processes and cancel what they compile."""
        with self._guard:
            self._closed = True
            for worker in self._busy:
                worker.kill()
            while self._idle:
                self._idle.pop().end()
        self._scratch.cleanup()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, dsl: str) -> _Worker:
        with self._guard:
            if self._closed:
                raise BuildCancelled
            worker = next((each for each in self._idle if each.dsl == dsl and each.alive), None)
            if worker is not None:
                self._idle.remove(worker)
            else:
                if len(self._idle) + len(self._busy) >= self.jobs:
                    self._idle.pop(0).end()
                worker = _Worker(dsl, Path(self._scratch.name))
            self._busy.add(worker)
            return worker

    def _give_back(self, worker: _Worker) -> None:
        with self._guard:
            self._busy.discard(worker)
            if worker.usable and not self._closed:
                self._idle.append(worker)
            else:
                worker.end()


class _Worker:
    """One compiler process, and what it says on stderr."""

    def __init__(self, dsl: str, scratch: Path) -> None:
        self.dsl, self.usable, self._served = dsl, True, False
        self._errors: IO[Any] = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 (end() closes it)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(scratch),
            cwd=scratch,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def build(self, spec: KernelSpec, timeout_s: float) -> Binary:
        self._errors.seek(0)
        self._errors.truncate()
        self.usable = False
        try:
            kind, content = self._ask(spec.text.encode(), time.monotonic() + timeout_s)
            binary = decode(content, spec) if kind == BUILT else None
        except TimeoutError:
            raise _TooLong(f"still compiling after {timeout_s:g} s") from None
        except (EOFError, OSError):
            raise self._how_it_ended() from None
        except Damaged as error:
            raise BuildFailed(f"the compiler process answered nonsense: {error}") from None
        self.usable = self._served = True
        if binary is not None:
            return binary
        reason = content.decode(errors="replace")
        raise Unsupported(reason) if kind == UNSUPPORTED else BuildFailed(reason)

    def kill(self) -> None:
        """Kill the process and whatever it started, for whoever waits for its answer to find out."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it and clean up."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _ask(self, request: bytes, deadline: float) -> tuple[bytes, bytes]:
        assert self._process.stdin is not None
        self._process.stdin.write(LENGTH.pack(len(request)) + request)
        self._process.stdin.flush()
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        if length > _LARGEST:
            raise Damaged(f"a message of {length} bytes")
        answer = self._read(length, deadline)
        return answer[:1], answer[1:]

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        data = bytearray()
        while len(data) < size:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            part = os.read(descriptor, min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _how_it_ended(self) -> _Ended:
        self.kill()  # it may have closed its output and live on
        code = self._process.wait()
        how = f"exit code {code}"
        if code < 0:
            with suppress(ValueError):
                how = signal.Signals(-code).name
        self._errors.seek(0)
        said = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        last = next((line for line in reversed(said) if line), "it said nothing")
        return _Ended(f"the compiler ended its process with {how}: {last}", self._served)


def _cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _environment(scratch: Path) -> dict[str, str]:
    """A worker's: no GPU, so that it compiles as on a machine without one and touches no training's device; and
    the DSLs' own caches and temporary files where they are removed with the pool."""
    paths = [str(Path(folder).absolute()) for folder in sys.path if folder]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(scratch),
        "TILELANG_CACHE_DIR": str(scratch / "tilelang"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TRITON_INTERPRET": "0",
    }
