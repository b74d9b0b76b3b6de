"""Optional libraries: imported when they are first needed, with the extra to install if they are missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def require(module: str, extra: str, purpose: str = "this") -> Any:
    """Import `module`, or raise an ImportError that names what needs it and the extra that installs it.

    >>> require("no_such_library.part", "plot", "plot.cam")
    Traceback (most recent call last):
    ImportError: plot.cam needs no_such_library: pip install "torchhook[plot]"
    """
    try:
        return import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise ImportError(f'{purpose} needs {library}: pip install "torchhook[{extra}]"') from error
