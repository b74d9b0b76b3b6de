"""The files of a store of activations: where they are, its manifest, and the journals of its shards.

    manifest.json                             what was harvested, from which model and data
    journal/00000.jsonl                       what of shard 0 is committed
    samples/00000.safetensors                 the ids of its samples
    sites/layer4/00000.safetensors            its rows at a site
    sites/layer4/00000.offsets.safetensors    where the rows of each sample start, if samples have several

A journal has one line per commit, which describes the whole shard so far. It is written after the rows are on disk, and
counts once it is on disk itself: an incomplete last line, as a kill leaves it, is ignored.
"""

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

from torchhook.captures.appendable import code_of
from torchhook.core.errors import HarvestError
from torchhook.core.untrusted import built, json_in, json_of
from torchhook.stats.kernels.plain import FIELDS
from torchhook.stats.moments import Moments

MANIFEST = "manifest.json"
FORMAT = 1
_ROOT = "@"  # never part of a quoted name
_LONGEST = 200  # characters; file systems allow 255 bytes
_COUNTS = ("count", "nan", "posinf", "neginf", "zeros")
_ROUNDING = 1e-3  # of a standard deviation
_RESUMED = {  # what must not change before a harvest is resumed, and what an error calls it
    "model": "the model",
    "model_fingerprint": "the weights or the structure of the model",
    "data_fingerprint": "the data",
    "samples": "the number of samples",
    "batch_size": "batch_size",
    "dtype": "dtype",
    "rows": "rows",
    "transform": "transform",
    "keep": "keep",
    "on_error": "on_error",
    "stop": "stop",
    "sites": "the sites or the shapes of their outputs",
}


def folder_of(site: str) -> str:
    """The folder of a site: its name, with characters that a file system may not allow written as %XX.

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
    """Where in the rows of a shard each sample starts; the last number is where the last sample ends."""
    return out / "sites" / folder_of(site) / f"{shard:05}.offsets.safetensors"


def shard_numbers(out: Path) -> list[int]:
    """The numbers of the shards in `out`, complete or not, in order."""
    return sorted(int(path.stem) for path in (out / "journal").glob("*.jsonl") if path.stem.isdecimal())


@dataclass(frozen=True)
class RowFormat:
    """The format of a site's rows."""

    shape: tuple[int, ...]
    dtype: str  # as stored
    given: str  # as the model returned it
    ragged: bool  # whether samples have several rows, such as tokens

    @property
    def torch_dtype(self) -> torch.dtype:
        """The stored dtype."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise HarvestError(f"unknown dtype {self.dtype!r} in the manifest")
        return found


@dataclass(frozen=True)
class Manifest:
    """What must be known to write a shard, and later to read it."""

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
    first_batch: dict[str, tuple[float, float]]  # mean and standard deviation at each site, to detect changes
    torch: str
    torchhook: str
    format: int = FORMAT
    shards: int | None = None  # their number, once all are done

    @classmethod
    def read(cls, out: Path) -> Manifest:
        """The manifest in `out`; raises a `HarvestError` if there is none, or if a newer torchhook wrote it."""
        path = out / MANIFEST
        try:
            found = json_in(path)
            number = found.get("format") if isinstance(found, dict) else None
            if isinstance(number, int) and number > FORMAT:
                writer = str(found.get("torchhook"))
            else:
                return built(cls, found)._required()
        except FileNotFoundError:
            raise HarvestError(f"no activations in {str(out)!r}: it has no {MANIFEST}") from None
        except (ValueError, OSError) as error:
            raise HarvestError(f"{str(path)!r} is not a torchhook manifest: {error}") from error
        raise HarvestError(
            f"{str(out)!r} was written by torchhook {writer:.40}, in a newer format than this version can read; update"
            " torchhook"
        )

    def _required(self) -> Manifest:
        """Itself, if its sites can be read; else raises a ValueError."""
        for kind in self.sites.values():
            code_of(kind.torch_dtype)
        if not self.first_batch.keys() <= self.sites.keys():
            raise ValueError("first_batch names sites that sites does not have")
        return self

    def write(self, out: Path) -> None:
        """Write it to `out` atomically."""
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
        """The manifest of the complete store."""
        return replace(self, shards=shards)

    def require_same(self, other: Manifest, out: Path) -> None:
        """Raise if a harvest with the manifest `other` cannot resume this one."""
        changed = [name for key, name in _RESUMED.items() if getattr(self, key) != getattr(other, key)]
        if not changed and not all(_alike(seen, other.first_batch[site]) for site, seen in self.first_batch.items()):
            changed = ["the output of the model or of transform for the first batch"]
        if changed:
            raise HarvestError(
                f"cannot resume {str(out)!r}: {', '.join(changed)} changed since it was started; pass what it was"
                " started with, or another folder as out"
            )


def _alike(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Whether two pairs of mean and standard deviation agree up to the rounding of another machine."""
    tolerance = _ROUNDING * max(abs(a[1]), abs(b[1]), 1e-30)
    return all(x == y or abs(x - y) <= tolerance or (x != x and y != y) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class SiteCommit:
    """What of a shard is committed at one site."""

    rows: int = 0
    crc32: int = 0
    offsets_crc32: int = 0
    overflow: int = 0  # finite values that are too large for the stored dtype and became infinite
    moments: tuple[str, ...] = ()  # of the values as the model returned them; in hexadecimal, which is exact

    def state(self) -> Tensor | None:
        """The moments as a tensor, to merge with others; None if there are none."""
        return torch.tensor([float.fromhex(x) for x in self.moments], dtype=torch.float64) if self.moments else None

    def require_possible(self) -> None:
        """Raise a ValueError if the moments cannot be those of any values."""
        try:
            row = dict(zip(FIELDS, [float.fromhex(x) for x in self.moments], strict=True)) if self.moments else {}
        except (ValueError, OverflowError) as error:
            raise ValueError(f"moments: {error}") from None
        if not all(0 <= row.get(name, 0) < 2**53 for name in _COUNTS) or row.get("m2", 0) < 0:
            raise ValueError("moments: no values have these")

    @staticmethod
    def encoded(state: Tensor | None) -> tuple[str, ...]:
        """Moments as they are written to the journal."""
        return () if state is None else tuple(x.hex() for x in state.tolist())


@dataclass(frozen=True)
class Commit:
    """What of a shard is committed."""

    batches: int = 0
    samples: int = 0
    samples_crc32: int = 0
    input_crc32: int = 0  # of the last batch, to check on resuming that the data are the same
    sites: dict[str, SiteCommit] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)  # id → reason
    done: bool = False

    @classmethod
    def of(cls, line: str) -> Commit:
        """The commit in a line of a journal."""
        found = built(cls, json_of(line))
        for kept in found.sites.values():
            kept.require_possible()
        return found

    def line(self) -> str:
        """The commit as a line of a journal.

        >>> Commit.of(Commit(3, 96, 7, 5, {"fc": SiteCommit(96, 1)}, {4: "broken"}).line()).skipped
        {4: 'broken'}
        """
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


def last_commit(path: Path) -> Commit | None:
    """The last commit in a journal, if it has one; the file is not changed."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # a line without a newline is incomplete
        return Commit.of(lines[-1].decode()) if lines else None
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise HarvestError(
            f"{str(path)!r} is not a torchhook journal: {error}; delete it and call harvest again, which writes its"
            " shard again"
        ) from error


def require_locks() -> Any:
    """The module that locks files; raises a `HarvestError` on systems without it, such as Windows."""
    try:
        return import_module("fcntl")
    except ImportError as error:
        raise HarvestError(
            "harvest cannot write here: this system has no POSIX file locks (the module fcntl); harvest on Linux or"
            " macOS, and read the store here with Activations.open"
        ) from error


class Journal:
    """The journal of one shard, opened for writing and locked against other processes."""

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
        while line:  # a disk that is nearly full may take only a part
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)

    def end(self, commit: Commit) -> None:
        """Replace all lines by the last one, atomically: a shard that is done looks the same however it was written."""
        draft = self.path.with_suffix(".draft")
        with draft.open("wb") as file:
            file.write(commit.line().encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Close the file, which also releases the lock."""
        os.close(self._file)

    def _lock(self) -> None:
        locks = require_locks()
        try:
            locks.flock(self._file, locks.LOCK_EX | locks.LOCK_NB)
        except OSError as error:
            raise HarvestError(f"another process is writing {str(self.path)!r}; wait until it ends") from error

    def _cut(self) -> None:
        """Remove an incomplete last line."""
        content = self.path.read_bytes()
        os.truncate(self._file, content.rfind(b"\n") + 1)


def merged_moments(states: list[Tensor]) -> Tensor | None:
    """The moments of the whole from those of its parts; None without parts."""
    return Moments().merge(torch.stack(states)) if states else None


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in `folder` are on disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
