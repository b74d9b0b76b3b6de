"""Logs a monitored training to Weights & Biases: curves and histograms by layer, feature maps, the report."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchhook.core.findings import Finding, Report
from torchhook.core.optional import require
from torchhook.integrations.common import Layers, files, pictures_of, warn_in_thread
from torchhook.render.words import finding_title, printable, short
from torchhook.stats.histogram import Bins
from torchhook.training.logs import Entry, Log

BINS = 64  # as many as W&B uses itself


class WandB(Log):
    """Logs to `run` or to the active run, which it does not finish.

        with wandb.init(project="digits") as run:
            ...                       # a monitor with WandB() logs to this run

    Keys are named ``torchhook/<statistic>/<layer>``, with ``torchhook/step`` as their x-axis. `layers` are globs of
    module and parameter paths; if more than 200 match, some are left out; ``()`` logs only the statistics of the whole
    model. In keys, the dots of paths become colons: W&B treats a dot as nesting, and keys with dots lose their x-axis.

    Your own rows and steps do not change: statistics are added to the row that your next ``log`` writes. If several
    measured steps fall between two of your rows, only the latest is kept, and a warning says so once. Pass
    ``commit=True`` to write separate rows instead, for a run that nothing else logs to.
    """

    def __init__(self, run: Any = None, layers: str | Iterable[str] = "*", commit: bool = False) -> None:
        self._library = require("wandb", "wandb", "WandB")
        self._run = run
        self._layers = Layers(layers)
        self._commit = commit
        self._row: int | None = None  # that was written to last
        self._has_warned = False

    def begin(self, about: Mapping[str, Any]) -> None:
        self._find_run()

    def feature_maps(self, acts: Any, step: int = 0) -> None:
        """Log feature maps as images, with or without a training: those of the channels, and of their mean.

        `acts` is what `torchhook.plot.feature_maps` takes: a capture, one layer of it, or a dict of names and tensors.
        The keys are ``torchhook/maps/<layer>`` and ``torchhook/mean_map/<layer>``.
        """
        self._find_run()
        images = {_key(name): self._library.Image(grey.numpy()) for name, grey in pictures_of(acts).items()}
        self._run.log({"torchhook/step": step, **images}, commit=self._commit)

    def _find_run(self) -> None:
        self._run = self._library.run if self._run is None else self._run
        if self._run is None:  # starting one might ask for a login, and would become the active run for everything else
            raise RuntimeError("WandB() logs to the active run, but there is none: call wandb.init() first")
        self._run.define_metric("torchhook/step", hidden=True, summary="none")
        # No summaries: W&B drops them when they are too large.
        self._run.define_metric("torchhook/*", step_metric="torchhook/step", summary="none")

    def write(self, entry: Entry) -> None:
        row: dict[str, Any] = {"torchhook/step": entry.step}
        for name, value in self._layers.scalars(entry).items():
            row[_key(name)] = value
        for name, _, bins in self._layers.histograms(entry):
            row[_key(name)] = self._library.Histogram(np_histogram=_even(bins))
        for name, grey in self._layers.pictures(entry):
            row[_key(name)] = self._library.Image(grey.numpy())
        self._warn_of_lost_rows()
        self._run.log(row, commit=self._commit)

    def found(self, finding: Finding) -> None:
        if finding.severity == "error":  # alerts may be sent by mail, so only for errors
            text = html.escape(printable("\n".join([str(finding), *finding.advice])), quote=False)
            self._run.alert(short(finding_title(finding), 63), text, level="ERROR")

    def end(self, report: Report, state: str) -> None:
        columns = ["severity", "code", "site", "step", "message", "hint", "tried"]
        rows = [[_cell(getattr(found, name)) for name in columns] for found in report.findings]
        shown: dict[str, Any] = {"torchhook_findings": self._library.Table(columns=columns, data=rows)}
        texts = files(report)
        if "report.html" in texts:
            shown["torchhook_report"] = self._library.Html(texts["report.html"], inject=False)
        self._run.log(shown, commit=self._commit)
        self._run.summary["torchhook"] = {"report": printable(report.headline), "state": state}
        artifact = self._library.Artifact(f"torchhook-{self._run.id}", type="report")
        for name, text in texts.items():
            with artifact.new_file(name, encoding="utf-8") as file:
                file.write(text)
        self._run.log_artifact(artifact)

    def _warn_of_lost_rows(self) -> None:
        """Warn once if a measured step overwrites another in the same row."""
        if self._commit or self._has_warned or self._run.disabled:
            return
        before = self._row
        try:
            self._row = self._run.step
        except Exception:  # a run that several processes share has no step
            return
        if before == self._row:
            self._has_warned = True
            warn_in_thread(
                "several measured steps fell into one row of the W&B run, and only the latest was kept: measure less"
                " often, log more often, or give WandB(run, commit=True) a run of its own"
            )


def _key(name: str) -> str:
    return name.replace(".", ":")


def _cell(value: Any) -> str:
    return "" if value is None else printable(str(value))


def _even(bins: Bins) -> tuple[list[float], list[float]]:
    """Counts and edges of bins of equal width: W&B draws counts, not densities."""
    edges = torch.linspace(float(bins.edges[0]), float(bins.edges[-1]), BINS + 1, dtype=torch.float64)
    number = torch.searchsorted(bins.edges, edges, right=True).clamp(1, len(bins.counts)) - 1
    low, high = bins.edges[number], bins.edges[number + 1]
    inside = ((edges - low) / (high - low)).clamp(0, 1)
    before = bins.counts.cumsum(0)[number] - bins.counts[number]
    return (before + inside * bins.counts[number]).diff().tolist(), edges.tolist()
