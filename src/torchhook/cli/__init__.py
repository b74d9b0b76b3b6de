"""The command line: one file a command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; ends the process with 0 if all is well, 1 if there are findings, 2 if it failed."""
    try:
        import typer  # noqa: F401
    except ImportError:
        print("torchhook's command line needs typer and rich: pip install 'torchhook[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    from torchhook.cli.app import app

    app()
