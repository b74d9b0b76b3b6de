"""``torchhook run``: runs a script unchanged, watches its trainings, and prints a report on standard error."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from torchhook import render
from torchhook.cli.errors import in_words
from torchhook.cli.loaders import split
from torchhook.cli.options import OUTPUT, RULES, Ignore, Reports, Select, Verbose
from torchhook.cli.outputs import require_writable
from torchhook.core.config import Config
from torchhook.core.errors import TorchhookError
from torchhook.core.findings import Report
from torchhook.core.text import message_of
from torchhook.training.launch.script import Script, leave, say, show

if TYPE_CHECKING:
    from torchhook.training.launch.discovery import Discovery
    from torchhook.training.monitor import Monitor

PARSING = {"allow_interspersed_args": False}  # arguments after the script belong to it
_FEW = 3  # models, each of which gets a whole report
_UNUSABLE = (ImportError, OSError, TorchhookError, ValueError)  # errors that the user can fix


def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file, or a folder or zip file with a __main__.py.")
    ],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The arguments of the script.")] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.")] = False,
    every: Annotated[
        int, typer.Option(metavar="N", min=1, rich_help_panel=RULES, help="Measure one step in N, at the most.")
    ] = 10,
    price: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            rich_help_panel=RULES,
            help="The share of the time that watching may cost, such as 2%; 'off' measures one step in N.",
        ),
    ] = "2%",
    select: Select = None,
    ignore: Ignore = None,
    stop: Annotated[
        bool,
        typer.Option("--stop-on-error", rich_help_panel=RULES, help="Stop the training when an error is found."),
    ] = False,
    to: Annotated[
        Path, typer.Option(metavar="FOLDER", file_okay=False, rich_help_panel=OUTPUT, help="Where to write runs.")
    ] = Path("runs"),
    name: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=OUTPUT, help="Name of the run; default: the script's.")
    ] = None,
    reports: Reports = None,
    verbose: Verbose = False,
) -> None:
    """Run a training script unchanged, and report what went wrong in its models.

    Options come before SCRIPT; all that follows are arguments of the script.
    It runs as with python SCRIPT, with its own output, exit code and signals.
    When it has ended, the report is printed on standard error.
    Rules can be chosen in pyproject.toml, as for torchhook diagnose.

    [bold]torchhook run train.py --epochs 3
    torchhook run --every 50 --report report.html -m package.train --epochs 3[/]
    """
    reports = [path.absolute() for path in reports or ()]  # the script may change the working directory
    require_writable(reports)
    config = Config.find(Path.cwd()).overruled(split(select), split(ignore))
    target = Script(script, tuple(args or ()), is_module)
    watching = {
        "every": every,
        "price": _share(price),
        "rules": config.select,
        "ignore": config.ignore,
        "per_module": config.per_module,
        "to": to.absolute(),
        "name": name or target.name,
        "on_finding": "stop" if stop else None,
    }
    context.obj.append(Launch(target, watching, reports, verbose))


@dataclass
class Launch:
    """A script to run, how to watch it, and where to write reports."""

    script: Script
    watching: dict[str, Any]
    reports: list[Path]
    verbose: bool = False
    discovery: Discovery | None = None
    fault: str | None = None
    here: Path = field(default_factory=Path.cwd)
    process: int = field(default_factory=os.getpid)

    def __call__(self) -> None:
        """Run the script, print what was found, and end as the script did."""
        try:
            ended = self.script.run(on_torch=self._watch)
        except BaseException:  # the script cannot be run
            if self.discovery is not None:
                self.discovery.__exit__(None, None, None)
            raise
        if os.environ.get("WORLD_SIZE", "1") != "1":  # the launcher ends all ranks once one has failed: report first
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            try:
                if ended is not None:
                    show(ended)
            finally:
                if os.getpid() == self.process and not isinstance(ended, _Refusal):  # the script may have forked
                    self._finish(ended)
            leave(ended)
        finally:
            del ended  # break the cycle: it holds the frames of the script, and this frame holds it

    def _watch(self) -> None:
        """Begin to watch, now that torch is imported. Unusable options end the script before it trains."""
        if os.getpid() != self.process:
            return
        try:
            from torchhook.rules import chosen
            from torchhook.training.launch.discovery import Discovery

            chosen(self.watching["rules"], [*self.watching["ignore"], *chain(*self.watching["per_module"].values())])
            self.discovery = Discovery(**self.watching).__enter__()
        except _UNUSABLE as error:
            say(f"torchhook: {_in_words(error)}\n")
            raise _Refusal(2) from None
        except Exception as error:  # a fault of ours must not stop the script
            self.fault = _in_words(error)

    def _finish(self, ended: BaseException | None) -> None:
        """Stop watching, and print the reports. The script has ended, and is not affected by errors here."""
        try:
            if self.discovery is not None:
                kind, trace = (None, None) if ended is None else (type(ended), ended.__traceback__)
                self.discovery.__exit__(kind, ended, trace)
            self._print_reports(ended)
        except KeyboardInterrupt:  # the user does not want to wait
            pass
        except Exception as error:
            say(f"torchhook: the report failed: {_in_words(error)}\n")

    def _print_reports(self, ended: BaseException | None) -> None:
        """Print the report of every model, after all output of the script."""
        if self.discovery is not None and not self.discovery.is_main:
            return
        with suppress(Exception):
            sys.stdout.flush()
        watched = self.discovery.watched if self.discovery is not None else []
        for part in chain(*map(self._about, watched, count(1))):
            say(part)
        idle = self.discovery.never_stepped() if self.discovery is not None and ended is None else None
        if idle is not None:
            for part in self._told(idle, 1):
                say(part)
        elif not watched:
            say(f"torchhook: {self._why_nothing(_failure(ended))}\n")

    def _why_nothing(self, failure: str) -> str:
        if self.fault is not None:
            return f"nothing was watched: {self.fault}"
        if failure:
            begun = "it imported torch" if self.discovery is None else "an optimizer took a step"
            return f"the script {failure} before {begun}, so nothing was trained."
        if self.discovery is None:
            reason = "the script did not import torch"
        else:
            reason = "no optimizer took a step, and nothing changed between two backwards"
        return f"nothing was trained here: {reason}. Trainings in child processes are not seen."

    def _about(self, monitor: Monitor, number: int) -> Iterator[str]:
        """The report of one model, where the files are, and the line with which every watched training ends."""
        yield from self._told(monitor.report, number)
        yield f"{monitor.ending}\n"

    def _told(self, report: Report, number: int) -> Iterator[str]:
        """A report, and the files it is written to. Among many models, one without findings has only its line."""
        if report.findings or self.verbose or self.discovery is None or len(self.discovery.watched) <= _FEW:
            yield f"\n{_printed(report, self.verbose)}"
        for path in self.reports:
            file = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
            render.save(report, file)
            yield f"written: {self._shown(file)}\n"

    def _shown(self, path: Path) -> str:
        """A path relative to where the command was started, if it is below that."""
        return str(path.relative_to(self.here) if path.is_relative_to(self.here) else path)


def _share(price: str) -> float | None:
    """The share that ``--price`` names.

    >>> _share("2%"), _share("0.5 %"), _share("0.02"), _share("off")
    (0.02, 0.005, 0.02, None)
    """
    if price == "off":
        return None
    number, percent, rest = price.partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = math.nan
    if not 0 < share < 1 or rest:
        raise typer.BadParameter(f"{price!r} is not a share such as 2% or 0.02, nor 'off'", param_hint="--price")
    return share


class _Refusal(SystemExit):
    """Ends a script that cannot be watched with the given options."""


def _printed(report: Report, verbose: bool = False) -> str:
    """A report for standard error. Rich does not print it, because it ends the process if the pipe is closed."""
    console = Console(file=sys.__stderr__)
    with console.capture() as printed:
        render.terminal(report, console, verbose=verbose)
    return printed.get()


def _failure(ended: BaseException | None) -> str:
    """How a script failed, in one line; empty if it did not."""
    if ended is None or (isinstance(ended, SystemExit) and ended.code in (None, 0)):
        return ""
    if isinstance(ended, KeyboardInterrupt):
        return "was interrupted"
    if isinstance(ended, SystemExit) and isinstance(ended.code, int):
        return f"failed with exit code {ended.code}"
    kind = "" if isinstance(ended, SystemExit) else type(ended).__name__
    said = message_of(ended).partition("\n")[0]
    return f"failed ({': '.join(filter(None, [kind, said])):.200})"


def _in_words(error: Exception) -> str:
    return "".join(format_exception(error)) if os.environ.get("TORCHHOOK_TRACEBACK") else in_words(error)
