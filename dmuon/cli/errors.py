"""From exceptions to exit codes: 0 fine, 1 something failed while working, 2 bad input, 130 interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

INTERRUPTED = 130


class BadInput(click.ClickException):
    """What was asked cannot be done: one line on stderr, exit code 2."""

    exit_code = 2


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn ValueError and OSError, as our functions raise them for bad arguments and files, into BadInput.

    Wrap what handles the user's input and nothing else, so that a bug still shows its traceback.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of our output has gone: click ends the program quietly
    except (ValueError, OSError) as error:
        raise BadInput(_one_line(error)) from error


@contextmanager
def usage_on_one_line() -> Iterator[None]:
    """Turn click's errors of usage, which it prints on four lines, into BadInput."""
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # since click 8.2
            raise
        page = f"; see {error.ctx.command_path} --help" if error.ctx else ""
        raise BadInput(" ".join(error.format_message().split()).rstrip(".") + page) from error


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Take SIGTERM, by which a scheduler ends a job, for Ctrl-C: what is finished is told, nothing is left behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_cache_folder() -> None:
    """Refuse a DMUON_CACHE that is a file, but for a store's: nothing could be kept there."""
    path = Path(os.environ.get("DMUON_CACHE", "")).expanduser()
    if path.is_file() and path.suffix not in (".db", ".sqlite", ".sqlite3"):
        raise BadInput(
            f"DMUON_CACHE names {path}, which is a file; it takes a folder, or a store's file such as x.db"
        )


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
