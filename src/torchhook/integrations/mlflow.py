"""What a monitor sees, in MLflow: metrics by layer, findings as tags, the report as files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from queue import Full, Queue
from threading import Thread
from typing import Any

from torchhook.core.findings import Finding, Report
from torchhook.core.optional import require
from torchhook.integrations.common import Layers, files, legal, tell
from torchhook.render.words import short
from torchhook.training.logs import Entry, Log

_STATUS = {"ended": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_LONGEST = 1000  # letters of a tag; the limit of MLflow was once 5,000 and is 8,000
_WAITING = 16  # calls of the server
_PATIENCE = 60.0  # seconds, for it to take what is left in the end


class MLflow(Log):
    """Writes into the run `run_id`, or the active one, and never ends it; if there is none, into a run of its own.

        with mlflow.start_run():
            ...                       # a monitor with MLflow() here writes into this run

        MLflow(run_id, client=MlflowClient("http://tracking:5000"), layers="encoder.*")

    Metrics are ``torchhook/<statistic>/<layer>``; `layers` are globs of the paths of modules and parameters, and of
    more than 200 that match it is some; none means the numbers of the whole model alone. NaN is kept; infinities are
    left out, for MLflow would write 1.8e308.

    The server is called from a thread of its own, one call for each thousand metrics of a step. Trouble with it is
    told once, and the log goes on: what it did not take, or not in time, is lost.
    """

    # MLflow has a queue, too (synchronous=False), but it has no limit, and whoever ends a run shuts it down for all.

    def __init__(self, run_id: str | None = None, client: Any = None, layers: str | Iterable[str] = "*") -> None:
        self._library = require("mlflow", "mlflow", "MLflow")
        self.run_id = run_id
        self._client = client
        self._layers = Layers(layers)
        self._is_own = False
        self._codes: set[str] = set()  # that were found
        self._calls: Queue[Callable[[], object] | None] = Queue(_WAITING)
        self._thread = Thread(target=self._send, name="torchhook to MLflow", daemon=True)
        self._is_told = False

    def begin(self, about: Mapping[str, Any]) -> None:
        # The active run is known in the thread of the training alone, and is one of the default client's.
        active = self._library.active_run() if self._client is None else None
        self._client = self._library.MlflowClient() if self._client is None else self._client
        if self.run_id is None and active is not None:
            self.run_id = active.info.run_id
        if self.run_id is None:
            self._is_own = True
            self.run_id = self._client.create_run(self._experiment()).info.run_id
        self._thread.start()

    def write(self, entry: Entry) -> None:
        scalars = self._layers.scalars(entry)
        scalars.pop("torchhook/loss", None)
        told = [(name, value, entry.step) for name, value in scalars.items()]
        told += [("torchhook/loss", loss, step) for step, loss in entry.losses.items()]
        metric, when = self._library.entities.Metric, int(entry.time * 1000)
        metrics = [metric(name, value, when, step) for name, value, step in told if not math.isinf(value)]
        self._later(partial(self._client.log_batch, self.run_id, metrics=metrics, synchronous=True))

    def found(self, finding: Finding) -> None:
        if finding.code not in self._codes:  # the first is nearest to the cause, and a tag has room for one
            self._codes.add(finding.code)
            self._later(self._tagging(finding.code, str(finding)))

    def end(self, report: Report, state: str) -> None:
        last: list[Callable[[], object] | None] = [self._tagging("report", report.headline)]
        for name, text in files(report).items():
            last.append(partial(self._client.log_text, self.run_id, text, f"torchhook/{name}"))
        if self._is_own:
            last.append(partial(self._client.set_terminated, self.run_id, _STATUS[state]))
        with suppress(Full):
            for call in [*last, None]:
                self._calls.put(call, timeout=_PATIENCE)
            self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            tell(f"MLflow did not take the report within {_PATIENCE:.0f} seconds, and is left behind")

    def _tagging(self, name: str, text: str) -> Callable[[], object]:
        key, value = f"torchhook.{legal(name)}", short(text, _LONGEST)
        return partial(self._client.set_tag, self.run_id, key, value, synchronous=True)

    def _later(self, call: Callable[[], object]) -> None:
        try:
            self._calls.put_nowait(call)
        except Full:
            self._trouble("it is slower than the training")

    def _send(self) -> None:
        while (call := self._calls.get()) is not None:
            self._try(call)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # stores of artifacts raise what they like
            self._trouble(f"{type(error).__name__}: {error!s:.300}")

    def _trouble(self, reason: str) -> None:
        if not self._is_told:
            self._is_told = True
            tell(f"MLflow did not take all that was measured: {reason}")

    def _experiment(self) -> str:
        """Where a run of the user's would be; `mlflow.set_experiment` sets the variable, too."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        known = self._client.get_experiment_by_name(name) if name else None
        return os.environ.get("MLFLOW_EXPERIMENT_ID") or (known.experiment_id if known else "0")
