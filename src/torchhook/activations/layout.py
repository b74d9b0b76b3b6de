"""Where things lie in a folder of activations.

manifest.json                             what was harvested, of which model and data
journal/00000.jsonl                       what of shard 0 is committed
samples/00000.safetensors                 the ids of its samples
sites/layer4/00000.safetensors            its rows at a site
sites/layer4/00000.offsets.safetensors    where each sample's rows begin, if they are ragged
"""

from __future__ import annotations

import zlib
from pathlib import Path
from urllib.parse import quote

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


def journal(out: Path, shard: int) -> Path:
    """The journal of a shard."""
    return out / "journal" / f"{shard:05}.jsonl"


def samples(out: Path, shard: int) -> Path:
    """The ids of the samples of a shard."""
    return out / "samples" / f"{shard:05}.safetensors"


def values(out: Path, site: str, shard: int) -> Path:
    """The rows of a shard at a site."""
    return out / "sites" / folder_of(site) / f"{shard:05}.safetensors"


def offsets(out: Path, site: str, shard: int) -> Path:
    """Where in the rows of a shard each sample begins; the last number is where the last one ends."""
    return out / "sites" / folder_of(site) / f"{shard:05}.offsets.safetensors"


def shards(out: Path) -> list[int]:
    """The shards that were begun, in order."""
    return sorted(int(path.stem) for path in (out / "journal").glob("*.jsonl") if path.stem.isdecimal())
