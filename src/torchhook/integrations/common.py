"""What the logs for other tools share: which layers they log, under which names, pictures, and the report as files."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from torchhook import render
from torchhook.captures.pictures import picture, views
from torchhook.core.findings import Report
from torchhook.core.text import warn
from torchhook.plot.given import first_sample, maps_of
from torchhook.stats.histogram import Bins, Histogram
from torchhook.stats.reading import Reading
from torchhook.training.logs import Entry

MOST = 200  # sites: about 700 numbers and a few histograms each
LONGEST = 200  # bytes of a site in a name: MLflow takes 250 characters in all, file systems 255 bytes

_ILLEGAL = re.compile(r"[^\w\- .]")  # in MLflow, the strictest; it allows slashes and colons, but we use those


def metric_name(what: str, site: str) -> str:
    """The name of a statistic of a site, the same in every tool.

    >>> metric_name("grad_norm", "layer1.0.weight")
    'torchhook/grad_norm/layer1.0.weight'
    """
    return f"torchhook/{legal(what)}/{legal(site)}"


def legal(name: str, longest: int = LONGEST) -> str:
    """A name that every tool accepts. A name that had to be changed ends in a digest, so that it stays unique.

    >>> legal("layer1.0"), legal("blocks[0]"), legal("blocks(0)")
    ('layer1.0', 'blocks_0_-90f97bec', 'blocks_0_-1b120d65')
    """
    whole = name.encode(errors="surrogatepass")
    taken = _ILLEGAL.sub("_", name).strip(" .") or "root"
    if taken == name and len(whole) <= longest:
        return name
    return f"{taken.encode()[:longest].decode(errors='ignore')}-{hashlib.sha256(whole).hexdigest()[:8]}"


def pictures_of(acts: Any) -> dict[str, Tensor]:
    """Greyscale pictures of the feature maps of some layers by name: of the channels, and of their mean.

    >>> import torch
    >>> list(pictures_of({"conv1": torch.rand(2, 3, 8, 8)}))
    ['torchhook/maps/conv1', 'torchhook/mean_map/conv1']
    """
    return {
        metric_name(what, layer.path): grey
        for layer in maps_of(acts, "acts")
        for what, grey in views(first_sample(layer, "acts")).items()
    }


def warn_in_thread(message: str) -> None:
    """Warn from a background thread, where a warning that was turned into an error must not raise."""
    with suppress(UserWarning):
        warn(message)


class Layers:
    """The layers to log: those whose path matches one of `globs`, in which ``*`` also matches dots.

    Thousands of curves bury the ones that matter. If more than 200 sites match, every second, fourth, … is logged in
    execution order, which still covers the depth of the model. A narrower glob logs everything that it matches.

    >>> from torchhook.stats.reading import Snapshot
    >>> Layers("*.weight").scalars(Entry(0, 0.0, Snapshot({}), rate=0.1))
    {'torchhook/learning_rate': 0.1}
    """

    def __init__(self, globs: str | Iterable[str]) -> None:
        self.globs = (globs,) if isinstance(globs, str) else tuple(globs)
        if not all(isinstance(glob, str) for glob in self.globs):
            raise TypeError(f"layers must be globs of paths, such as 'encoder.*', not {globs!r:.80}")
        self._numbers: dict[str, int] = {}  # of all matching sites, in the order in which they were first seen
        self._has_warned = False

    def scalars(self, entry: Entry) -> dict[str, float]:
        """The statistics of the whole model and of these layers, by name."""
        kept = self._kept(entry)
        parts = {name: name.partition("/") for name in entry.scalars}
        return {
            metric_name(what, site) if slash else f"torchhook/{what}": entry.scalars[name]
            for name, (what, slash, site) in parts.items()
            if not slash or site in kept
        }

    def histograms(self, entry: Entry) -> Iterator[tuple[str, Reading, Bins]]:
        """The histograms of these layers that hold a finite value, by name."""
        kept = self._kept(entry)
        for site, port in entry.snapshot:
            reading = entry.snapshot[site, port]
            if site in kept and Histogram.name in list(reading) and len((bins := reading.histogram()).counts):
                yield metric_name(port, site), reading, bins

    def pictures(self, entry: Entry) -> Iterator[tuple[str, Tensor]]:
        """The feature maps of these layers as images, by name."""
        for site, maps in entry.maps.items():
            if self._matches(site) and maps.numel():
                yield metric_name("maps", site), picture(maps)

    def _kept(self, entry: Entry) -> set[str]:
        """The sites of an entry that are logged. A site that was left out once stays out."""
        matching = [site for site in dict.fromkeys(site for site, _ in entry.snapshot) if self._matches(site)]
        for site in matching:
            self._numbers.setdefault(site, len(self._numbers))
        every = 2 ** max(0, math.ceil(math.log2(len(self._numbers) / MOST))) if matching else 1
        if every > 1:
            self._warn(f"logging only one in {every} of {len(matching)} sites; choose those that matter with layers=")
        elif self.globs and len(entry.snapshot) and not self._numbers:
            self._warn(f"no site matches layers={self.globs}; there is, for example, {next(iter(entry.snapshot))[0]!r}")
        return {site for site in matching if self._numbers[site] % every == 0}

    def _matches(self, site: str) -> bool:
        return any(fnmatchcase(site, glob) for glob in self.globs)

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_in_thread(message)


def files(report: Report) -> dict[str, str]:
    """The texts of a report by file name; the HTML page needs plotly and is left out without it.

    >>> list(files(Report(model="Net")))
    ['report.json', 'report.md', 'report.html']
    """
    texts = {"report.json": render.json(report), "report.md": render.markdown(report)}
    with suppress(ImportError):
        texts["report.html"] = render.html(report)
    return {name: text.encode(errors="replace").decode() for name, text in texts.items()}
