"""A folder of activations, read back: nothing is executed, nothing is written, and only what is asked for is read.

What there is the journals say, and neither the headers nor the lengths of the files: a store that is being written, or
whose writer was killed, has what was committed when it was opened.
"""

from __future__ import annotations

import html
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchhook.activations import store_files
from torchhook.activations.batches import Batches
from torchhook.activations.column import Column, SampleIds
from torchhook.activations.mapped import RowFile, ShardRows, check
from torchhook.activations.store_files import Commit, Manifest, RowFormat, SiteCommit, last_commit
from torchhook.core.errors import HarvestError, NotRecordedError
from torchhook.core.selection import nearest
from torchhook.core.text import html_table, in_units, table

_HEADER = ("site", "rows", "shape", "dtype", "size", "mean", "std", "nonfinite", "overflow")


class Activations:
    """The activations in a folder, by site; see `torchhook.harvest`.

    `len` is the number of samples; a loop goes over the names of the sites.

    >>> import tempfile
    >>> from torch import nn
    >>> from torchhook import Activations, harvest
    >>> folder = tempfile.TemporaryDirectory()
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    >>> _ = harvest(model, torch.rand(100, 3), ["0", "1"], folder.name, quiet=True)
    >>> acts = Activations.open(folder.name)
    >>> len(acts), list(acts), acts["1"].shape
    (100, ['0', '1'], (100, 2))
    >>> acts["1"][:10].shape, acts["1"].of(17).shape  # rows, by memory map; and those of sample 17
    (torch.Size([10, 2]), torch.Size([1, 2]))
    >>> [len(rows) for rows in acts["1"].batches(40, shuffle=True, seed=0)]
    [40, 40, 20]
    >>> {site: tuple(rows.shape) for site, rows in next(iter(acts.loader(40))).items()}
    {'0': (40, 2), '1': (40, 2)}
    >>> folder.cleanup()
    """

    def __init__(self, folder: Path, manifest: Manifest, commits: Mapping[int, Commit]) -> None:
        """Made by `open`: what the shards have is told by `commits`."""
        self.folder = folder
        self.manifest = manifest
        self._commits = commits
        self._samples = SampleIds(
            [
                RowFile(
                    store_files.samples_path(folder, n),
                    "samples",
                    torch.int64,
                    (),
                    told.samples,
                    told.samples_crc32,
                    told.done,
                )
                for n, told in commits.items()
            ]
        )
        self._columns = {site: self._column(site) for site in manifest.sites}

    @classmethod
    def open(cls, folder: str | Path) -> Activations:
        """The activations in `folder`, as many as are committed now."""
        folder = Path(folder).absolute()
        manifest = Manifest.read(folder)
        numbers = store_files.shard_numbers(folder) if manifest.shards is None else range(manifest.shards)
        commits = {}
        for shard in numbers:
            journal = store_files.journal_path(folder, shard)
            commit = last_commit(journal)
            if commit is not None:
                commits[shard] = commit
            elif manifest.shards is not None:
                raise HarvestError(
                    f"{str(folder)!r} is broken: {str(journal)!r} is missing or empty, and the harvest ended with"
                    f" {manifest.shards} shards"
                )
        return cls(folder, manifest, commits)

    @property
    def sites(self) -> list[str]:
        """The names of the sites."""
        return list(self._columns)

    @property
    def samples(self) -> Tensor:
        """The ids of all samples, in the order of the rows."""
        return self._samples.ids.clone()

    @property
    def complete(self) -> bool:
        """Whether the harvest ended."""
        return self.manifest.shards is not None and all(commit.done for commit in self._commits.values())

    @property
    def skipped(self) -> dict[int, str]:
        """The ids of the samples that are not here because they, or the model on them, failed; and why."""
        return {sample: reason for commit in self._commits.values() for sample, reason in commit.skipped.items()}

    @property
    def nbytes(self) -> int:
        """What the rows of all sites take on the disk."""
        return sum(column.nbytes for column in self._columns.values())

    def __getitem__(self, site: str) -> Column:
        if site not in self._columns:
            raise NotRecordedError(f"{site!r} was not harvested; {nearest(str(site), self._columns)}")
        return self._columns[site]

    def __contains__(self, site: object) -> bool:
        return site in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._samples)

    def batches(
        self,
        size: int,
        sites: Sequence[str] | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        memory_mb: float = 256,
    ) -> Batches[dict[str, Tensor]]:
        """The same rows of several sites (all, unless named) as dicts, as `Column.batches` gives those of one.

        Beside sites with rows of tokens, the row of a sample at another comes once for each of its tokens, as a label.
        """
        _, columns = self._together(sites)
        return Batches(list(columns.values()), partial(_named, list(columns)), size, shuffle, seed, memory_mb)

    def loader(
        self,
        size: int,
        *,
        sites: Sequence[str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        memory_mb: float = 256,
        num_workers: int = 0,
    ) -> DataLoader[dict[str, Tensor]]:
        """The same as a `DataLoader`, whose workers share the rows, and `memory_mb`, between them.

        In order they come in the same order whatever the number of workers; the mixture depends on it. For another one
        in each epoch make a loader with another seed.
        """
        batches = self.batches(size, sites, shuffle=shuffle, seed=seed, memory_mb=memory_mb)
        return DataLoader(batches, batch_size=None, num_workers=num_workers)

    def to_arrow(self, *sites: str) -> Any:
        """The same rows of several sites (all, unless named) as a `pyarrow.Table`, most of it without a copy.

        Beside them are the columns ``sample`` (the id) and ``position`` (which of the sample's rows). A site is a list
        of fixed size, flattened; its shape is in the metadata of the field. bfloat16 becomes float32, and rows of
        samples are repeated as by `batches`.
        """
        lead, columns = self._together(sites or None)
        return table_of(lead.keys(), columns, self.manifest.sites)

    def statistics(self) -> list[dict[str, Any]]:
        """A row for each site: what was measured while it was harvested, of the values as the model gave them."""
        return [
            {"site": site, "rows": len(column), **vars(column.statistics), "overflow": column.overflow}
            for site, column in self._columns.items()
        ]

    def verify(self, progress: TextIO | None = sys.stderr) -> int:
        """Read all there is and compare it with the checksums; how many bytes that were.

        A `HarvestError` names every file that is not as it was written. Delete those and call `harvest` again, which
        makes their shards anew.
        """
        files = [*self._samples.parts, *(part for column in self._columns.values() for part in column.files)]
        return check(files, progress)

    def __repr__(self) -> str:
        return f"{self._title()}\n{table(_HEADER, self._rows())}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self._title())}</p>{html_table(_HEADER, self._rows())}"

    def _column(self, site: str) -> Column:
        kind = self.manifest.sites[site]
        all_kept, values, offsets = [], [], []
        for shard, told in self._commits.items():
            kept = told.sites.get(site, SiteCommit())
            if not kind.ragged and kept.rows != told.samples:
                raise HarvestError(
                    f"{str(store_files.journal_path(self.folder, shard))!r} is broken: {kept.rows} rows of {site!r} for"
                    f" {told.samples} samples"
                )
            all_kept.append(kept)
            path = store_files.values_path(self.folder, site, shard)
            values.append(RowFile(path, "values", kind.torch_dtype, kind.shape, kept.rows, kept.crc32, told.done))
            if kind.ragged:
                path = store_files.offsets_path(self.folder, site, shard)
                offsets.append(
                    RowFile(path, "offsets", torch.int64, (), told.samples + 1, kept.offsets_crc32, told.done)
                )
        return Column(site, kind, self._samples, all_kept, values, offsets)

    def _together(self, sites: Sequence[str] | None) -> tuple[Column, dict[str, Sequence[ShardRows]]]:
        """The parts of several sites, all with the rows of the first, or of the first ragged one if there is any."""
        if isinstance(sites, str):
            raise TypeError(f"sites must be several names, as [{sites!r}]")
        columns = {site: self[site] for site in (self.sites if sites is None else sites)}
        if not columns:
            raise ValueError("sites is empty: name at least one, or leave it out for all")
        ragged = [column for column in columns.values() if column.ragged]
        if not ragged:
            return next(iter(columns.values())), {site: column.parts for site, column in columns.items()}
        lead, *others = ragged
        for other in others:
            if other.shared_out != lead.shared_out:
                raise HarvestError(
                    f"{lead.site!r} has {len(lead)} rows and {other.site!r} {len(other)}, which are not of the same"
                    " things; name sites with the same rows, or read each by itself"
                )
        return lead, {
            site: column.parts if column.ragged else column.spread_over(lead) for site, column in columns.items()
        }

    def _title(self) -> str:
        said = [f"{len(self)} samples, {len(self.sites)} sites, {in_units(self.nbytes)}"]
        if not self.complete:
            said.append("not complete")
        if self.skipped:
            said.append(f"{len(self.skipped)} skipped")
        return f"Activations of {self.manifest.model}: {'; '.join(said)}"

    def _rows(self) -> list[list[Any]]:
        return [
            [
                site if site and site.isprintable() else repr(site),
                len(column),
                "×".join(map(str, column.shape[1:])) or "scalar",
                str(column.dtype).removeprefix("torch."),
                in_units(column.nbytes),
                *(float(f"{number:.4g}") for number in (column.statistics.mean, column.statistics.std)),
                column.statistics.nonfinite,
                column.overflow,
            ]
            for site, column in self._columns.items()
        ]


def _named(names: Sequence[str], rows: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(names, rows, strict=True))


_KEYS = ("sample", "position")
_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "uint8",
}


def table_of(
    keys: tuple[Tensor, Tensor], columns: Mapping[str, Sequence[ShardRows]], kinds: Mapping[str, RowFormat]
) -> Any:
    """A table of columns with the same rows, and their `keys`; a chunk a shard."""
    arrow = _pyarrow()
    clash = [site for site in columns if site in _KEYS]
    if clash:
        raise HarvestError(f"the site {clash[0]!r} has the name of a column of every table; leave it out")
    fields = [(arrow.field(name, arrow.int64()), _plain(values)) for name, values in zip(_KEYS, keys, strict=True)]
    fields += [_site(site, parts, kinds[site]) for site, parts in columns.items()]
    return arrow.table([values for _, values in fields], schema=arrow.schema([field for field, _ in fields]))


def _site(site: str, parts: Sequence[ShardRows], kind: RowFormat) -> tuple[Any, Any]:
    arrow = _pyarrow()
    chunks = [_rows(part.span(0, part.rows)) for part in parts if part.rows]
    as_type = _rows(torch.empty(0, *kind.shape, dtype=kind.torch_dtype)).type
    return arrow.field(site, as_type, metadata={"shape": json.dumps(kind.shape)}), arrow.chunked_array(chunks, as_type)


def _rows(rows: Tensor) -> Any:
    """Rows of numbers as a list each; rows that are one number as they are."""
    arrow, values = _pyarrow(), _plain(rows.flatten())
    if rows.dim() == 1:
        return values
    kind = arrow.list_(values.type, math.prod(rows.shape[1:]))
    return arrow.Array.from_buffers(kind, len(rows), [None], children=[values])


def _plain(values: Tensor) -> Any:
    """Numbers where they lie; Arrow has no bfloat16, and packs truth values into bits."""
    arrow = _pyarrow()
    if values.dtype == torch.bfloat16:
        values = values.float()
    memory = arrow.foreign_buffer(values.data_ptr(), values.nbytes, base=values)
    found = arrow.Array.from_buffers(getattr(arrow, _NAMES[values.dtype])(), len(values), [None, memory])
    return found.cast(arrow.bool_()) if values.dtype == torch.bool else found


def _pyarrow() -> Any:
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise ImportError('to_arrow() needs pyarrow: pip install "torchhook[parquet]"') from error
