"""Logs a monitored training to MLflow: metrics and feature maps by layer, findings as tags, the report as artifacts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from queue import Full, Queue
from threading import Thread
from typing import Any

from torch import Tensor

from torchhook.core.findings import Finding, Report
from torchhook.core.optional import require
from torchhook.integrations.common import Layers, files, legal, pictures_of, warn_in_thread
from torchhook.render.words import short
from torchhook.training.logs import Entry, Log

_STATUS = {"ended": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_LONGEST = 1000  # characters of a tag; MLflow's limit is 8,000 and was once 5,000
_LONGEST_KEY = 100  # characters of a layer in the name of an image
_WAITING = 16  # calls in the queue
_PATIENCE = 60.0  # seconds to wait for the last calls at the end


class MLflow(Log):
    """Logs to the run `run_id` or to the active run, which it does not end; without either, to a run of its own.

        with mlflow.start_run():
            ...                       # a monitor with MLflow() logs to this run

        MLflow(run_id, client=MlflowClient("http://tracking:5000"), layers="encoder.*")

    Metrics are named ``torchhook/<statistic>/<layer>``. `layers` are globs of module and parameter paths; if more than
    200 match, some are left out; ``()`` logs only the statistics of the whole model. NaN is kept. Infinities are left
    out, because MLflow would record them as 1.8e308.

    The server is called from a background thread, once per thousand metrics of a step. If it fails or is too slow, a
    warning says so once, the metrics concerned are lost, and logging goes on.
    """

    # MLflow's own queue (synchronous=False) is unbounded, and ending any run shuts it down for all.

    def __init__(self, run_id: str | None = None, client: Any = None, layers: str | Iterable[str] = "*") -> None:
        self._library = require("mlflow", "mlflow", "MLflow")
        self.run_id = run_id
        self._client = client
        self._layers = Layers(layers)
        self._is_own = False
        self._codes: set[str] = set()  # of the findings so far
        self._calls: Queue[Callable[[], object] | None] = Queue(_WAITING)
        self._thread = Thread(target=self._send, name="torchhook to MLflow", daemon=True)
        self._has_warned = False

    def begin(self, about: Mapping[str, Any]) -> None:
        self._find_run()
        self._thread.start()

    def feature_maps(self, acts: Any, step: int = 0) -> None:
        """Log feature maps as images, with or without a training: those of the channels, and of their mean.

        `acts` is what `torchhook.plot.feature_maps` takes: a capture, one layer of it, or a dict of names and tensors.
        The images of the run are named ``torchhook/maps/<layer>`` and ``torchhook/mean_map/<layer>``. A run of its own
        is finished after each call, and continued by the next.
        """
        self._find_run()
        self._log_images(pictures_of(acts), step)
        if self._is_own and not self._thread.is_alive():
            self._client.set_terminated(self.run_id)

    def _find_run(self) -> None:
        """The run to log to: the given one, the active one, or a new one."""
        # The active run is known only in the training's thread, and belongs to the default client.
        active = self._library.active_run() if self._client is None else None
        self._client = self._library.MlflowClient() if self._client is None else self._client
        if self.run_id is None and active is not None:
            self.run_id = active.info.run_id
        if self.run_id is None:
            self._is_own = True
            self.run_id = self._client.create_run(self._experiment()).info.run_id

    def write(self, entry: Entry) -> None:
        scalars = self._layers.scalars(entry)
        scalars.pop("torchhook/loss", None)
        logged = [(name, value, entry.step) for name, value in scalars.items()]
        logged += [("torchhook/loss", loss, step) for step, loss in entry.losses.items()]
        metric, when = self._library.entities.Metric, int(entry.time * 1000)
        metrics = [metric(name, value, when, step) for name, value, step in logged if not math.isinf(value)]
        self._later(partial(self._client.log_batch, self.run_id, metrics=metrics, synchronous=True))
        if pictures := dict(self._layers.pictures(entry)):
            self._later(partial(self._log_images, pictures, entry.step))

    def found(self, finding: Finding) -> None:
        if finding.code not in self._codes:  # the first one is closest to the cause, and a tag holds only one
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
            warn_in_thread(f"MLflow did not take the report within {_PATIENCE:.0f} seconds; some of it may be missing")

    def _log_images(self, pictures: Mapping[str, Tensor], step: int) -> None:
        for name, grey in pictures.items():
            self._client.log_image(self.run_id, grey.numpy(), key=_image_key(name), step=step, synchronous=True)

    def _tagging(self, name: str, text: str) -> Callable[[], object]:
        key, value = f"torchhook.{legal(name)}", short(text, _LONGEST)
        return partial(self._client.set_tag, self.run_id, key, value, synchronous=True)

    def _later(self, call: Callable[[], object]) -> None:
        try:
            self._calls.put_nowait(call)
        except Full:
            self._warn("the server cannot keep up with the training")

    def _send(self) -> None:
        while (call := self._calls.get()) is not None:
            self._try(call)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # artifact stores raise anything
            self._warn(f"{type(error).__name__}: {error!s:.300}")

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_in_thread(f"some metrics were not logged to MLflow: {reason}")

    def _experiment(self) -> str:
        """The experiment that a run of the user would belong to; `mlflow.set_experiment` sets the variable, too."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        known = self._client.get_experiment_by_name(name) if name else None
        return os.environ.get("MLFLOW_EXPERIMENT_ID") or (known.experiment_id if known else "0")


def _image_key(name: str) -> str:
    """The name of an image: in ASCII, and shorter than that of a metric, since MLflow adds to it in a file's name.

    >>> _image_key("torchhook/maps/layer1.0"), _image_key("torchhook/maps/с")
    ('torchhook/maps/layer1.0', 'torchhook/maps/_u0441-419bedff')
    """
    parts = (part.encode("ascii", "backslashreplace").decode() for part in name.split("/"))
    return "/".join(legal(part, _LONGEST_KEY) for part in parts)
