"""The process that compiles: reads specs from its input and writes binaries to its output, until that ends.

Each message is a length in four bytes and that many more: a spec's text one way; a binary or, behind one of the
letters below, a reason the other way.
"""

from __future__ import annotations

import os
import queue
import struct
import sys
import threading
import traceback
from typing import BinaryIO

from dmuon.kernels.gpu.binary import KernelSpec, Unsupported
from dmuon.kernels.gpu.build import build_here
from dmuon.kernels.gpu.cache import encode

LENGTH = struct.Struct("<I")
BUILT, FAILED, UNSUPPORTED = b"B", b"F", b"U"
IDLE_S = 60.0
"""How long a worker with nothing to do stays, since starting another costs the import of a DSL."""


def main() -> None:
    """Serve until the input ends or nothing is asked for :data:`IDLE_S`."""
    answers = os.fdopen(os.dup(1), "wb")
    # What a compiler prints must not be taken for an answer.
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    requests: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_listen, args=(os.fdopen(os.dup(0), "rb"), requests), daemon=True).start()
    while True:
        try:
            request = requests.get(timeout=IDLE_S)
        except queue.Empty:
            break
        kind, content = _answer(request)
        answers.write(LENGTH.pack(len(content) + 1) + kind + content)
        answers.flush()
    # A DSL that crashes while the interpreter shuts down does no harm.
    os._exit(0)


def _listen(source: BinaryIO, requests: queue.Queue[bytes]) -> None:
    """Pass requests on. When the input ends, so does the process, even in the midst of compiling."""
    while len(prefix := source.read(LENGTH.size)) == LENGTH.size:
        requests.put(source.read(LENGTH.unpack(prefix)[0]))
    os._exit(0)


def _answer(request: bytes) -> tuple[bytes, bytes]:
    try:
        return BUILT, encode(build_here(KernelSpec.from_text(request.decode())))
    except Unsupported as error:
        return UNSUPPORTED, str(error).encode()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        traceback.print_exc()
        return FAILED, f"{type(error).__name__}: {error}".encode()
