"""A run as a Parquet or CSV file: one long table, for pandas, polars, DuckDB, spreadsheets and the like."""

from __future__ import annotations

import csv
import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from torchhook.core.optional import require
from torchhook.stats.reading import Place, Row
from torchhook.training.runs.fields import WIDTH, field_of
from torchhook.training.runs.groups import Group
from torchhook.training.runs.run import Run

NUMBERS = ("mean", "std", "min", "max", "l2", "abs_mean", "zero_fraction")
COUNTS = ("count", "nonfinite")
_NAMES = ("path", "port", "module")
_AT_STEP = ("loss", "rate")


def export_parquet(run: Run, file: str | os.PathLike[str]) -> int:
    """Write the moments of all places and steps, with losses and learning rates, to a file; returns the row count.

        export_parquet(Run("runs/latest"), "run.parquet")
        pandas.read_parquet("run.parquet").pivot_table("std", "step", "path")

    A few hundred steps are in memory at a time. Where there were no finite values, numbers are NaN; where the loss or
    the learning rate of a step is unknown, it is null.
    """
    parquet = _pyarrow("pyarrow.parquet")
    rows = 0
    losses, rates, known = run.losses, run.rates, run.places
    with _draft(Path(file)) as draft, draft.open("wb") as out, parquet.ParquetWriter(out, _schema()) as writer:
        for group in _groups(run):
            table = _table(group, known, losses, rates)
            writer.write_table(table)
            rows += table.num_rows
    return rows


def export_csv(run: Run, file: str | os.PathLike[str]) -> int:
    """The same table as CSV, which needs no other library; what is null there is empty here. ``-`` is standard output.

    Spreadsheets run a text that begins like a formula, so an apostrophe is put before such a name.
    """
    rows = 0
    losses, rates, known = run.losses, run.rates, run.places
    with _opened(file) as out:
        writer = csv.writer(out)
        writer.writerow(["step", *_NAMES, *COUNTS, *NUMBERS, *_AT_STEP])
        for group in _groups(run):
            counts = [field_of(group.states, name).nan_to_num().long().tolist() for name in COUNTS]
            numbers = [field_of(group.states, name).tolist() for name in NUMBERS]
            for at, step in enumerate(group.steps):
                for number, place in enumerate(group.places):
                    values = [values[at][number] for values in (*counts, *numbers)]
                    names = map(_no_formula, (*place, known[place].label))
                    writer.writerow([step, *names, *values, losses.get(step), rates.get(step)])
                    rows += 1
    return rows


@contextmanager
def _opened(file: str | os.PathLike[str]) -> Iterator[TextIO]:
    if os.fspath(file) == "-":
        yield sys.stdout
        return
    with _draft(Path(file)) as draft, draft.open("w", newline="", encoding="utf-8") as out:
        yield out


def _no_formula(name: str) -> str:
    """A name that no spreadsheet runs.

    >>> _no_formula("fc"), _no_formula("=HYPERLINK(0)")
    ('fc', "'=HYPERLINK(0)")
    """
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name


def _groups(run: Run) -> Iterator[Group]:
    """The moments, some steps at a time."""
    return (group for group in run.blocks() if group.states.shape[2:] == (WIDTH,))


@contextmanager
def _draft(file: Path) -> Iterator[Path]:
    """Another name to write to, which becomes that of the file once all is written; a device or a pipe is written to
    at once, and what a link leads to is replaced rather than the link.
    """
    if file.exists() and not file.is_file():
        yield file
        return
    file = file.resolve()
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def _table(group: Group, known: Mapping[Place, Row], losses: Mapping[int, float], rates: Mapping[int, float]) -> Any:
    """One row per place and step: all places of the first step, then those of the next."""
    arrow = _pyarrow("pyarrow")
    steps, places = len(group.steps), len(group.places)
    labels = [known[place].label for place in group.places]
    names = *zip(*group.places, strict=True), labels
    of_place = arrow.array(list(range(places)) * steps, arrow.int32())
    columns = {"step": _column(torch.tensor(group.steps).repeat_interleave(places), arrow.int64())}
    for name, values in zip(_NAMES, names, strict=True):
        columns[name] = arrow.DictionaryArray.from_arrays(of_place, arrow.array(values, arrow.string()))
    for name in COUNTS:
        columns[name] = _column(field_of(group.states, name).nan_to_num().long().reshape(-1), arrow.int64())
    for name in NUMBERS:
        columns[name] = _column(field_of(group.states, name).reshape(-1), arrow.float64())
    for name, by_step in zip(_AT_STEP, (losses, rates), strict=True):
        values = [by_step.get(step) for step in group.steps for _ in range(places)]
        columns[name] = arrow.array(values, arrow.float64())
    return arrow.table(columns, _schema())


def _schema() -> Any:
    arrow = _pyarrow("pyarrow")
    name = arrow.dictionary(arrow.int32(), arrow.string())
    return arrow.schema(
        [
            ("step", arrow.int64()),
            *((column, name) for column in _NAMES),
            *((column, arrow.int64()) for column in COUNTS),
            *((column, arrow.float64()) for column in (*NUMBERS, *_AT_STEP)),
        ]
    )


def _column(values: Tensor, kind: Any) -> Any:
    """A tensor as a column, without numpy."""
    arrow, values = _pyarrow("pyarrow"), values.contiguous()
    data = ctypes.string_at(values.data_ptr(), values.nbytes)
    return arrow.Array.from_buffers(kind, len(values), [None, arrow.py_buffer(data)])


def _pyarrow(module: str) -> Any:
    return require(module, "parquet", "exporting a run")
