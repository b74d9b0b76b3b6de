"""What a monitor sees, in Weights & Biases: curves and histograms by layer, maps as images, the report as a page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchhook.core.findings import Finding, Report
from torchhook.core.optional import require
from torchhook.integrations.common import Layers, files, tell
from torchhook.render.words import named, printable, short
from torchhook.stats.histogram import Bins
from torchhook.training.logs import Entry, Log

BINS = 64  # as many as W&B makes of values


class WandB(Log):
    """Writes into the `run`, or the active one, and never finishes it.

        with wandb.init(project="digits") as run:
            ...                       # a monitor with WandB() here writes into this run

    Keys are ``torchhook/<statistic>/<layer>``, over ``torchhook/step``; `layers` are globs of the paths of modules and
    parameters, and of more than 200 that match it is some; none means the numbers of the whole model alone. In keys
    the dots of paths are colons: to W&B a dot is a level, and keys with dots lose their x-axis.

    Your own rows and steps stay what they are without it: numbers are added to the row that your next ``log`` writes.
    So a row has the latest measured step; where several fall between two rows of yours, the others are lost, which is
    told once. ``commit=True`` writes rows of its own instead: for a run that nothing else is logged to.
    """

    def __init__(self, run: Any = None, layers: str | Iterable[str] = "*", commit: bool = False) -> None:
        self._library = require("wandb", "wandb", "WandB")
        self._run = run
        self._layers = Layers(layers)
        self._commit = commit
        self._row: int | None = None  # to which was written last
        self._is_told = False

    def begin(self, about: Mapping[str, Any]) -> None:
        self._run = self._library.run if self._run is None else self._run
        if self._run is None:  # to begin one would ask for a login, and be found by all that looks for the active run
            raise RuntimeError("WandB() writes into the active run, and there is none: call wandb.init() first")
        self._run.define_metric("torchhook/step", hidden=True, summary="none")
        # Summaries are of a few numbers: W&B drops them when they are too large.
        self._run.define_metric("torchhook/*", step_metric="torchhook/step", summary="none")

    def write(self, entry: Entry) -> None:
        row: dict[str, Any] = {"torchhook/step": entry.step}
        for name, value in self._layers.scalars(entry).items():
            row[_key(name)] = value
        for name, _, bins in self._layers.histograms(entry):
            row[_key(name)] = self._library.Histogram(np_histogram=_even(bins))
        for name, grey in self._layers.pictures(entry):
            row[_key(name)] = self._library.Image(grey.numpy())
        self._mind_rows()
        self._run.log(row, commit=self._commit)

    def found(self, finding: Finding) -> None:
        if finding.severity == "error":  # alerts may be mails: for what is broken alone
            text = html.escape(printable(f"{finding}\n{finding.hint}"), quote=False)
            self._run.alert(short(named(finding), 63), text, level="ERROR")

    def end(self, report: Report, state: str) -> None:
        columns = ["severity", "code", "site", "step", "message", "hint"]
        rows = [[printable(str(getattr(found, name))) for name in columns] for found in report.findings]
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

    def _mind_rows(self) -> None:
        """Say once that rows are written over."""
        if self._commit or self._is_told or self._run.disabled:
            return
        before = self._row
        try:
            self._row = self._run.step
        except Exception:  # a run that several processes share has no steps
            return
        if before == self._row:
            self._is_told = True
            tell(
                "several measured steps fell into one row of the W&B run, in which the latest stays: the run logs too"
                " seldom, or steps are very short; measure less often, or give WandB(run, commit=True) its own run"
            )


def _key(name: str) -> str:
    return name.replace(".", ":")


def _even(bins: Bins) -> tuple[list[float], list[float]]:
    """Counts and edges of bins of equal width: W&B draws how many, not how dense."""
    edges = torch.linspace(float(bins.edges[0]), float(bins.edges[-1]), BINS + 1, dtype=torch.float64)
    number = torch.searchsorted(bins.edges, edges, right=True).clamp(1, len(bins.counts)) - 1
    low, high = bins.edges[number], bins.edges[number + 1]
    inside = ((edges - low) / (high - low)).clamp(0, 1)
    before = bins.counts.cumsum(0)[number] - bins.counts[number]
    return (before + inside * bins.counts[number]).diff().tolist(), edges.tolist()
