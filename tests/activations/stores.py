"""Stores as a harvest leaves them, or a kill: written by hand, of values that a test knows."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from unittest import mock

import torch

from torchhook.activations import store_files
from torchhook.activations.store_files import Commit, Journal, Manifest, RowFormat, SiteCommit
from torchhook.captures.appendable import AppendableTensor
from torchhook.stats.moments import Moments


@dataclass
class Shard:
    """What is in one shard: ids, rows by site, how many rows each sample has of ragged ones."""

    ids: list
    values: dict
    counts: dict = field(default_factory=dict)
    skipped: dict = field(default_factory=dict)
    overflow: int = 0
    done: bool = True


@mock.patch("os.fsync")  # nothing is killed while these are written, and it takes most of the time
def write(out, shards, _fsync=None, *, ragged=(), complete=True):
    """Put `shards` into the folder `out`; those that are None were begun, and nothing was committed."""
    first = next(shard for shard in shards if shard)
    kinds = {
        site: RowFormat(tuple(rows.shape[1:]), str(rows.dtype).removeprefix("torch."), "float32", site in ragged)
        for site, rows in first.values.items()
    }
    manifest(kinds).write(out)
    for number, shard in enumerate(shards):
        write_shard(out, number, shard, kinds)
    if complete:
        manifest(kinds).done(len(shards)).write(out)


def manifest(kinds):
    return Manifest(
        model="Net",
        model_fingerprint="m",
        data_fingerprint="d",
        samples=None,
        batch_size=None,
        batches_per_shard=1,
        dtype=None,
        rows="sample",
        transform=None,
        keep=(),
        on_error="skip",
        stop=False,
        first_batch={},
        sites=kinds,
        torch=torch.__version__,
        torchhook="0",
    )


def write_shard(out, number, shard, kinds):
    journal = Journal(store_files.journal_path(out, number))
    try:
        if shard is not None:
            (journal.end if shard.done else journal.write)(commit_of(out, number, shard, kinds))
    finally:
        journal.close()


def commit_of(out, number, shard, kinds):
    """The rows of a shard, put into its files."""
    with ThreadPoolExecutor(1) as pool:
        ids = torch.tensor(shard.ids, dtype=torch.int64)
        samples_crc32 = put(store_files.samples_path(out, number), "samples", ids, pool)
        sites = {}
        for site, kind in kinds.items():
            values = shard.values[site]
            crc32 = put(store_files.values_path(out, site, number), "values", values, pool)
            offsets_crc32 = 0
            if kind.ragged:
                counts = torch.tensor([0, *shard.counts[site]], dtype=torch.int64)
                offsets_crc32 = put(store_files.offsets_path(out, site, number), "offsets", counts.cumsum(0), pool)
            state = Moments().settle(moments(values))
            sites[site] = SiteCommit(len(values), crc32, offsets_crc32, shard.overflow, SiteCommit.encoded(state))
    return Commit(1, len(ids), samples_crc32, 0, sites, shard.skipped, shard.done)


def put(path, name, rows, pool):
    file = AppendableTensor(path, name, rows.dtype, tuple(rows.shape[1:]), pool)
    try:
        file.append(rows.contiguous())
        file.commit()
        return file.crc32
    finally:
        file.close()


def moments(values):
    stat, x = Moments(), values.float()
    state = stat.empty(x)
    stat.update(state, x)
    return state if state.dim() == 1 else stat.merge(state)


def plain(sizes, width=4, dtype=torch.float32, sites=("fc",)):
    """Shards of so many samples each, one row a sample, ids from 0."""
    shards, first = [], 0
    for size in sizes:
        ids = list(range(first, first + size))
        values = {
            site: (torch.arange(first * width, (first + size) * width).view(size, width) + 1000 * n).to(dtype)
            for n, site in enumerate(sites)
        }
        shards.append(Shard(ids, values))
        first += size
    return shards


def reference(shards, site="fc"):
    return torch.cat([shard.values[site] for shard in shards if shard])
