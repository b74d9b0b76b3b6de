"""What attaches to a model does so at `open` or ``with``, and leaves the model as it was at `close`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING

from torchhook.core.renamed import old_method

if TYPE_CHECKING:
    from typing_extensions import Self


class Attaching(ABC):
    """Something that attaches to a model between `open` and `close`, which a ``with`` block calls."""

    @abstractmethod
    def open(self) -> Self:
        """Attach to the model."""

    @abstractmethod
    def close(self) -> None:
        """Leave the model as it was. Calling it again does nothing."""

    def abandon(self) -> None:
        """Close it because of an error: nothing more is said."""
        self.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # an error is being raised already
            self.abandon()

    attach = old_method("open")
    detach = old_method("close")
