"""The verb `harvest`: run a whole data set through a model and write its activations to files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from shutil import get_terminal_size
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
from torchhook.activations.writer import Amount, OnWritten
from torchhook.core.batch import ToInputs
from torchhook.core.errors import HarvestError, SelectionError
from torchhook.core.progress import Progress, Tell, progress_bar
from torchhook.core.renamed import renamed
from torchhook.core.selection import Query, queries_of, require_module
from torchhook.core.tap import require_count
from torchhook.core.text import in_units, warn

_MB = 10**6
_WIDE = 100  # columns of a terminal that has room for rates beside the bar
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@renamed(
    shard_mb=("shard_bytes", lambda mb: round(mb * 1e6)),
    memory_mb=("memory_bytes", lambda mb: round(mb * 1e6)),
    quiet=("progress", lambda quiet: not quiet),
)
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
    shard_bytes: int = 2**28,
    resume: bool = True,
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    memory_bytes: int = 2**30,
    stop: bool = False,
    commit_seconds: float = 5.0,
    batch_to_inputs: ToInputs | None = None,
    progress: Progress = True,
) -> Activations:
    """Run `data` through `model` and write the activations at `sites` to files in the folder `out`.

    The model runs in eval mode and without gradients. Call it again with the same arguments to resume after an
    interruption, even ``kill -9``: the files end up the same as those of an uninterrupted run.

    Args:
        data: A DataLoader, an iterable of batches, a torch or Hugging Face data set, a tensor of samples, or a Ray
            data set.
        sites: Which outputs to keep, as for `capture`. Later calls of a shared module are sites of their own:
            ``path@1``.
        transform: Called with the output of a site. Its result is stored instead: a tensor with one row per sample,
            or a list with one tensor per sample.
        dtype: How floating-point values are stored; None keeps the model's dtype. Values too large for it are
            counted.
        rows: What one row is: ``"token"`` (without padding, by the attention mask), ``"sample"``, or ``"auto"``:
            tokens if the batch has them, and samples for the results of a transform.
        keep: Entries of the batches to store beside the sites, such as ``"input_ids"`` or ``"labels"``; for batches
            that are tuples, ``"target"``.
        batch_size: For data that come as single samples; 32 by default.
        shard_bytes: Approximate size of a shard, all sites together.
        resume: Resume in a folder that already has activations, and refuse data that can be read only once, because
            those cannot be resumed.
        engine, workers: ``"ray"`` distributes the shards over that many actors, each with a copy of the model.
        on_error: ``"skip"`` leaves out, and lists, the samples that cannot be read or that the model raises on.
        memory_bytes: How large the rows may be that each worker holds before they are on disk.
        stop: End each forward pass once all sites have been called.
        commit_seconds: How often to commit. A kill loses at most this much work.
        batch_to_inputs: Turns a batch into what the model takes, such as ``lambda batch: batch["image"]``.
        progress: True prints an estimate and shows a bar in a terminal, False does neither; or a function (what, done,
            total).

    >>> import tempfile
    >>> from torchhook import harvest
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    >>> folder = tempfile.TemporaryDirectory()
    >>> acts = harvest(model, torch.rand(100, 3), "1", folder.name, progress=False)
    >>> len(acts), acts["1"].shape, acts["1"].dtype
    (100, (100, 2), torch.float16)
    >>> acts["1"][[3, 99]].shape
    torch.Size([2, 2])
    >>> folder.cleanup()
    """
    require_locks()
    require_module(model)
    if not queries_of(sites):
        raise SelectionError("sites is empty: name at least one module of the model")
    _require_options(
        rows=rows,
        engine=engine,
        workers=workers,
        on_error=on_error,
        shard_bytes=shard_bytes,
        memory_bytes=memory_bytes,
        commit_seconds=commit_seconds,
    )
    where, out, keep = out, Path(out).absolute(), (keep,) if isinstance(keep, str) else tuple(keep)
    wanted = Wanted(sites, transform, _dtype(dtype), rows, keep, stop)
    source = source_of(data, batch_size, model, wanted.keep, batch_to_inputs)
    if resume and not source.repeats:
        raise HarvestError(f"data cannot be read twice, but resume=True may need that: {source.why_not}")
    before = _manifest_in(out, resume)
    skips = on_error == "skip"
    reading = source.read(skip=skips)
    first = probe(model, wanted, reading, skips, memory_bytes)
    read_here = engine == "ray" and not source.indexed  # then Ray's object store holds the inputs of whole shards
    size = max(first.nbytes, first.input_bytes) if read_here else first.nbytes
    manifest = _manifest_of(model, source, wanted, first, on_error, max(1, round(shard_bytes / max(size, 1))))
    if before is not None:
        before.require_same(manifest, out)
        manifest = before
    job = Job(out, manifest, wanted, memory_bytes, commit_seconds)
    expected = estimate(first, _left(job, source, first), out, workers or 1)
    if before is None:
        manifest.write(out)
    if progress is True:
        print(f"harvesting {_count(len(manifest.sites), 'site')} into {where}: {expected}", file=sys.stderr)
    fresh = not store_files.shard_numbers(out)
    ahead = chain(first.reads, reading) if fresh else None  # does not read the first batches a second time
    with closing(reading), Meter(expected.samples, progress) as meter:
        if engine == "ray":
            from torchhook.activations import on_ray

            on_ray.fill(job, model, source, ahead, workers, meter.add)
        else:
            _fill(job, model, source, ahead, meter.add)
    finish(out, manifest, source.batches)
    acts = Activations.open(out)
    _warn_about(acts)
    return acts


def _manifest_of(
    model: nn.Module, source: Source, wanted: Wanted, first: Probe, on_error: str, batches_per_shard: int
) -> Manifest:
    """The manifest of the store to be written."""
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
        torchhook=sys.modules["torchhook"].__version__,  # the package, which its own modules do not import
    )


def _fill(job: Job, model: nn.Module, source: Source, ahead: Iterator[ReadBatch] | None, on_written: OnWritten) -> None:
    """Harvest all missing batches in this process; `ahead` has all batches if the store is still empty."""
    for gap in joined_gaps(gaps(job.out, job.manifest, source.batches)):
        work(job, model, ahead if ahead is not None else read_gap(source, gap, job.skips), on_written)


def _left(job: Job, source: Source, first: Probe) -> int | None:
    """How many samples are left; about how many if only the number of batches is known, None if neither is."""
    samples = source.samples
    if samples is None and source.batches is not None:
        samples = source.batches * first.batch_size
    commits = [commit_of(job.out, job.manifest, shard) for shard in store_files.shard_numbers(job.out)]
    return None if samples is None else max(0, samples - sum(one.samples + len(one.skipped) for one in commits))


def _manifest_in(out: Path, resume: bool) -> Manifest | None:
    """The manifest in `out`, or None for a new folder; raises if `out` has files that are not of a store."""
    if file := next((path for path in (out, *out.parents) if path.is_file()), None):
        raise HarvestError(f"out must be a folder, but {str(file)!r} is a file")
    if not out.exists():
        return None
    if (out / store_files.MANIFEST).exists():
        if not resume:
            raise HarvestError(f"{str(out)!r} already has activations; pass another folder as out, or resume=True")
        return Manifest.read(out)
    if any(path.name != f"{store_files.MANIFEST}.draft" for path in out.iterdir()):
        raise HarvestError(f"{str(out)!r} has other files in it; pass a new or empty folder as out")
    return None


def _warn_about(acts: Activations) -> None:
    """Warn about overflow, nonfinite values and skipped samples."""
    for name in acts:
        column = acts[name]
        if column.overflow:
            warn(
                f"{column.overflow:,} values of {name!r} are too large for {column.dtype} and were stored as infinity;"
                " pass dtype='bfloat16' or 'float32'"
            )
        if column.statistics.nonfinite:
            warn(f"the output of {name!r} has {column.statistics.nonfinite:,} NaN or infinite values; they were stored")
    if acts.skipped:
        sample, reason = next(iter(acts.skipped.items()))
        warn(f"skipped {_count(len(acts.skipped), 'sample')}; the first is {sample}: {reason} (.skipped lists all)")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in _DTYPES:
        names = ", ".join(repr(str(one).removeprefix("torch.")) for one in _DTYPES)
        raise ValueError(f"dtype must be one of {names}, or None for the model's own, not {dtype!r}")
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
    for name in ("shard_bytes", "memory_bytes"):
        require_count(given[name], name)
    if not isinstance(given["commit_seconds"], (int, float)) or not given["commit_seconds"] >= 0:
        raise ValueError(f"commit_seconds must be a number of seconds, 0 or more, not {given['commit_seconds']!r}")
    if given["workers"] is not None:
        require_count(given["workers"], "workers")
        if given["engine"] == "local":
            raise ValueError("workers= needs engine='ray'; the local engine has one worker")


class Meter:
    """The progress of a harvest: a bar in a terminal, with samples, rows, bytes and rates; silent elsewhere.

    >>> with Meter(100, progress=False) as meter:
    ...     meter.add(Amount(samples=32, rows=32, nbytes=4096))
    """

    def __init__(self, total: int | None, progress: Progress) -> None:
        self._done = Amount()
        self._total = total
        self._progress = progress
        self._start = time.monotonic()
        self._open = ExitStack()
        self._tell: Tell | None = None

    def __enter__(self) -> Meter:
        self._tell = self._open.enter_context(progress_bar("samples", self._progress))
        return self

    def add(self, amount: Amount) -> None:
        """Count what was just written."""
        self._done = done = self._done.plus(amount)
        if self._tell is not None:
            note = f"{done.rows:,} rows  {in_units(done.nbytes)}"
            if get_terminal_size().columns >= _WIDE:
                seconds = max(time.monotonic() - self._start, 1e-9)
                note += f"  {done.rows / seconds:,.0f} rows/s  {in_units(done.nbytes / seconds)}/s"
            self._tell("samples", done.samples, self._total, note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
