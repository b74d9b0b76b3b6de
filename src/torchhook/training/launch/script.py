"""Runs a script in this process as Python itself would, from its arguments to its exit.

For a file, we do what Python does; for a module, a folder or a zip file, we call the function that Python calls.
Nothing is imported before the script asks for it, so that what it sets before ``import torch`` takes effect.
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import Any, NoReturn

_OURS = (
    "torchhook.training.launch.",
    "torchhook.core.call_wrapper",
)  # modules whose frames are removed from tracebacks
_runpy: Any = runpy  # what Python's own main program calls is private there


class UnrunnableError(ValueError):
    """There is no such script, or it cannot be run."""


@dataclass(frozen=True)
class Script:
    """A file, a folder or zip file with a ``__main__.py``, or a module, and the arguments for it.

    >>> Script("examples/train.py", ("--epochs", "3")).name
    'train'
    >>> Script("package.train", is_module=True).name
    'package.train'
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        """Its name, for people."""
        return self.target if self.is_module else Path(self.target).absolute().stem

    def run(self, on_torch: Callable[[], None]) -> BaseException | None:
        """Run it, and return the exception that ended it, if any. `on_torch` is called once it has imported torch.

        `__main__` stays the script's, because pickles and exit handlers still need it.
        """
        main = _fresh_main()
        sys.modules["__main__"] = main
        arrival = _Arrival("torch", on_torch)
        try:
            self._execute(main)
        except UnrunnableError:
            raise
        except BaseException as error:
            return error.with_traceback(_without_ours(error.__traceback__))
        finally:
            arrival.forget()
        return None

    def _execute(self, main: ModuleType) -> None:
        here = os.getcwd()  # noqa: PTH109 (a Path drops the './' that Python keeps)
        file = os.path.join(here, self.target)  # noqa: PTH118
        sys.argv = ["-m" if self.is_module else self.target, *self.args]
        if self.is_module:
            _go_first(here)
            _run_by_name(self.target)
        elif get_importer(file) is not None:
            _go_first(file, even_if_safe=True)
            _run_by_name("__main__", alter_argv=False)
        else:
            _go_first(str(Path(file).resolve().parent))
            loader = SourceFileLoader("__main__", file)
            main.__dict__.update(__loader__=loader, __file__=file, __cached__=None)
            exec(compile(_read(loader, self.target), file, "exec", dont_inherit=True), main.__dict__)


def show(error: BaseException) -> None:
    """Print an uncaught exception as Python does: through `sys.excepthook`, or the text of `sys.exit("text")`."""
    if isinstance(error, SystemExit):
        if not (error.code is None or isinstance(error.code, int)):
            _complain(str(error.code))
        return
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as another:
        _complain("Error in sys.excepthook:")
        another.__traceback__ = _without_ours(another.__traceback__)
        sys.__excepthook__(type(another), another, another.__traceback__)
        _complain("\nOriginal exception was:")
        sys.__excepthook__(type(error), error, error.__traceback__)


def leave(error: BaseException | None) -> NoReturn:
    """End this process as Python would after `error`: with the code of `sys.exit`, with 1, or by a signal."""
    try:
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = _say_nothing  # it was shown already; Python does the rest, and dies by SIGINT
            raise error
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            raise error
        raise SystemExit(0 if error is None else 1)
    finally:
        del error  # break the cycle: it holds the frames of the script, and this frame holds it


def say(text: str) -> None:
    """Write to the standard error that this process started with, if it is still open.

    This bypasses its buffer: text that cannot be flushed at exit would change the exit code.
    """
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):  # it was closed, on either end
            sys.__stderr__.flush()
            os.write(sys.__stderr__.fileno(), text.encode(sys.__stderr__.encoding, "backslashreplace"))


class _Arrival(MetaPathFinder):
    """Calls a function once a module has been imported, or at once if it is already. It finds no modules itself."""

    def __init__(self, name: str, arrived: Callable[[], None]) -> None:
        self._name = name
        self._arrived = arrived
        if name in sys.modules:
            arrived()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            self._listen(spec.loader)
        return spec

    def _listen(self, loader: Any) -> None:
        """Wait until this loader has executed the module; many callers only ask whether it exists."""
        if "exec_module" in vars(loader):
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self.forget():
                self._arrived()

        loader.exec_module = exec_module

    def forget(self) -> bool:
        """Stop listening; whether it was listening until now."""
        listened = self in sys.meta_path
        if listened:
            sys.meta_path.remove(self)
        return listened


def _fresh_main() -> ModuleType:
    """A `__main__` module as Python creates it before it reads the script."""
    main = ModuleType("__main__")
    if "__annotations__" in vars(sys.modules["__main__"]):  # not since Python 3.14
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    return main


def _go_first(place: str, even_if_safe: bool = False) -> None:
    """Find modules at `place` instead of next to the program that was started, which is torchhook."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = place
    elif even_if_safe:
        sys.path.insert(0, place)


def _run_by_name(name: str, alter_argv: bool = True) -> None:
    try:
        _runpy._run_module_as_main(name, alter_argv)
    except SystemExit as end:
        if isinstance(end.__context__, _runpy._Error):
            raise UnrunnableError(str(end.__context__)) from None
        raise


def _read(loader: SourceFileLoader, target: str) -> bytes:
    try:
        return loader.get_data(loader.path)
    except OSError as error:
        raise UnrunnableError(f"cannot open {target!r}: {error.strerror}") from None


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without our own frames, and without the import frames that Python itself would hide."""
    kept: list[TracebackType] = []
    while traceback is not None:
        if str(traceback.tb_frame.f_globals.get("__name__")).startswith(_OURS):
            while kept and kept[-1].tb_frame.f_code.co_filename.startswith("<frozen importlib"):
                kept.pop()
        else:
            kept.append(traceback)
        traceback = traceback.tb_next
    first = None
    for entry in reversed(kept):
        entry.tb_next, first = first, entry
    return first


def _complain(line: str) -> None:
    """Print to standard error as the script may have replaced it, as the interpreter does."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr)


def _say_nothing(*_: object) -> None:
    pass
