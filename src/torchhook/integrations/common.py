"""What the logs for other tools share: which layers they tell of and by what names, and what they show as files."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase

from torch import Tensor

from torchhook import render
from torchhook.core.findings import Report
from torchhook.core.text import warn
from torchhook.stats.histogram import Bins, Histogram
from torchhook.stats.reading import Reading
from torchhook.training.logs import Entry
from torchhook.training.runs.images import picture

MOST = 200  # places: about 700 numbers, and a few histograms of each
LONGEST = 200  # bytes of a place in a name: MLflow takes 250 letters in all, file systems 255 bytes

_ILLEGAL = re.compile(r"[^\w\- .]")  # to MLflow, the strictest; slashes and colons it takes, but those are ours


def named(what: str, site: str) -> str:
    """The name of a number of a place, the same in every tool.

    >>> named("grad_norm", "layer1.0.weight")
    'torchhook/grad_norm/layer1.0.weight'
    """
    return f"torchhook/{legal(what)}/{legal(site)}"


def legal(name: str) -> str:
    """A name that every tool takes. Names that differ stay apart: one that was changed ends in a digest of what it was.

    >>> legal("layer1.0"), legal("blocks[0]"), legal("blocks(0)")
    ('layer1.0', 'blocks_0_-90f97bec', 'blocks_0_-1b120d65')
    """
    whole = name.encode(errors="surrogatepass")
    taken = _ILLEGAL.sub("_", name).strip(" .") or "root"
    if taken == name and len(whole) <= LONGEST:
        return name
    return f"{taken.encode()[:LONGEST].decode(errors='ignore')}-{hashlib.sha256(whole).hexdigest()[:8]}"


def tell(message: str) -> None:
    """Warn, from a thread in which nobody would catch a warning that is an error."""
    with suppress(UserWarning):
        warn(message)


class Layers:
    """The layers that a log tells of: those whose path matches one of `globs`, in which ``*`` crosses dots.

    Thousands of curves bury those that people look at. Of more than 200 places it is every second, fourth, … in the
    order of execution, so that the depth of the model is still seen; a narrower glob has all that it names.

    >>> from torchhook.stats.reading import Snapshot
    >>> Layers("*.weight").scalars(Entry(0, 0.0, Snapshot({}), rate=0.1))
    {'torchhook/learning_rate': 0.1}
    """

    def __init__(self, globs: str | Iterable[str]) -> None:
        self.globs = (globs,) if isinstance(globs, str) else tuple(globs)
        if not all(isinstance(glob, str) for glob in self.globs):
            raise TypeError(f"layers must be globs of paths, such as 'encoder.*', not {globs!r:.80}")
        self._numbers: dict[str, int] = {}  # of all places that match, in the order in which they were first seen
        self._is_told = False

    def scalars(self, entry: Entry) -> dict[str, float]:
        """The numbers of the whole model and of these layers, by name."""
        kept = self._kept(entry)
        places = {name: name.partition("/") for name in entry.scalars}
        return {
            named(what, site) if slash else f"torchhook/{what}": entry.scalars[name]
            for name, (what, slash, site) in places.items()
            if not slash or site in kept
        }

    def histograms(self, entry: Entry) -> Iterator[tuple[str, Reading, Bins]]:
        """The histograms of these layers, by name, where there is a finite value to show."""
        kept = self._kept(entry)
        for site, port in entry.snapshot:
            reading = entry.snapshot[site, port]
            if site in kept and Histogram.name in list(reading) and len((bins := reading.histogram()).counts):
                yield named(port, site), reading, bins

    def pictures(self, entry: Entry) -> Iterator[tuple[str, Tensor]]:
        """The maps of these layers as pictures, by name."""
        for site, maps in entry.maps.items():
            if self._matches(site) and maps.numel():
                yield named("maps", site), picture(maps)

    def _kept(self, entry: Entry) -> set[str]:
        """The places of an entry that are told of: once left out, always left out."""
        places = [site for site in dict.fromkeys(site for site, _ in entry.snapshot) if self._matches(site)]
        for site in places:
            self._numbers.setdefault(site, len(self._numbers))
        every = 2 ** max(0, math.ceil(math.log2(len(self._numbers) / MOST))) if places else 1
        if every > 1:
            self._tell(f"of {len(places)} places one in {every} is logged; layers= takes globs of those that matter")
        elif self.globs and len(entry.snapshot) and not self._numbers:
            self._tell(f"no place matches layers={self.globs}, but there is {next(iter(entry.snapshot))[0]!r}")
        return {site for site in places if self._numbers[site] % every == 0}

    def _matches(self, site: str) -> bool:
        return any(fnmatchcase(site, glob) for glob in self.globs)

    def _tell(self, message: str) -> None:
        if not self._is_told:
            self._is_told = True
            tell(message)


def files(report: Report) -> dict[str, str]:
    """A report as texts by the names of files; the page for people is among them if plotly is there.

    >>> list(files(Report(model="Net")))
    ['report.json', 'report.md', 'report.html']
    """
    texts = {"report.json": render.json(report), "report.md": render.markdown(report)}
    with suppress(ImportError):
        texts["report.html"] = render.html(report)
    return {name: text.encode(errors="replace").decode() for name, text in texts.items()}
