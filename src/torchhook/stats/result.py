"""`Stats`, which `measure` returns: statistics that grow while the model runs, and can be read at any time."""

from __future__ import annotations

import html
import weakref
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any

from torchhook.core.errors import SessionError
from torchhook.core.lifetime import Attaching
from torchhook.core.session import Session
from torchhook.core.text import warn
from torchhook.stats.optimizer.steps import Steps
from torchhook.stats.reading import Place, Reading, Snapshot
from torchhook.stats.reduce import Reduce


class Stats(Attaching, Mapping[Any, Reading]):
    """Statistics of some places of a model; see `torchhook.measure`."""

    def __init__(self, session: Session, reduce: Reduce, steps: Steps | None) -> None:
        self._session = session
        self._reduce = reduce
        self._steps = steps
        self._final: Snapshot | None = None

    def open(self) -> Stats:
        """Begin to measure. (``with`` does this.)"""
        self._session.open()
        if self._steps is not None:
            try:
                self._steps.attach(self._session)
            except BaseException:
                self._steps.detach()
                self._session.abandon()
                raise
            weakref.finalize(self, self._steps.detach).atexit = False  # if it is never closed
        return self

    def close(self) -> None:
        """Remove the hooks; what was measured stays. (The end of the ``with`` block does this.)"""
        self._leave_optimizer()
        self._session.close()
        if self._steps is not None and not self.step and self._session.on_silent != "ignore":
            warn("the optimizer made no step while it was measured: all passes count as one step without updates")

    def abandon(self) -> None:
        self._leave_optimizer()
        self._session.abandon()

    @property
    def step(self) -> int:
        """The number of the current step, from 0: a step of the optimizer if there is one, else a pass."""
        return max(self._reduce.clock.step, 0)

    @property
    def silent(self) -> dict[str, str]:
        """The sites where nothing was seen, by path, with the likely reason; known once it is closed."""
        return {site.path: reason for site, reason in reversed(self._session.silent.items())}

    def snapshot(self) -> Snapshot:
        """What was measured since the beginning or the last `reset`, as plain data that no longer changes.

        This does not wait for the device; reading the snapshot does.

        >>> import torch
        >>> from torch import nn
        >>> from torchhook import measure
        >>> model, windows = nn.Sequential(nn.ReLU()), []
        >>> with measure(model) as stats:
        ...     for value in (1.0, 2.0):
        ...         _ = model(torch.tensor([value]))
        ...         windows.append(stats.snapshot())
        ...         stats.reset()
        >>> [window["0"].mean for window in windows]
        [1.0, 2.0]
        """
        if self._session.state == "new":
            raise SessionError("nothing is measured yet: use the result of measure() in a with block, or call open()")
        if self._final is None:
            snapshot = self._reduce.snapshot()
            snapshot.aliases = self._session.aliases
            snapshot.asked = frozenset(tap.port for tap in self._session.taps)
            if self._session.state != "closed":
                return snapshot
            self._final = snapshot
        return self._final

    def reset(self) -> None:
        """Forget what was measured so far, and continue."""
        self._final = None
        self._reduce.reset()

    def table(self, kind: str | None = None) -> Any:
        """One row per place, in execution order: a DataFrame of pandas or polars if installed, else a list of dicts.

        `kind` may be ``"pandas"``, ``"polars"`` or ``"list"``.
        """
        return self.snapshot().table(kind)

    def __getitem__(self, place: str | Place) -> Reading:
        return self.snapshot()[place]

    def __iter__(self) -> Iterator[Place]:
        return iter(self.snapshot())

    def __len__(self) -> int:
        return 0 if self._session.state == "new" else len(self.snapshot())

    def items(self) -> ItemsView[Any, Reading]:
        """Places and readings, all of one moment."""
        return self.snapshot().items()

    def values(self) -> ValuesView[Reading]:
        """Readings, all of one moment."""
        return self.snapshot().values()

    def __repr__(self) -> str:
        said = ": not open yet" if self._session.state == "new" else f"\n{self.snapshot()!r}"
        return f"Stats of {type(self._session.model).__name__}{said}"

    def _repr_html_(self) -> str:
        return html.escape(repr(self)) if self._session.state == "new" else self.snapshot()._repr_html_()

    def _leave_optimizer(self) -> None:
        if self._steps is not None:
            self._steps.detach()
