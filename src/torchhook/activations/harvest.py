"""The verb: what a model does inside, for a whole data set, into files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from torchhook.activations import store_files
from torchhook.activations.collector import RowsName, Wanted
from torchhook.activations.estimate import Probe, estimate, probe
from torchhook.activations.fingerprints import data_fingerprint, model_fingerprint
from torchhook.activations.sources import ReadBatch, Source, source_of
from torchhook.activations.store import Activations
from torchhook.activations.store_files import Manifest, require_locks
from torchhook.activations.worker import Job, commit_of, finish, gaps, joined_gaps, read_gap, work
from torchhook.activations.writer import Amount
from torchhook.core.errors import HarvestError, SelectionError
from torchhook.core.progress import Tell, progress_bar
from torchhook.core.selection import Query, queries_of, require_module
from torchhook.core.tap import require_count
from torchhook.core.text import in_units, warn

_MB = 10**6
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def harvest(
    model: nn.Module,
    data: Any,
    sites: Query | Iterable[Query],
    out: Path | str,
    *,
    transform: Callable[[Any], Any] | None = None,
    dtype: torch.dtype | str | None = "float16",
    rows: RowsName = "auto",
    keep: str | Sequence[str] = (),
    batch_size: int | None = None,
    shard_mb: float = 256,
    resume: bool = True,
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    memory_mb: float = 1024,
    stop: bool = False,
    commit_seconds: float = 5.0,
    quiet: bool = False,
) -> Activations:
    """Run `data` through `model` and keep what flows at `sites` in files under `out`.

    The model runs in eval mode and without gradients. Called again with the same arguments it goes on where it was
    left, also after ``kill -9``, and makes the same files as if nothing had happened.

    Args:
        data: A DataLoader, an iterable of batches, a torch or Hugging Face data set, a tensor of samples, or a Ray
            data set.
        sites: Which outputs to keep, as for `capture`. Further calls of a shared module are sites, too: ``path@1``.
        transform: Called with what a site gives; what it returns is kept: a tensor with a row a sample, or a list
            with a tensor for each.
        dtype: As what real numbers are stored; None: as they are. Those that are too large for it are counted.
        rows: What is a row: ``"token"`` (padding is left out by the attention mask), ``"sample"``, or as the batch
            says; what a transform makes is by sample unless this is ``"token"``.
        keep: Entries of the batches to keep beside the sites, such as ``"input_ids"`` or ``"labels"``; of batches that
            are tuples, ``"target"``.
        batch_size: For data that come in samples; 32 unless given.
        shard_mb: About how much a shard has of all sites together.
        resume: Whether to go on in a folder with activations, and to make sure that one can: data that can be read
            only once are refused.
        engine, workers: ``"ray"`` shares the shards out among as many actors, each with a copy of the model.
        on_error: ``"skip"`` leaves out the samples that cannot be read or that the model raises on, and lists them.
        memory_mb: The most rows that each worker holds on their way to the disk, in megabytes.
        stop: End each forward once every site was seen.
        commit_seconds: How often to commit: a kill costs that much work.
        quiet: Say nothing of what is to come, and of how far it is.

    >>> import tempfile
    >>> from torchhook import harvest
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    >>> folder = tempfile.TemporaryDirectory()
    >>> acts = harvest(model, torch.rand(100, 3), "1", folder.name, quiet=True)
    >>> len(acts), acts["1"].shape, acts["1"].dtype
    (100, (100, 2), torch.float16)
    >>> acts["1"][[3, 99]].shape
    torch.Size([2, 2])
    >>> folder.cleanup()
    """
    require_locks()
    require_module(model)
    if not queries_of(sites):
        raise SelectionError("sites is empty: name at least one place of the model")
    _require_options(
        rows=rows,
        engine=engine,
        workers=workers,
        on_error=on_error,
        shard_mb=shard_mb,
        memory_mb=memory_mb,
        commit_seconds=commit_seconds,
    )
    where, out, keep = out, Path(out).absolute(), (keep,) if isinstance(keep, str) else tuple(keep)
    wanted = Wanted(sites, transform, _dtype(dtype), rows, keep, stop)
    source = source_of(data, batch_size, model, wanted.keep)
    if resume and not source.repeats:
        raise HarvestError(f"data cannot be read a second time, which resume=True may need: {source.why_not}")
    before = _manifest_in(out, resume)
    max_bytes, skips = int(memory_mb * _MB), on_error == "skip"
    reading = source.read(skip=skips)
    first = probe(model, wanted, reading, skips, max_bytes)
    shared_out = (
        engine == "ray" and not source.indexed
    )  # what is read here waits in Ray's store until its shard is made
    size = max(first.nbytes, first.input_bytes) if shared_out else first.nbytes
    manifest = _manifest_of(model, source, wanted, first, on_error, max(1, round(shard_mb * _MB / max(size, 1))))
    if before is not None:
        before.require_same(manifest, out)
        manifest = before
    job = Job(out, manifest, wanted, max_bytes, commit_seconds)
    expected = estimate(first, _left(job, source, first), out, workers or 1)
    if before is None:
        manifest.write(out)
    if not quiet:
        print(f"harvest of {len(manifest.sites)} sites into {where}: {expected}", file=sys.stderr)
    fresh = not store_files.shard_numbers(out)
    ahead = chain(first.reads, reading) if fresh else None  # what was read already need not be read again
    with closing(reading), Meter(expected.samples, quiet) as meter:
        if engine == "ray":
            from torchhook.activations import on_ray

            on_ray.fill(job, model, source, ahead, workers, meter)
        else:
            _fill(job, model, source, ahead, meter)
    finish(out, manifest, source.batches)
    acts = Activations.open(out)
    _complain(acts)
    return acts


def _manifest_of(
    model: nn.Module, source: Source, wanted: Wanted, first: Probe, on_error: str, batches_per_shard: int
) -> Manifest:
    """What is to be harvested, as the folder will say it."""
    return Manifest(
        model=type(model).__name__,
        model_fingerprint=model_fingerprint(model),
        data_fingerprint=data_fingerprint(source),
        samples=source.samples,
        batch_size=first.batch_size,
        batches_per_shard=batches_per_shard,
        dtype=None if wanted.dtype is None else str(wanted.dtype).removeprefix("torch."),
        rows=wanted.rows,
        transform=_name(wanted.transform),
        keep=wanted.keep,
        on_error=on_error,
        stop=wanted.stop,
        sites=first.sites,
        first_batch=first.seen,
        torch=torch.__version__,
        torchhook=sys.modules["torchhook"].__version__,  # which this is part of, and lies below
    )


def _fill(job: Job, model: nn.Module, source: Source, ahead: Iterator[ReadBatch] | None, meter: Meter) -> None:
    """Make what is missing, here; `ahead` are all batches, if nothing is there yet."""
    for gap in joined_gaps(gaps(job.out, job.manifest, source.batches)):
        work(job, model, ahead if ahead is not None else read_gap(source, gap, job.skips), meter.add)


def _left(job: Job, source: Source, first: Probe) -> int | None:
    """How many samples are still to be harvested, if that is known, or about how many, if it is of batches."""
    samples = source.samples
    if samples is None and source.batches is not None:
        samples = source.batches * first.batch_size
    there = [commit_of(job.out, job.manifest, shard) for shard in store_files.shard_numbers(job.out)]
    return None if samples is None else max(0, samples - sum(one.samples + len(one.skipped) for one in there))


def _manifest_in(out: Path, resume: bool) -> Manifest | None:
    """The manifest of what `out` has already; refuses a folder that is not ours to write to."""
    if file := next((path for path in (out, *out.parents) if path.is_file()), None):
        raise HarvestError(f"out must be a folder, and {str(file)!r} is a file")
    if not out.exists():
        return None
    if (out / store_files.MANIFEST).exists():
        if not resume:
            raise HarvestError(f"{str(out)!r} has activations already; with resume=False pass another folder as out")
        return Manifest.read(out)
    if any(path.name != f"{store_files.MANIFEST}.draft" for path in out.iterdir()):
        raise HarvestError(f"{str(out)!r} has other files in it; pass a new or an empty folder as out")
    return None


def _complain(acts: Activations) -> None:
    """Tell of what is not as one would wish."""
    for name in acts:
        column = acts[name]
        if column.overflow:
            warn(
                f"{column.overflow:,} values of {name!r} are too large for {column.dtype} and were stored as infinite;"
                " dtype='bfloat16' or 'float32' holds them"
            )
        if column.statistics.nonfinite:
            warn(f"the model gave {column.statistics.nonfinite:,} NaN or infinite values at {name!r}; they were kept")
    if acts.skipped:
        sample, reason = next(iter(acts.skipped.items()))
        warn(f"{len(acts.skipped):,} samples were skipped; the first is {sample}: {reason} (all are in .skipped)")


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in _DTYPES:
        names = ", ".join(repr(str(one).removeprefix("torch.")) for one in _DTYPES)
        raise ValueError(f"dtype must be one of {names}, or None for what the model gives, not {dtype!r}")
    return found


def _name(function: Callable[..., Any] | None) -> str | None:
    if function is None:
        return None
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _require_options(**given: Any) -> None:
    choices = {"rows": ("auto", "sample", "token"), "engine": ("local", "ray"), "on_error": ("raise", "skip")}
    for name, allowed in choices.items():
        if given[name] not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {given[name]!r}")
    for name in ("shard_mb", "memory_mb"):
        if not isinstance(given[name], (int, float)) or not given[name] > 0:
            raise ValueError(f"{name} must be a number of megabytes above 0, not {given[name]!r}")
    if not isinstance(given["commit_seconds"], (int, float)) or not given["commit_seconds"] >= 0:
        raise ValueError(f"commit_seconds must be a number of seconds, not {given['commit_seconds']!r}")
    if given["workers"] is not None:
        require_count(given["workers"], "workers")
        if given["engine"] == "local":
            raise ValueError("workers are those of engine='ray'; the local engine has one")


class Meter:
    """Shows how far a harvest has come, in a terminal only.

    >>> with Meter(100, quiet=True) as meter:
    ...     meter.add(Amount(samples=32, rows=32, nbytes=4096))
    """

    def __init__(self, total: int | None, quiet: bool) -> None:
        self._done = Amount()
        self._total = total
        self._file = None if quiet else sys.stderr
        self._start = time.monotonic()
        self._open = ExitStack()
        self._tell: Tell | None = None

    def __enter__(self) -> Meter:
        self._tell = self._open.enter_context(progress_bar("samples", self._file))
        return self

    def add(self, amount: Amount) -> None:
        """Count one more piece of work."""
        self._done = done = self._done.plus(amount)
        if self._tell is not None:
            seconds = max(time.monotonic() - self._start, 1e-9)
            size = f"{in_units(done.nbytes)}  {in_units(done.nbytes / seconds)}/s"
            self._tell(
                "samples", done.samples, self._total, f"{size}  {done.rows:,} rows  {done.rows / seconds:,.0f}/s"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
