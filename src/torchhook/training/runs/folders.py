"""Folders of runs: creating, finding, pruning and deleting them.

A run is a folder with a `run.sqlite`. If several processes train together, rank 0 writes into the run itself, the
others into `rank1`, `rank2`, … below it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from torchhook.core.errors import RunError
from torchhook.training.runs.run import Run
from torchhook.training.runs.schema import FILE, SAMPLES, UNWRITTEN, remove

LATEST = "latest"
_UNFIT = re.compile(r"[^\w.-]+", re.ASCII)
_RANK = re.compile(r"rank\d+")
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
    root = Path(root)
    if not root.is_dir():
        raise RunError(f"there is no folder {str(root)!r}; pass the folder that the monitor got as to=")
    return sorted(_runs_below(root), key=lambda folder: (_started(folder), folder.name), reverse=True)


def latest(path: str | os.PathLike[str]) -> Path:
    """The run at `path`, or the newest in it if it is a folder of runs."""
    path = Path(path)
    if path.name == FILE or (path / FILE).is_file():
        return path
    named = path / (path / LATEST).resolve().name
    if (named / FILE).is_file():  # else there are no links here, or the run is gone
        return named
    found = find(path)
    if not found:
        raise RunError(f"there are no runs in {str(path)!r}; `torchhook run SCRIPT` or a `Monitor` writes one")
    return found[0]


def ranks(folder: Path) -> list[Path]:
    """The folders of the other ranks of this run."""
    found = [below for below in _runs_below(folder) if _RANK.fullmatch(below.name)]
    return sorted(found, key=lambda below: int(below.name.removeprefix("rank")))


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
    for below in ranks(folder):
        delete(below)
    for picture in _pictures(folder):
        picture.unlink(missing_ok=True)
    _remove_empty(folder / SAMPLES)
    (folder / UNWRITTEN).unlink(missing_ok=True)
    remove(folder / FILE)
    gone = _remove_empty(folder)
    latest = folder.parent / LATEST
    if latest.is_symlink() and not latest.exists():
        latest.unlink()
    return gone


def _runs_below(folder: Path) -> list[Path]:
    """The runs in a folder, except those that are links to elsewhere."""
    return [below for below in folder.iterdir() if not below.is_symlink() and (below / FILE).is_file()]


def _pictures(folder: Path) -> Iterator[Path]:
    samples = folder / SAMPLES
    if samples.is_dir() and not samples.is_symlink():
        yield from (file for file in samples.iterdir() if _OURS.fullmatch(file.name))


def _remove_empty(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:  # it is not empty, or not a folder
        return False
    return True


def _lead_to(folder: Path) -> None:
    """Make `latest` a link to a folder, unless something else has that name."""
    latest = folder.parent / LATEST
    if latest.exists() and not latest.is_symlink():
        return
    draft = folder.parent / f".{LATEST}.{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(folder.name, target_is_directory=True)
    draft.replace(latest)


def _started(folder: Path) -> float:
    try:
        with Run(folder) as run:
            return run.started
    except RunError:
        try:
            return (folder / FILE).stat().st_mtime
        except OSError:  # it was deleted meanwhile
            return 0.0


def _ended(folder: Path) -> float | None:
    """When a run that has ended began; None if it has not ended, or cannot be read."""
    try:
        with Run(folder) as run:
            return None if run.state == "running" else run.started
    except RunError:
        return None
