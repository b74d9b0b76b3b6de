"""The dashboard inside a notebook, served by a separate process."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from torchhook.core.errors import RunError
from torchhook.training.monitor import Monitor
from torchhook.training.runs import Run


def show(
    what: nn.Module | Monitor | Run | str | os.PathLike[str],
    optimizer: Any = None,
    *,
    height: int = 800,
    **options: Any,
) -> Any:
    """Show a live dashboard below this cell.

    Given a model, start a `Monitor` on it, with `options` as for `Monitor`, and return the monitor. Given a monitor, a
    run or a folder of runs, show that and return it.

        monitor = torchhook.dashboard.show(model, optimizer, every=10)
        for x, y in loader:
            ...
            monitor.step(loss)
    """
    watched = Monitor(what, optimizer, **options) if isinstance(what, nn.Module) else what
    address = _served(_folder_of(watched))
    _display(address, height)
    return watched


def _folder_of(what: Any) -> Path:
    folder = what.run if isinstance(what, Monitor) else what.folder if isinstance(what, Run) else Path(what)
    if folder is None:
        raise RunError("this monitor does not write a run: create it with a folder, such as to='runs'")
    return Path(folder)


def _served(folder: Path) -> str:
    """Start a server process that ends with this one, and return its address."""
    command = [sys.executable, "-m", "torchhook", "dashboard", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    atexit.register(process.terminate)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not address.startswith("http"):
        process.kill()
        raise RunError(f"the dashboard of {str(folder)!r} did not start: run `torchhook dashboard {folder}` to see why")
    return address


def _display(address: str, height: int) -> None:
    try:
        notebook: Any = import_module("IPython.display")
    except ImportError as error:
        raise ImportError("show works only in notebooks: run `torchhook dashboard` in a terminal instead") from error
    notebook.display(notebook.IFrame(address, width="100%", height=height))
