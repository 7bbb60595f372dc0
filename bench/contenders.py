"""What takes part in a comparison: a function here, or a peer in another Python environment.

Run as a script, this file is that other environment's side. It needs torch and the peer's package there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from peers import PEERS, NotAvailable, Orthogonalize, build_peer
from timing import milliseconds
from torch import Tensor


class Contender(Protocol):
    """One way to orthogonalise the input that it was made for."""

    def result(self) -> Tensor:
        """The orthogonalised input, in whatever dtype comes out."""
        ...

    def sample(self, repeats: int) -> float:
        """Mean milliseconds of ``repeats`` runs in a row."""
        ...


@dataclass(frozen=True)
class Local:
    """``run`` on ``G``, in this process."""

    run: Orthogonalize
    G: Tensor

    def result(self) -> Tensor:
        result = self.run(self.G)
        return torch.stack(result) if isinstance(result, list) else result

    def sample(self, repeats: int) -> float:
        return milliseconds(lambda: self.run(self.G), repeats, self.G.device.type)


@dataclass
class PeerProcess:
    """A peer under another environment's Python, answering one request at a time.

    Use as a context manager. ``versions`` are the peer's and its torch's, known once a contender was made.

    Raises:
        NotAvailable: that Python does not start or has no torch.
    """

    name: str
    python: str
    versions: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> PeerProcess:
        self._folder = tempfile.TemporaryDirectory()
        try:
            self._process = subprocess.Popen(
                [self.python, __file__, self.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            self._folder.cleanup()
            raise NotAvailable(f"{self.python} does not start: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def contender(self, precision: str, G: Tensor) -> Contender:
        """The peer on a copy of ``G``. Only the last one made is usable.

        Raises:
            NotAvailable: as :func:`build_peer` says, or the process died.
        """
        torch.save(G.cpu(), self.path("input"))
        answer = self.ask(
            do="prepare",
            precision=precision,
            device=G.device.type,
            threads=torch.get_num_threads(),
            input=self.path("input"),
        )
        self.versions = answer["versions"]
        return Remote(self)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, wait for the answer.

        Raises:
            NotAvailable: what the peer could not do, in words.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has died, which the missing answer tells
            print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise NotAvailable(f"{self.python} ended: its messages are above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NotAvailable(answer["error"])
        return answer

    def path(self, name: str) -> str:
        return str(Path(self._folder.name) / name)


@dataclass(frozen=True)
class Remote:
    """The input that a :class:`PeerProcess` holds, orthogonalised there."""

    process: PeerProcess

    def result(self) -> Tensor:
        path = self.process.path("result")
        self.process.ask(do="result", output=path)
        result: Tensor = torch.load(path)
        return result

    def sample(self, repeats: int) -> float:
        return float(self.process.ask(do="sample", repeats=repeats)["ms"])


def failure(error: Exception) -> str:
    """What a peer raised, in one line."""
    return f"fails here: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def serve(name: str, requests: IO[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer a :class:`PeerProcess`'s requests until its end of the pipe closes."""
    contender: Local | None = None
    for line in requests:
        request = json.loads(line)
        try:
            if request["do"] == "prepare":
                torch.set_num_threads(request["threads"])
                run = build_peer(name, request["precision"], request["device"])
                contender = Local(run, torch.load(request["input"]).to(request["device"]))
                answer({"versions": {name: PEERS[name].version, "torch": torch.__version__}})
                continue
            assert contender is not None
            if request["do"] == "result":
                torch.save(contender.result().cpu(), request["output"])
                answer({})
            else:
                answer({"ms": contender.sample(request["repeats"])})
        except NotAvailable as error:
            answer({"error": str(error)})
        except Exception as error:
            answer({"error": failure(error)})


def main() -> None:
    # What a peer prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, lambda answer: print(json.dumps(answer), file=answers, flush=True))


if __name__ == "__main__":
    main()
