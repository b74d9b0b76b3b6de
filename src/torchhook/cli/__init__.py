"""The command line: one file a command.

It ends with 0 if all is well, 1 if there are findings, and 2 if it was used wrongly or something failed. ``run`` ends
as the script that it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


def main() -> None:
    """Run the command line, and end the process."""
    try:
        from torchhook.cli.app import command
        from torchhook.cli.errors import told
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "tomli", "typer"):
            raise
        print(f'torchhook: the command line needs {error.name}: pip install "torchhook[cli]"', file=sys.stderr)
        raise SystemExit(2) from None
    with told():
        # A command may leave something to do after the parser, which has its own mind about signals and exit codes.
        left: list[Callable[[], None]] = []
        try:
            command(prog_name="torchhook", obj=left, windows_expand_args=False)
        except SystemExit:
            if not left:
                raise
        for action in left:
            action()
