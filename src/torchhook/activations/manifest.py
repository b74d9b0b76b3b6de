"""What a folder of activations says of itself: of which model and data, which sites, as which dtype, which versions."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchhook.activations import layout
from torchhook.activations.journal import sync_folder
from torchhook.core.errors import HarvestError

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
class Kind:
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
    sites: dict[str, Kind]
    first_batch: dict[str, tuple[float, float]]  # mean and deviation at each site, by which a change is seen
    torch: str
    torchhook: str
    format: int = FORMAT
    shards: int | None = None  # how many there are, once all are done

    @classmethod
    def read(cls, out: Path) -> Manifest:
        """The manifest in `out`; a `HarvestError` if there is none, or it is of a newer torchhook."""
        path = out / layout.MANIFEST
        try:
            told: dict[str, Any] = json.loads(path.read_text())
            if told["format"] > FORMAT:
                raise HarvestError(
                    f"{str(out)!r} was written by torchhook {told['torchhook']}, in a format that this one does not"
                    " know; update torchhook"
                )
            told["sites"] = {
                site: Kind(**{**kind, "shape": tuple(kind["shape"])}) for site, kind in told["sites"].items()
            }
            told["first_batch"] = {site: (mean, std) for site, (mean, std) in told["first_batch"].items()}
            return cls(**{**told, "keep": tuple(told["keep"])})
        except FileNotFoundError:
            raise HarvestError(f"there are no activations in {str(out)!r}: it has no {layout.MANIFEST}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, HarvestError):
                raise
            raise HarvestError(f"{str(path)!r} is not a manifest of torchhook: {error}") from error

    def write(self, out: Path) -> None:
        """Put it into `out`, at once or not at all."""
        out.mkdir(parents=True, exist_ok=True)
        draft = out / f"{layout.MANIFEST}.draft"
        with draft.open("w") as file:
            json.dump(asdict(self), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(out / layout.MANIFEST)
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
