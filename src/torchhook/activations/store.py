"""A store of activations, read back: opening it executes nothing, writes nothing, and reads only what is asked for.

The journals decide what is in a store, not the headers or the sizes of the files: a store that is being written, or
whose writer was killed, has what was committed when it was opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchhook.activations import store_files
from torchhook.activations.batches import Batches
from torchhook.activations.column import Column, SampleIds
from torchhook.activations.mapped import RowFile, ShardRows, check
from torchhook.activations.store_files import Commit, Manifest, RowFormat, SiteCommit, last_commit
from torchhook.core.cards import boxed, text
from torchhook.core.errors import HarvestError, NotRecordedError
from torchhook.core.optional import require
from torchhook.core.progress import Progress
from torchhook.core.renamed import renamed
from torchhook.core.selection import nearest
from torchhook.core.text import html_table, in_units, table

_HEADER = ("site", "rows", "shape", "dtype", "size", "mean", "std", "nonfinite", "overflow")
_KEYS = ("sample", "position")
_ARROW_NAMES = {
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


class Activations:
    """The activations in a folder, by site, as `torchhook.harvest` wrote them.

    `len` is the number of samples; iterating yields the names of the sites.

    >>> import tempfile
    >>> from torch import nn
    >>> from torchhook import Activations, harvest
    >>> folder = tempfile.TemporaryDirectory()
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    >>> _ = harvest(model, torch.rand(100, 3), ["0", "1"], folder.name, progress=False)
    >>> acts = Activations.open(folder.name)
    >>> len(acts), list(acts), acts["1"].shape
    (100, ['0', '1'], (100, 2))

    (torch.Size([10, 2]), torch.Size([1, 2]))
    >>> [len(rows) for rows in acts["1"].batches(40, shuffle=True, seed=0)]
    [40, 40, 20]
    >>> {site: tuple(rows.shape) for site, rows in next(iter(acts.loader(40))).items()}
    {'0': (40, 2), '1': (40, 2)}
    >>> folder.cleanup()
    """

    def __init__(self, folder: Path, manifest: Manifest, commits: Mapping[int, Commit]) -> None:
        """Made by `open`; `commits` say what each shard has."""
        self.folder = folder
        self.manifest = manifest
        self._commits = commits
        self._samples = SampleIds(
            [
                RowFile(path, "samples", torch.int64, (), commit.samples, commit.samples_crc32, commit.done)
                for shard, commit in commits.items()
                for path in [store_files.samples_path(folder, shard)]
            ]
        )
        self._columns = {site: self._column(site) for site in manifest.sites}

    @classmethod
    def open(cls, folder: str | Path) -> Activations:
        """The activations in `folder` that are committed now."""
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
                    f"{str(folder)!r} is broken: {str(journal)!r}, one of {manifest.shards} journals, is missing or"
                    " empty"
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
        """Whether the harvest is complete."""
        return self.manifest.shards is not None and all(commit.done for commit in self._commits.values())

    @property
    def skipped(self) -> dict[int, str]:
        """The ids of the samples that could not be read or run, with the reasons."""
        return {sample: reason for commit in self._commits.values() for sample, reason in commit.skipped.items()}

    @property
    def nbytes(self) -> int:
        """The size of the rows of all sites on disk."""
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
        """The number of samples."""
        return len(self._samples)

    @renamed(memory_mb=("memory_bytes", lambda mib: round(mib * 2**20)))
    def batches(
        self,
        size: int,
        sites: Sequence[str] | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        memory_bytes: int = 2**28,
    ) -> Batches[dict[str, Tensor]]:
        """The same rows of several sites (all by default), as dicts; otherwise like `Column.batches`.

        Next to sites with one row per token, a row per sample, such as a label, is repeated for each of its tokens.
        """
        _, columns = self._together(sites)
        return Batches(list(columns.values()), partial(_named, list(columns)), size, shuffle, seed, memory_bytes)

    @renamed(memory_mb=("memory_bytes", lambda mib: round(mib * 2**20)))
    def loader(
        self,
        size: int,
        *,
        sites: Sequence[str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        memory_bytes: int = 2**28,
        num_workers: int = 0,
    ) -> DataLoader[dict[str, Tensor]]:
        """The same batches as a `DataLoader`, whose workers divide the rows and `memory_bytes` among them.

        The order of shuffled rows depends on the number of workers. For another order in each epoch, make a loader
        with another seed.
        """
        batches = self.batches(size, sites, shuffle=shuffle, seed=seed, memory_bytes=memory_bytes)
        return DataLoader(batches, batch_size=None, num_workers=num_workers)

    def to_arrow(self, *sites: str) -> Any:
        """The same rows of several sites (all by default) as a `pyarrow.Table`, mostly without copying.

        The columns ``sample`` (its id) and ``position`` (among the rows of the sample) come first. Each site is a
        column of flattened fixed-size lists, with the shape in the metadata of the field. bfloat16 becomes float32,
        and a row per sample is repeated as by `batches`.
        """
        lead, columns = self._together(sites or None)
        return table_of(lead.keys(), columns, self.manifest.sites)

    def statistics(self) -> list[dict[str, Any]]:
        """One dict per site: statistics of the values as the model returned them, measured during the harvest."""
        return [
            {"site": site, "rows": len(column), **vars(column.statistics), "overflow": column.overflow}
            for site, column in self._columns.items()
        ]

    def verify(self, progress: Progress = True) -> int:
        """Compare all files with their checksums; returns the number of bytes read.

        A `HarvestError` names each broken file. Delete those and call `harvest` again, which writes their shards
        again.
        """
        files = [*self._samples.parts, *(part for column in self._columns.values() for part in column.files)]
        return check(files, progress)

    def __repr__(self) -> str:
        return f"{self._title()}\n{table(_HEADER, self._rows())}"

    def _repr_html_(self) -> str:
        return boxed(f"<p>{text(self._title())}</p>{html_table(_HEADER, self._rows())}")

    def _column(self, site: str) -> Column:
        kind = self.manifest.sites[site]
        all_kept, values, offsets = [], [], []
        for shard, commit in self._commits.items():
            kept = commit.sites.get(site, SiteCommit())
            if not kind.ragged and kept.rows != commit.samples:
                raise HarvestError(
                    f"{str(store_files.journal_path(self.folder, shard))!r} is broken: {kept.rows} rows of {site!r} for"
                    f" {commit.samples} samples"
                )
            all_kept.append(kept)
            path = store_files.values_path(self.folder, site, shard)
            values.append(RowFile(path, "values", kind.torch_dtype, kind.shape, kept.rows, kept.crc32, commit.done))
            if kind.ragged:
                path = store_files.offsets_path(self.folder, site, shard)
                offsets.append(
                    RowFile(path, "offsets", torch.int64, (), commit.samples + 1, kept.offsets_crc32, commit.done)
                )
        return Column(site, kind, self._samples, all_kept, values, offsets)

    def _together(self, sites: Sequence[str] | None) -> tuple[Column, dict[str, Sequence[ShardRows]]]:
        """The parts of several sites with the same rows: those of the first ragged site, or else of the first site."""
        if isinstance(sites, str):
            raise TypeError(f"sites must be a list of names: [{sites!r}]")
        columns = {site: self[site] for site in (self.sites if sites is None else sites)}
        if not columns:
            raise ValueError("sites is empty: name at least one, or leave it out for all sites")
        ragged = [column for column in columns.values() if column.ragged]
        if not ragged:
            return next(iter(columns.values())), {site: column.parts for site, column in columns.items()}
        lead, *others = ragged
        for other in others:
            if other.shared_out != lead.shared_out:
                raise HarvestError(
                    f"the {len(lead)} rows of {lead.site!r} and the {len(other)} rows of {other.site!r} are not of the"
                    " same tokens; name sites with the same tokens, or read each site by itself"
                )
        return lead, {
            site: column.parts if column.ragged else column.spread_over(lead) for site, column in columns.items()
        }

    def _title(self) -> str:
        facts = [f"{len(self)} samples, {len(self.sites)} sites, {in_units(self.nbytes)}"]
        if not self.complete:
            facts.append("not complete")
        if self.skipped:
            facts.append(f"{len(self.skipped)} skipped")
        return f"Activations of {self.manifest.model}: {'; '.join(facts)}"

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


def table_of(
    keys: tuple[Tensor, Tensor], columns: Mapping[str, Sequence[ShardRows]], kinds: Mapping[str, RowFormat]
) -> Any:
    """An Arrow table of columns with the same rows and of their `keys`, with one chunk per shard."""
    arrow = _pyarrow()
    clash = [site for site in columns if site in _KEYS]
    if clash:
        raise HarvestError(f"the site {clash[0]!r} has the name of a key column; leave it out of the table")
    fields = [(arrow.field(name, arrow.int64()), _plain(values)) for name, values in zip(_KEYS, keys, strict=True)]
    fields += [_site(site, parts, kinds[site]) for site, parts in columns.items()]
    return arrow.table([values for _, values in fields], schema=arrow.schema([field for field, _ in fields]))


def _site(site: str, parts: Sequence[ShardRows], kind: RowFormat) -> tuple[Any, Any]:
    arrow = _pyarrow()
    chunks = [_rows(part.span(0, part.rows)) for part in parts if part.rows]
    as_type = _rows(torch.empty(0, *kind.shape, dtype=kind.torch_dtype)).type
    return arrow.field(site, as_type, metadata={"shape": json.dumps(kind.shape)}), arrow.chunked_array(chunks, as_type)


def _rows(rows: Tensor) -> Any:
    """Rows as fixed-size lists; rows that are one number each as plain values."""
    arrow, values = _pyarrow(), _plain(rows.flatten())
    if rows.dim() == 1:
        return values
    kind = arrow.list_(values.type, math.prod(rows.shape[1:]))
    return arrow.Array.from_buffers(kind, len(rows), [None], children=[values])


def _plain(values: Tensor) -> Any:
    """Values without copying, except bfloat16, which Arrow lacks, and booleans, which it packs into bits."""
    arrow = _pyarrow()
    if values.dtype == torch.bfloat16:
        values = values.float()
    memory = arrow.foreign_buffer(values.data_ptr(), values.nbytes, base=values)
    found = arrow.Array.from_buffers(getattr(arrow, _ARROW_NAMES[values.dtype])(), len(values), [None, memory])
    return found.cast(arrow.bool_()) if values.dtype == torch.bool else found


def _pyarrow() -> Any:
    return require("pyarrow", "parquet", "to_arrow()")
