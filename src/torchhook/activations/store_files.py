"""What a folder of activations says of itself: of which model and data, which sites, as which dtype, which versions."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from torchhook.core.errors import HarvestError
from torchhook.stats.moments import Moments

MANIFEST = "manifest.json"
_ROOT = "@"  # which no quoted name has in it
_LONGEST = 200  # letters; file systems take 255 bytes


def folder_of(site: str) -> str:
    """The folder of a site: its name, with all that a file system may not like written as %XX.

    >>> folder_of("layer4.1"), folder_of("a/b"), folder_of("")
    ('layer4.1', 'a%2Fb', '@')
    """
    name = quote(site, safe="").replace(".", "%2E") if not site.strip(".") else quote(site, safe="")
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}@{zlib.crc32(name.encode()):08x}"
    return name or _ROOT


def journal_path(out: Path, shard: int) -> Path:
    """The journal of a shard."""
    return out / "journal" / f"{shard:05}.jsonl"


def samples_path(out: Path, shard: int) -> Path:
    """The ids of the samples of a shard."""
    return out / "samples" / f"{shard:05}.safetensors"


def values_path(out: Path, site: str, shard: int) -> Path:
    """The rows of a shard at a site."""
    return out / "sites" / folder_of(site) / f"{shard:05}.safetensors"


def offsets_path(out: Path, site: str, shard: int) -> Path:
    """Where in the rows of a shard each sample begins; the last number is where the last one ends."""
    return out / "sites" / folder_of(site) / f"{shard:05}.offsets.safetensors"


def shard_numbers(out: Path) -> list[int]:
    """The shards that were begun, in order."""
    return sorted(int(path.stem) for path in (out / "journal").glob("*.jsonl") if path.stem.isdecimal())


FORMAT = 1
_ROUNDING = 1e-3  # of a deviation
_RESUMED = {  # what must be as it was for a harvest to go on, and how a user knows it
    "model": "the model",
    "model_fingerprint": "the model's weights or its structure",
    "data_fingerprint": "the data",
    "samples": "the number of samples",
    "batch_size": "batch_size",
    "dtype": "dtype",
    "rows": "rows",
    "transform": "transform",
    "keep": "keep",
    "on_error": "on_error",
    "stop": "stop",
    "sites": "what the sites give",
}


@dataclass(frozen=True)
class RowFormat:
    """What the rows of a site are."""

    shape: tuple[int, ...]
    dtype: str  # as it is stored
    given: str  # as the model gives it
    ragged: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise HarvestError(f"a manifest names the dtype {self.dtype!r}, which there is not")
        return found


@dataclass(frozen=True)
class Manifest:
    """All that must be known beforehand to write a shard, and afterwards to read one."""

    model: str
    model_fingerprint: str
    data_fingerprint: str
    samples: int | None
    batch_size: int | None
    batches_per_shard: int
    dtype: str | None
    rows: str
    transform: str | None
    keep: tuple[str, ...]
    on_error: str
    stop: bool
    sites: dict[str, RowFormat]
    first_batch: dict[str, tuple[float, float]]  # mean and deviation at each site, by which a change is seen
    torch: str
    torchhook: str
    format: int = FORMAT
    shards: int | None = None  # how many there are, once all are done

    @classmethod
    def read(cls, out: Path) -> Manifest:
        """The manifest in `out`; a `HarvestError` if there is none, or it is of a newer torchhook."""
        path = out / MANIFEST
        try:
            told: dict[str, Any] = json.loads(path.read_text())
            if told["format"] > FORMAT:
                raise HarvestError(
                    f"{str(out)!r} was written by torchhook {told['torchhook']}, in a format that this one does not"
                    " know; update torchhook"
                )
            told["sites"] = {
                site: RowFormat(**{**kind, "shape": tuple(kind["shape"])}) for site, kind in told["sites"].items()
            }
            told["first_batch"] = {site: (mean, std) for site, (mean, std) in told["first_batch"].items()}
            return cls(**{**told, "keep": tuple(told["keep"])})
        except FileNotFoundError:
            raise HarvestError(f"there are no activations in {str(out)!r}: it has no {MANIFEST}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, HarvestError):
                raise
            raise HarvestError(f"{str(path)!r} is not a manifest of torchhook: {error}") from error

    def write(self, out: Path) -> None:
        """Put it into `out`, at once or not at all."""
        out.mkdir(parents=True, exist_ok=True)
        draft = out / f"{MANIFEST}.draft"
        with draft.open("w") as file:
            json.dump(asdict(self), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(out / MANIFEST)
        sync_folder(out)

    def done(self, shards: int) -> Manifest:
        """This, of a harvest that ended."""
        return replace(self, shards=shards)

    def require_same(self, other: Manifest, out: Path) -> None:
        """Refuse to go on with `other` in the folder of this one."""
        changed = [name for key, name in _RESUMED.items() if getattr(self, key) != getattr(other, key)]
        if not changed and not all(_alike(seen, other.first_batch[site]) for site, seen in self.first_batch.items()):
            changed = ["what the model, or transform, makes of the first batch"]
        if changed:
            raise HarvestError(
                f"{str(out)!r} was begun with something else: {', '.join(changed)} changed since; pass what it was,"
                " or another folder as out"
            )


def _alike(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Whether two means and deviations are the same up to rounding, as on another machine."""
    room = _ROUNDING * max(abs(a[1]), abs(b[1]), 1e-30)
    return all(x == y or abs(x - y) <= room or (x != x and y != y) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class SiteCommit:
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
    def encoded(state: Tensor | None) -> tuple[str, ...]:
        """Moments as they are written."""
        return () if state is None else tuple(x.hex() for x in state.tolist())


@dataclass(frozen=True)
class Commit:
    """What there is of a shard."""

    batches: int = 0
    samples: int = 0
    samples_crc32: int = 0
    input_crc32: int = 0  # of the last batch, to see on resuming that the data are the same
    sites: dict[str, SiteCommit] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)  # id → reason
    done: bool = False

    @classmethod
    def of(cls, line: str) -> Commit:
        """The commit that a line tells of."""
        told: dict[str, Any] = json.loads(line)
        told["sites"] = {
            site: SiteCommit(**{**kept, "moments": tuple(kept["moments"])}) for site, kept in told["sites"].items()
        }
        told["skipped"] = {int(sample): reason for sample, reason in told["skipped"].items()}
        return cls(**told)

    def line(self) -> str:
        """This as a line.

        >>> Commit.of(Commit(3, 96, 7, 5, {"fc": SiteCommit(96, 1)}, {4: "broken"}).line()).skipped
        {4: 'broken'}
        """
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


def last_commit(path: Path) -> Commit | None:
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


def require_locks() -> Any:
    """The module that locks files; a `HarvestError` where there is none, as on Windows."""
    try:
        return import_module("fcntl")
    except ImportError as error:
        raise HarvestError(
            "harvest cannot write here: this system has no POSIX file locks (the module fcntl); harvest on Linux or"
            " macOS, and read the store here with Activations.open"
        ) from error


class Journal:
    """The journal of one shard, open for writing by one process alone."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._lock()
            self.commit = last_commit(path)
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
        locks = require_locks()
        try:
            locks.flock(self._file, locks.LOCK_EX | locks.LOCK_NB)
        except OSError as error:
            raise HarvestError(f"{str(self.path)!r} is being written by another process; wait for it") from error

    def _cut(self) -> None:
        """Away with half a line."""
        content = self.path.read_bytes()
        os.truncate(self._file, content.rfind(b"\n") + 1)


def merged_moments(states: list[Tensor]) -> Tensor | None:
    """The moments of all, from those of some parts, in their order."""
    return Moments().merge(torch.stack(states)) if states else None


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in `folder` are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
