"""Logs a monitored training to TensorBoard: curves and histograms by layer, feature maps, findings as text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torchhook.core.findings import Finding, Report
from torchhook.core.optional import require
from torchhook.integrations.common import Layers, metric_name, pictures_of
from torchhook.render.to_markdown import escaped, markdown
from torchhook.stats.histogram import Bins
from torchhook.stats.moments import Moments
from torchhook.stats.reading import Reading
from torchhook.training.logs import Entry, Log

_FOLDS = re.compile("</?(details|summary)>")


class TensorBoard(Log):
    """Logs to a folder, or with your own ``SummaryWriter``, which it does not close.

        TensorBoard("runs/first")
        TensorBoard(writer, layers=["encoder.*", "head"])   # layers=() logs only the statistics of the whole model

    Tags are named ``torchhook/<statistic>/<layer>``. `layers` are globs of module and parameter paths; if more than 200
    match, some are left out. The tab *Custom Scalars* shows the gradients of all layers in one chart. A writer has only
    one such layout, so add ours to your own writer: ``writer.add_custom_scalars({**TensorBoard.LAYOUT, ...})``.
    """

    LAYOUT: ClassVar[dict[str, dict[str, list[Any]]]] = {
        "torchhook": {
            "gradient flow": ["Multiline", ["torchhook/grad_norm/.*"]],
            "update ratio": ["Multiline", ["torchhook/update_ratio/.*"]],
            "activation std": ["Multiline", ["torchhook/std/.*"]],
        }
    }

    def __init__(self, target: Any, layers: str | Iterable[str] = "*") -> None:
        require("tensorboard", "tensorboard", "TensorBoard")  # which torch.utils.tensorboard imports
        self._library = require("torch.utils.tensorboard", "tensorboard", "TensorBoard")
        self._is_own = isinstance(target, (str, os.PathLike))
        if not (self._is_own or hasattr(target, "add_histogram_raw")):
            raise TypeError(f"target must be a folder or a SummaryWriter, not {target!r:.80}")
        self._target = target
        self._layers = Layers(layers)
        self._writer: Any = None
        self._step = 0

    def begin(self, about: Mapping[str, Any]) -> None:
        self._open()
        if self._is_own:
            self._writer.add_custom_scalars(self.LAYOUT)

    def feature_maps(self, acts: Any, step: int = 0) -> None:
        """Log feature maps as images, with or without a training: those of the channels, and of their mean.

        `acts` is what `torchhook.plot.feature_maps` takes: a capture, one layer of it, or a dict of names and tensors.
        The tags are ``torchhook/maps/<layer>`` and ``torchhook/mean_map/<layer>``.
        """
        self._open()
        for name, grey in pictures_of(acts).items():
            self._writer.add_image(name, grey, step, dataformats="HW")
        self._writer.flush()

    def write(self, entry: Entry) -> None:
        self._step = entry.step
        when = {"global_step": entry.step, "walltime": entry.time}
        for step, loss in entry.losses.items():
            self._writer.add_scalar("torchhook/loss", loss, step, entry.time)
        for name, value in self._layers.scalars(entry).items():
            if name != "torchhook/loss":
                self._writer.add_scalar(name, value, **when)
        for name, reading, bins in self._layers.histograms(entry):
            self._writer.add_histogram_raw(name, **_raw(reading, bins), **when)
        for name, grey in self._layers.pictures(entry):
            self._writer.add_image(name, grey, **when, dataformats="HW")

    def found(self, finding: Finding) -> None:
        # One tag per code: TensorBoard shows only ten texts of a tag.
        text = "\n\n".join([f"**{escaped(str(finding))}**", *map(escaped, finding.advice)])
        step = self._step if finding.step is None else finding.step
        self._writer.add_text(metric_name("findings", finding.code), text, step)
        self._writer.flush()

    def end(self, report: Report, state: str) -> None:
        text = _FOLDS.sub("", markdown(report))  # TensorBoard would show these tags as text
        self._writer.add_text("torchhook/report", f"{text}\n\nTraining {state}.", self._step)
        self._writer.flush()
        if self._is_own:
            self._writer.close()
            self._writer = None

    def _open(self) -> None:
        if self._writer is None:
            self._writer = self._library.SummaryWriter(str(self._target)) if self._is_own else self._target


def _raw(reading: Reading, bins: Bins) -> dict[str, Any]:
    """A histogram in TensorBoard's format: upper edges and counts, with runs of empty bins merged into one."""
    edges, counts = bins
    is_full = counts > 0
    kept = is_full | is_full.roll(-1)  # the first and the last are full
    raw: dict[str, Any] = {"bucket_limits": edges[1:][kept].tolist(), "bucket_counts": counts[kept].tolist()}
    if Moments.name in list(reading):
        moments = reading[Moments.name]
        total, squares = moments.mean * (moments.count - moments.nonfinite), moments.l2**2
        low, high = moments.min, moments.max
    else:
        middles = (edges[1:] + edges[:-1]) / 2
        total, squares = float((middles * counts).sum()), float((middles**2 * counts).sum())
        low, high = edges[0].item(), edges[-1].item()
    return raw | {"min": low, "max": high, "num": int(counts.sum()), "sum": total, "sum_squares": squares}
