"""`show`: a run, live, or one page of something else; below a notebook's cell, or in a browser."""

from __future__ import annotations

import atexit
import html
import os
import subprocess
import sys
import tempfile
import webbrowser
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from torchhook.core.errors import RunError
from torchhook.dashboard.page import page_of
from torchhook.training.monitor import Monitor
from torchhook.training.runs import Run


def show(what: Any, optimizer: Any = None, *, height: int = 800, **options: Any) -> Any:
    """Show what you have: below the cell of a notebook, otherwise in a browser; its address is printed.

    Given a model, start a `Monitor` on it, with `options` as for `Monitor`, and return the monitor, whose run is shown
    live. Given a monitor, a run, a saved result (``.th``) or a folder of these, show that, live while this process
    runs, and return it.

        monitor = torchhook.dashboard.show(model, optimizer, every=10)
        for x, y in loader:
            ...
            monitor.step(loss)

    Given anything else, write one page that needs nothing else, show it, and return its path. It takes a capture or a
    layer of it, a dict of names and arrays, the result of `measure` or a snapshot, a report, a `HookManager`, a
    `ModelDiagnostics`, and the results of `diff`, `sweep`, `torchhook.compare` and `explain`.

        with torchhook.capture(model) as acts:
            model(x)
        torchhook.dashboard.show(acts)
    """
    watched = Monitor(what, optimizer, **options) if isinstance(what, nn.Module) else what
    if not isinstance(watched, (Monitor, Run, str, os.PathLike)):
        if optimizer is not None or options:
            given = ", ".join(["optimizer"] * (optimizer is not None) + list(options))
            raise TypeError(f"{given}: only a model takes this, not {type(what).__name__}")
        return _shown_page(page_of(what), height)
    address = _served(_folder_of(watched))
    notebook = _notebook()
    if notebook is None:
        _open(address)
    else:
        notebook.display(notebook.IFrame(address, width="100%", height=height))
    return watched


def _shown_page(page: str, height: int) -> Path:
    handle, name = tempfile.mkstemp(".html", "torchhook-")
    with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
        file.write(page)
    notebook = _notebook()
    if notebook is None:
        _open(Path(name).as_uri())
    else:  # a notebook's server does not serve files from elsewhere
        style = f'style="width: 100%; height: {height}px; border: 0"'
        frame = f'<iframe title="torchhook" {style} srcdoc="{html.escape(page)}"></iframe>'
        notebook.display({"text/html": frame, "text/plain": name}, raw=True)
    return Path(name)


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


def _notebook() -> Any:
    """IPython's display, if this is a notebook; None in a script or a terminal."""
    if "IPython" not in sys.modules:
        return None
    shell = import_module("IPython").get_ipython()
    return (
        None if type(shell).__name__ in ("NoneType", "TerminalInteractiveShell") else import_module("IPython.display")
    )


def _open(address: str) -> None:
    """Print the address, and open it where there is a screen; elsewhere a browser for terminals might take over."""
    print(address)
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(address)
