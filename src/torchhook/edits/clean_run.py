"""The values of a clean run, to patch into another run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from torchhook.core.errors import NotRecordedError
from torchhook.core.event import Event
from torchhook.core.selection import Selector, nearest
from torchhook.core.session import Session
from torchhook.core.site import Port
from torchhook.core.snapshot import snapshot
from torchhook.core.tap import Tap
from torchhook.core.trees import Arguments


class CleanCalls:
    """The values of one module in the clean run, call by call; they are read like those of a capture."""

    def __init__(self, path: str, ports: Iterable[Port]) -> None:
        self.path = path
        self._values: dict[Port, list[Any]] = {port: [] for port in ports}

    @property
    def output(self) -> Any:
        """The output of the last call."""
        return self.outputs[-1]

    @property
    def outputs(self) -> list[Any]:
        """The output of every call."""
        return self.newest("output")

    @property
    def input(self) -> Any:
        """The input of the last call: its one positional argument, or the tuple of them."""
        return self.inputs[-1]

    @property
    def inputs(self) -> list[Any]:
        """The input of every call."""
        return [arguments.unwrapped() for arguments in self.newest("input")]

    def newest(self, port: Port) -> list[Any]:
        """The value of every call; for inputs all arguments."""
        if port not in self._values:
            raise NotRecordedError(f"the {port} of {self.path!r} was not recorded in the clean run")
        return self._values[port]

    def add(self, event: Event) -> None:
        """Keep the value of one call."""
        self._values[event.port].append(snapshot(_arguments(event)) if event.port == "input" else event.value)


class CleanRun(Mapping[str, CleanCalls]):
    """The inputs and outputs of some modules in a clean run, by path."""

    def __init__(self, model: nn.Module, paths: Iterable[str], ports: Iterable[Port]) -> None:
        self._ports = tuple(ports)
        self._calls = {path: CleanCalls(path, self._ports) for path in paths}
        self._session = Session(
            model, [Tap(Selector.union(self._calls), self._add, port) for port in self._ports], on_silent="ignore"
        )

    def run(self, given: Arguments) -> Any:
        """Run the model and keep its values: the output of the model."""
        with self._session as session:
            return session.model(*given.args, **given.kwargs)

    def _add(self, event: Event) -> None:
        self._calls.setdefault(event.path, CleanCalls(event.path, self._ports)).add(event)

    def __getitem__(self, path: str) -> CleanCalls:
        for name in (self._session.aliases.get(path, path), path):
            if name in self._calls:
                return self._calls[name]
        raise NotRecordedError(f"{path!r} was not recorded in the clean run; {nearest(path, self._calls)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)


def _arguments(event: Event) -> Arguments:
    """All arguments of a call; inside a compiled graph an event has them in its value alone."""
    if event.args or event.live is event.kwargs:
        return Arguments(event.args, event.kwargs)
    return Arguments(event.live if isinstance(event.live, tuple) else (event.live,), event.kwargs)
