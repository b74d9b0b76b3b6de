"""The command line, one file per command.

Exit codes: 0 if all is well, 1 if something was found, 2 for wrong usage or a failure. ``run`` ends like the script
that it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


def main() -> None:
    """Run the command line, and end the process."""
    try:
        from torchhook.cli.app import command
        from torchhook.cli.errors import errors_reported
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "tomli", "typer"):
            raise
        print(f'torchhook: the command line needs {error.name}: pip install "torchhook[cli]"', file=sys.stderr)
        raise SystemExit(2) from None
    with errors_reported():
        # A command may leave actions for after the parser, which handles signals and exit codes in its own way.
        left: list[Callable[[], None]] = []
        try:
            command(prog_name="torchhook", obj=left, windows_expand_args=False)
        except SystemExit:
            if not left:
                raise
        for action in left:
            action()
