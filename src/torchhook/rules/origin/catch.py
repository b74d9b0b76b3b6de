"""`catch_nonfinite`: where the first NaN or Inf of a model came from."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import Literal

from torch import nn

from torchhook.core.findings import Finding
from torchhook.core.lifetime import Attaching
from torchhook.core.selection import require_module
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.text import warn
from torchhook.rules.origin.files import require_safetensors
from torchhook.rules.origin.origin import Origin
from torchhook.rules.origin.sink import NonfiniteSink, OnFound


def catch_nonfinite(
    model: nn.Module, *, save: str | PathLike[str] | None = None, on_found: Literal["raise", "warn"] = "raise"
) -> Catch:
    """Find where the first NaN or Inf comes from while `model` runs or trains inside the block.

    After a forward whose output holds NaN or Inf (-Inf made by a mask is fine), or a backward that leaves such
    gradients, the call that produced them is rerun op by op. ``.origin`` then names the module, the operation, its
    line and its operands; ``.finding`` also lists the calls that only passed the value on. Overflows while a GradScaler
    searches for its scale do not count.

    Args:
        save: A folder, or a file ending in ``.safetensors``, to save that call in: its arguments, the state of its
            module and of the random number generators. `torchhook.origins.replay` reruns it anywhere.
        on_found: ``"raise"`` raises `NonfiniteError`; ``"warn"`` warns once and lets the training continue, unwatched.

    The arguments of every module call, and the gradients of its output, are kept until the next pass.

    >>> import torch
    >>> from torchhook import catch_nonfinite
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=1))
    >>> with catch_nonfinite(model, on_found="warn") as caught:
    ...     _ = model(torch.ones(1, 2))
    >>> print(caught.origin)
    None
    """
    require_module(model)
    if on_found not in ("raise", "warn"):
        raise ValueError(f"on_found must be 'raise' or 'warn', not {on_found!r}")
    if save is not None:
        require_safetensors()
    return Catch(model, None if save is None else Path(fspath(save)), on_found)


class Catch(Attaching):
    """Watches a model for NaN and Inf; see `torchhook.catch_nonfinite`."""

    def __init__(self, model: nn.Module, save: Path | None, on_found: OnFound) -> None:
        if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
            raise ValueError("DataParallel runs copies of the model in threads: watch its .module on one device")
        self._sink = NonfiniteSink(model, save, on_found)
        self._session = Session(model, self._sink.taps(), on_silent="ignore", detach_on_error=False)

    @property
    def origin(self) -> Origin | None:
        """Where the first NaN or Inf came from, if there was one."""
        return self._sink.origin

    @property
    def finding(self) -> Finding | None:
        """The origin as a finding, with the calls that passed the value on."""
        return self._sink.finding

    @property
    def file(self) -> Path | None:
        """The file that the call was saved to."""
        return self._sink.file

    def open(self) -> Catch:
        """Begin to watch. (``with`` does this.)"""
        self._session.open()
        self._sink.start(self._session)
        return self

    def close(self) -> None:
        """Remove the hooks. (The end of the ``with`` block does this.)"""
        self._session.close()
        if not self._sink.seen:
            warn(f"nothing was watched for NaN: {self._session.silent.get(Site(''), 'nothing ran')}")
        self._sink.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        self._session.abandon()
        if isinstance(error, Exception):
            self._sink.explain(error)
        self._sink.stop()

    def __repr__(self) -> str:
        return f"Catch({type(self._sink.model).__name__}): {self.finding or 'nothing found'}"


def origin_of(model: nn.Module, run: Callable[[], object]) -> Finding | None:
    """Where the first NaN or Inf came from while `run` ran `model` and perhaps its backward; None if there was none.

    >>> import torch
    >>> from torchhook.origins import origin_of
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(1))
    >>> finding = origin_of(model, lambda: model(torch.full((1, 2), torch.nan)))
    >>> finding.code, finding.evidence["came_with"]
    ('TH101', 'the argument 0')
    """
    with Catch(model, None, "record") as caught:
        run()
    return caught.finding
