"""``torchhook record``: runs a script unchanged, and writes what flows through its model to disk."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchhook.cli.errors import in_words
from torchhook.cli.loaders import wrong
from torchhook.training.launch.script import Script, leave, say, show

if TYPE_CHECKING:
    from torchhook.compare.recordings.in_script import ScriptRecorder

PARSING = {"allow_interspersed_args": False}  # arguments after the script belong to it


class Kept(str, Enum):
    """What to keep of each tensor."""

    ALL = "all"
    SKETCH = "sketch"


def record(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file, or a folder or zip file with a __main__.py.")
    ],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="The new folder to write to, such as a.th.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The arguments of the script.")] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.")] = False,
    sites: Annotated[
        list[str] | None,
        typer.Option(metavar="QUERY", help="Modules to record: a path, or a glob such as 'layers.*'. Repeatable."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="CLASS", help="The class of the model, if it is not the first one called.")
    ] = None,
    grads: Annotated[
        bool, typer.Option("--grads", help="Also record gradients and the updates of parameters.")
    ] = False,
    keep: Annotated[
        Kept, typer.Option(metavar="WHAT", help="'all' keeps every tensor, 'sketch' a few kilobytes of each.")
    ] = Kept.ALL,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many calls of the model, or with --grads steps, to record.")
    ] = 1,
) -> None:
    """Run a script unchanged, and record what flows through its model, for torchhook diff.

    The model is the first module with parameters that the script calls.
    Options come before SCRIPT; all that follows are arguments of the script.

    [bold]torchhook record --to a.th generate.py --prompt hello
    torchhook diff a.th b.th[/]
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise wrong("--to", f"{str(to)!r} exists already; choose another name, or delete it first")
    options = {"to": to.absolute(), "sites": sites, "kind": model, "grads": grads, "keep": keep.value, "steps": steps}
    context.obj.append(RecordingLaunch(Script(script, tuple(args or ()), is_module), options, str(to)))


@dataclass
class RecordingLaunch:
    """A script to run, and how to record it."""

    script: Script
    options: dict[str, Any]
    shown: str
    recording: ScriptRecorder | None = None
    process: int = field(default_factory=os.getpid)

    def __call__(self) -> None:
        """Run the script, say what was recorded, and end as the script did."""
        with ExitStack() as entered:
            ended = self.script.run(on_torch=lambda: self._begin(entered))
        try:
            if ended is not None:
                show(ended)
            if os.getpid() == self.process:  # the script may have forked
                say(f"torchhook: {self._outcome()}\n")
            leave(ended)
        finally:
            del ended  # break the cycle: it holds the frames of the script, and this frame holds it

    def _begin(self, entered: ExitStack) -> None:
        """Wait for the model, now that torch is imported; a fault of ours does not stop the script."""
        from torchhook.compare.recordings.in_script import ScriptRecorder

        self.recording = entered.enter_context(ScriptRecorder(**self.options))

    def _outcome(self) -> str:
        if self.recording is None or self.recording.recorder is None:
            return "nothing was recorded: no module with parameters was called"
        try:
            if self.recording.failure is not None:
                raise self.recording.failure
            found = self.recording.recorder.recording
            model, count = found.model, len(found.steps)
        except Exception as error:
            return f"nothing was recorded: {in_words(error)}"
        return f"recorded {count} step{'' if count == 1 else 's'} of {model} → torchhook diff {self.shown} …"
