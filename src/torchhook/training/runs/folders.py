"""Folders of runs: creating, finding, pruning and deleting them.

A run is a folder with a `run.sqlite`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from torchhook.core.errors import RunError
from torchhook.core.text import warn
from torchhook.training.runs.location import is_file, unwritten
from torchhook.training.runs.owners import is_running
from torchhook.training.runs.run import Run
from torchhook.training.runs.schema import DRAFT, FILE, SAMPLES, UNWRITTEN, remove
from torchhook.training.runs.summary import Summary, summarize

LATEST = "latest"
WHERE = "a training writes its run to 'runs' in the folder where it was started, or to what --to or to= names"
_UNFIT = re.compile(r"[^\w.-]+", re.ASCII)
_DRAFT = re.compile(rf"(?:{re.escape(DRAFT)}|\.{LATEST}\.)(\d+)(?:\.\d+)?")
_OURS = re.compile(r"\.?\d{8,}-\d+\.png")


def new_folder(root: str | os.PathLike[str], name: str) -> Path:
    """A new folder below `root` for a run that begins now; ``root/latest`` links to it.

    If it cannot be created, its path is returned all the same: writing into it raises the error.

    >>> import tempfile
    >>> root = tempfile.mkdtemp()
    >>> first, second = new_folder(root, "my net"), new_folder(root, "my net")
    >>> re.sub(r"\\d", "0", first.name), (Path(root) / "latest").resolve() == second.resolve()
    ('my-net-00000000-000000', True)
    """
    fit = _UNFIT.sub("-", name).strip("-.")[:60] or "run"
    named = Path(root) / f"{fit}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = named
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        for number in count(2):
            try:
                folder.mkdir()
                break
            except FileExistsError:
                folder = named.with_name(f"{named.name}-{number}")
        _lead_to(folder)
    except OSError:
        return folder
    return folder


def find(root: str | os.PathLike[str]) -> list[Path]:
    """The runs in a folder, newest first."""
    return _newest_first(_runs_below(_folder(root)))


def summaries(root: str | os.PathLike[str]) -> list[Summary]:
    """The summaries of the runs in a folder, newest first, and of those that could not be written at all."""
    return sorted(map(summarize, _begun_below(_folder(root))), key=lambda run: (run.started, run.name), reverse=True)


def leftovers(root: str | os.PathLike[str]) -> list[Path]:
    """The files of runs in a folder that never began: their process was killed while it created them, or the disk was
    full. Files of a process that may still be at it are not among them.
    """
    root = _folder(root)
    found = [*root.iterdir(), *(file for below in _folders_in(root) for file in _listed(below))]
    return sorted(file for file in found if _is_left(file))


def latest(path: str | os.PathLike[str], tell: Callable[[str], None] = warn) -> Path:
    """The run at `path`, or the newest in it if it is a folder of runs.

    Runs that cannot be read are skipped, each with a line for `tell`, unless there are no others.
    """
    path = Path(path)
    if path.name == FILE or is_file(path / FILE):
        return path
    named = path / (path / LATEST).resolve().name
    if is_file(named / FILE) and not summarize(named).error:  # else there are no links here, or the run is gone
        return named
    if unwritten(path) is not None:
        return path
    found = _newest_first(_begun_below(_folder(path)))
    if not found:
        raise RunError(f"there are no runs in {str(path)!r}; `torchhook run SCRIPT` or a `Monitor` writes one")
    for folder in found:
        broken = summarize(folder).error
        if not broken:
            return folder
        tell(f"skipped {str(folder)!r}: {broken}")
    return found[0]


def prunable(
    root: str | os.PathLike[str], keep: int | None = None, older_than: float | None = None, now: float | None = None
) -> list[Path]:
    """The runs to delete, newest first: all but the newest `keep`, those more than `older_than` days old, or both.

    Runs that are being written or cannot be read are not among them.
    """
    if keep is None and older_than is None:
        raise ValueError("say which runs to keep: keep=, older_than=, or both")
    if (keep is not None and keep < 0) or (older_than is not None and older_than < 0):
        raise ValueError(f"keep and older_than must not be negative, but are {keep} and {older_than}")
    before = (time.time() if now is None else now) - 86400 * (older_than or 0)
    ended = [(folder, started) for folder in find(root) if (started := _ended(folder)) is not None]
    return [folder for folder, started in ended[keep or 0 :] if older_than is None or started < before]


def delete(folder: Path) -> bool:
    """Delete a run; whether its folder is gone, too. Files that are not ours, and their folders, are left in place."""
    for picture in _pictures(folder):
        picture.unlink(missing_ok=True)
    _remove_empty(folder / SAMPLES)
    for left in filter(_is_left, _listed(folder)):
        remove(left)
    if unwritten(folder) is not None:
        (folder / UNWRITTEN).unlink()
    remove(folder / FILE)
    return _remove_empty(folder)


def clear(left: Path) -> None:
    """Delete one of the `leftovers`, and its folder if nothing else is in it."""
    remove(left)
    if not left.name.startswith(f".{LATEST}."):
        _remove_empty(left.parent)


def _folder(root: str | os.PathLike[str]) -> Path:
    root = Path(root)
    if not root.is_dir():
        raise RunError(f"there is no folder {str(root)!r}; {WHERE}")
    return root


def _folders_in(folder: Path) -> list[Path]:
    return [below for below in folder.iterdir() if not below.is_symlink() and below.is_dir()]


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # it is gone, or belongs to another user
        return []


def _is_left(file: Path) -> bool:
    """Whether a file is left of a start that did not end: the draft of a run or of a link, or a mark without a run."""
    if file.name == UNWRITTEN:
        return unwritten(file.parent) is not None and not is_file(file.with_name(FILE))
    process = _DRAFT.fullmatch(file.name)
    is_ours = file.is_symlink() or is_file(file)  # a folder of that name is not
    return process is not None and is_ours and not is_running(int(process[1]))


def _runs_below(folder: Path) -> list[Path]:
    """The runs in a folder, except those that are links to elsewhere."""
    return [below for below in _folders_in(folder) if is_file(below / FILE)]


def _begun_below(folder: Path) -> list[Path]:
    """The same, and those that could not be written at all."""
    return [below for below in _folders_in(folder) if is_file(below / FILE) or unwritten(below) is not None]


def _pictures(folder: Path) -> Iterator[Path]:
    samples = folder / SAMPLES
    if samples.is_dir() and not samples.is_symlink():
        yield from (file for file in samples.iterdir() if _OURS.fullmatch(file.name))


def _remove_empty(folder: Path) -> bool:
    """Delete a folder if it is empty, and the link to the latest run if it leads there; whether the folder is gone."""
    try:
        folder.rmdir()
    except OSError:  # it is not empty, or not a folder
        return False
    latest = folder.with_name(LATEST)
    with suppress(OSError):  # it is not a link, or another thread does the same
        if str(latest.readlink()) == folder.name:
            latest.unlink()
    return True


def _lead_to(folder: Path) -> None:
    """Make `latest` a link to a folder, unless something else has that name."""
    latest = folder.parent / LATEST
    if latest.exists() and not latest.is_symlink():
        return
    draft = folder.parent / f".{LATEST}.{os.getpid()}.{threading.get_ident()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(folder.name, target_is_directory=True)
    draft.replace(latest)


def _newest_first(runs: list[Path]) -> list[Path]:
    return sorted(runs, key=lambda folder: (_started(folder), folder.name), reverse=True)


def _started(folder: Path) -> float:
    try:
        with Run(folder) as run:
            return run.started
    except RunError:
        for file in (FILE, UNWRITTEN):
            with suppress(OSError):
                return (folder / file).stat().st_mtime
        return 0.0  # it was deleted meanwhile


def _ended(folder: Path) -> float | None:
    """When a run that has ended began; None if it has not ended, or cannot be read."""
    try:
        with Run(folder) as run:
            return None if run.state == "running" else run.started
    except RunError:
        return None
