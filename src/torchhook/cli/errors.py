"""Failures end the command line with exit code 2 and one sentence."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchhook.core.errors import TorchhookError
from torchhook.core.text import message_of, printable

_OTHERS = {*sys.stdlib_module_names, "__main__", "rich", "torch", "torchhook", "typer"}
_ON_PURPOSE = (ImportError, TorchhookError, ValueError)


@contextmanager
def errors_reported() -> Iterator[None]:
    """Print an exception as one line, or with TORCHHOOK_TRACEBACK=1 as a traceback, and exit with code 2."""
    try:
        yield
    except Exception as error:
        if os.environ.get("TORCHHOOK_TRACEBACK"):
            traceback.print_exc()
        else:
            print(f"torchhook: {printable(in_words(error))}", file=sys.stderr)
        raise SystemExit(2) from None


@contextmanager
def warnings_in_words() -> Iterator[None]:
    """Print each warning as one line on stderr: no line of the user's code caused it."""
    with warnings.catch_warnings(record=True) as said:
        try:
            yield
        finally:
            for one in said:
                print(f"torchhook: warning: {printable(str(one.message))}", file=sys.stderr)


def in_words(error: Exception) -> str:
    """What was raised, and on which line of the user's code; for our own errors, only the message.

    >>> print(in_words(ZeroDivisionError("division by zero")))
    ZeroDivisionError: division by zero
    (TORCHHOOK_TRACEBACK=1 shows the traceback)
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
    if modules and modules[-1].startswith("torchhook.") and isinstance(error, _ON_PURPOSE):
        return str(error)
    here = f"{Path.cwd()}{os.sep}"
    places = [
        f" ({frame.f_code.co_filename.removeprefix(here)}:{line})"
        for (frame, line), module in zip(frames, modules, strict=True)
        if module.split(".")[0] not in _OTHERS
    ]
    said = f"{type(error).__name__}: {message_of(error)}{''.join(places[-1:])}"
    return f"{said}\n(TORCHHOOK_TRACEBACK=1 shows the traceback)"
