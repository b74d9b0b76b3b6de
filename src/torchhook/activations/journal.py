"""What of a shard is committed: one line a commit, each telling of the whole shard up to there.

A line counts once it is on the disk, and it is written after the rows it tells of are. Half a line at the end, as a
kill leaves it, is no line.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchhook.core.errors import HarvestError
from torchhook.stats.moments import Moments


@dataclass(frozen=True)
class Kept:
    """What there is of a shard at one site."""

    rows: int = 0
    crc32: int = 0
    offsets_crc32: int = 0
    overflow: int = 0  # finite values that became infinite because the dtype of the store is too small for them
    moments: tuple[str, ...] = ()  # of the values as the model gave them; in hexadecimal, which is exact

    def state(self) -> Tensor | None:
        """The moments, to merge with others; None if nothing was measured."""
        return torch.tensor([float.fromhex(x) for x in self.moments], dtype=torch.float64) if self.moments else None

    @staticmethod
    def told(state: Tensor | None) -> tuple[str, ...]:
        """Moments as they are written."""
        return () if state is None else tuple(x.hex() for x in state.tolist())


@dataclass(frozen=True)
class Commit:
    """What there is of a shard."""

    batches: int = 0
    samples: int = 0
    samples_crc32: int = 0
    input_crc32: int = 0  # of the last batch, to see on resuming that the data are the same
    sites: dict[str, Kept] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)  # id → reason
    done: bool = False

    @classmethod
    def of(cls, line: str) -> Commit:
        """The commit that a line tells of."""
        told: dict[str, Any] = json.loads(line)
        told["sites"] = {
            site: Kept(**{**kept, "moments": tuple(kept["moments"])}) for site, kept in told["sites"].items()
        }
        told["skipped"] = {int(sample): reason for sample, reason in told["skipped"].items()}
        return cls(**told)

    def line(self) -> str:
        """This as a line.

        >>> Commit.of(Commit(3, 96, 7, 5, {"fc": Kept(96, 1)}, {4: "broken"}).line()).skipped
        {4: 'broken'}
        """
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


def last(path: Path) -> Commit | None:
    """The last commit of a shard, if it has one; the file is left as it is."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what no newline ends was torn
        return Commit.of(lines[-1].decode()) if lines else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise HarvestError(
            f"{str(path)!r} is not a journal of torchhook: {error}; delete it, and its shard is made anew"
        ) from error


class Journal:
    """The journal of one shard, open for writing by one process alone."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._lock()
            self.commit = last(path)
            self._cut()
        except BaseException:
            self.close()
            raise

    def write(self, commit: Commit) -> None:
        """Add a line, and wait until it is on the disk."""
        line = commit.line().encode()
        while line:  # of which a disk that is nearly full takes a part
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)

    def end(self, commit: Commit) -> None:
        """Leave one line alone, at once or not at all: a shard that is done looks the same however it came about."""
        draft = self.path.with_suffix(".draft")
        with draft.open("wb") as file:
            file.write(commit.line().encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Give the file back, and the lock with it."""
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise HarvestError(f"{str(self.path)!r} is being written by another process; wait for it") from error

    def _cut(self) -> None:
        """Away with half a line."""
        content = self.path.read_bytes()
        os.truncate(self._file, content.rfind(b"\n") + 1)


def merged(states: list[Tensor]) -> Tensor | None:
    """The moments of all, from those of some parts, in their order."""
    return Moments().merge(torch.stack(states)) if states else None


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in `folder` are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
