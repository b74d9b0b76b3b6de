"""The command line: one file a command.

It ends with 0 if all is well, 1 if there are findings, and 2 if it was used wrongly or something failed.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, and end the process."""
    try:
        from torchhook.cli.app import app
        from torchhook.cli.errors import told
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "tomli", "typer"):
            raise
        print(f"torchhook's command line needs {error.name}: pip install 'torchhook[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    with told():
        app(prog_name="torchhook")
