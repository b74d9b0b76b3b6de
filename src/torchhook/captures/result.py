"""The result of `capture`: a mapping from path to the recorded calls, in execution order."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchhook.captures.store import Store, StoredValue
from torchhook.core.errors import NotRecordedError, SessionError
from torchhook.core.lifetime import Attaching
from torchhook.core.selection import nearest
from torchhook.core.session import Session
from torchhook.core.site import Port
from torchhook.core.snapshot import peek, read
from torchhook.core.tabular import Tabular
from torchhook.core.text import in_units, shape_of
from torchhook.core.trees import Arguments, leaves, nbytes


class Calls:
    """The recorded calls of one module (or parameter, or mark), oldest first."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.module_class: type | None = None
        self._ports: list[Port] = []
        self._entries: list[StoredValue] = []

    def under(self, path: str) -> Calls:
        """The same calls under another name of a shared module."""
        twin = copy.copy(self)
        twin.path = path
        return twin

    @property
    def output(self) -> Any:
        """The output of the latest call."""
        return self._latest("output")

    @property
    def outputs(self) -> list[Any]:
        """The outputs of every call of the kept passes."""
        return self._all("output")

    @property
    def input(self) -> Any:
        """The input of the latest call: its only positional argument, or the tuple of them."""
        return self._latest("input")

    @property
    def inputs(self) -> list[Any]:
        """The inputs of every call of the kept passes."""
        return self._all("input")

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the latest call."""
        self._latest("input")
        value = read(self._of("input")[-1].value)
        if not isinstance(value, Arguments):
            raise NotRecordedError(f"the keywords of {self.path!r} are not kept, only the result of transform=")
        return value.kwargs

    @property
    def grad(self) -> Any:
        """The gradient of `output`, None where no gradient came.

        It is the gradient of the tensor: if a module returns its own input, that includes all other uses of the input.
        """
        return self._latest(self._grad_port)

    @property
    def grads(self) -> list[Any]:
        """The gradients of `outputs`, one for each; of a parameter, its accumulated gradient after each backward."""
        return self._all(self._grad_port)

    @property
    def param(self) -> Any:
        """The parameter as the latest call used it."""
        return self._latest("param")

    @property
    def params(self) -> list[Any]:
        """The parameter as every call of the kept passes used it."""
        return self._all("param")

    def newest(self, port: Port) -> list[Any]:
        """The values at `port` in the newest kept pass, call by call; for inputs, all arguments."""
        self._require(port)
        entries = self._of(port)
        last = max((entry.pass_number for entry in entries), default=None)
        return [read(entry.value) for entry in entries if entry.pass_number == last]

    @property
    def recomputed(self) -> list[bool]:
        """For every call of the kept passes, whether a checkpoint repeated it."""
        return [entry.recomputed for entry in self._entries if entry.site.port == self._ports[0]]

    def __len__(self) -> int:
        """How many calls are kept."""
        return len({(entry.pass_number, entry.call) for entry in self._entries if entry.site.port != "param_grad"})

    def __repr__(self) -> str:
        kind = self.module_class.__name__ if self.module_class else "value"
        shapes = ", ".join(f"{port} {self._shape(port)}" for port in self._ports if self._of(port))
        return f"Calls({self.path!r}, {kind}, {len(self)}×: {shapes or 'nothing'})"

    @property
    def _grad_port(self) -> Port:
        return "param_grad" if self._is_parameter else "grad_output"

    @property
    def _is_parameter(self) -> bool:
        return "param" in self._ports or "param_grad" in self._ports

    def _of(self, port: Port) -> list[StoredValue]:
        return [entry for entry in self._entries if entry.site.port == port]

    def _all(self, port: Port) -> list[Any]:
        self._require(port)
        return [entry.read() for entry in self._of(port)]

    def _latest(self, port: Port) -> Any:
        self._require(port)
        entries = self._of(port)
        if not entries:
            if port == "param_grad":
                raise NotRecordedError(f"no gradient reached {self.path!r} inside the capture")
            raise NotRecordedError(
                f"{self.path!r} was not called in the kept passes, so it has no {port} (its branch was not taken,"
                " its .forward() was called directly, or the model has not run inside the capture yet)"
            )
        return entries[-1].read()

    def _require(self, port: Port) -> None:
        if port in self._ports:
            return
        if self._is_parameter:
            remedy = (
                "pass grads=True to capture, and set its requires_grad" if port == "param_grad" else "read its .param"
            )
            raise NotRecordedError(f"no {port} was recorded for the parameter {self.path!r}; {remedy}")
        option = {"input": "inputs", "output": "outputs", "param": "params"}.get(port, "grads")
        raise NotRecordedError(f"the {port} of {self.path!r} was not recorded; pass {option}=True to capture")

    def _shape(self, port: Port) -> str:
        value = peek(self._of(port)[-1].value)
        return shape_of(value.unwrapped() if isinstance(value, Arguments) else value)


class Capture(Attaching, Tabular, Mapping[str, Calls]):
    """Values recorded at some places of a model; see `torchhook.capture`."""

    def __init__(self, session: Session, store: Store, ports: list[Port]) -> None:
        self._session = session
        self._store = store
        self._ports = ports
        self._final: dict[str, Calls] | None = None

    def open(self) -> Capture:
        """Start recording. (``with`` does this.)"""
        self._session.open()
        return self

    def close(self) -> None:
        """Remove the hooks; recorded values stay. (The end of the ``with`` block does this.)"""
        self._session.close()

    def abandon(self) -> None:
        self._session.abandon()

    @property
    def session(self) -> Session:
        """The session whose taps record."""
        return self._session

    @property
    def order(self) -> list[tuple[str, int]]:
        """Every kept call in execution order, as (path, call within its pass)."""
        return [(entry.site.path, entry.call) for entry in self._in_order()]

    @property
    def nbytes(self) -> int:
        """The size of everything that is kept, in bytes."""
        return self._store.nbytes

    @property
    def silent(self) -> dict[str, str]:
        """The sites that saw nothing, by path, each with the likely reason; known when the capture ends."""
        return {site.path: reason for site, reason in reversed(self._session.silent.items())}

    def __getitem__(self, path: str) -> Calls:
        if self._session.state == "new":
            raise SessionError("nothing is captured yet; use it in a with block, or call open()")
        calls = self._calls()
        name = self._session.aliases.get(path, path)
        if name not in calls:
            raise NotRecordedError(f"{path!r} is not among the captured sites; {nearest(str(path), calls)}")
        return calls[name] if name == path else calls[name].under(path)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(path for path, _ in self.order))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        if not len(self):
            return f"Capture of {type(self._session.model).__name__}: no selected site was called yet"
        return super().__repr__()

    def _calls(self) -> dict[str, Calls]:
        """The kept calls by path; cached once the capture has ended."""
        if self._final is not None:
            return self._final
        calls: dict[str, Calls] = {}
        for site, kind in self._session.places.items():
            of_path = calls.setdefault(site.path, Calls(site.path))
            of_path._ports.append(site.port)
            if "param" not in site.port:
                of_path.module_class = kind
        for entry in self._store.entries():
            calls[entry.site.path]._entries.append(entry)
        if self._session.state == "closed":
            self._final = calls
        return calls

    def _in_order(self) -> list[StoredValue]:
        """One entry per call: its output if that is recorded, otherwise another port."""
        kept = list(self._store.entries())
        for port in ("output", "input", "grad_output"):
            if port in self._ports:
                return [entry for entry in kept if entry.site.port == port]
        return [entry for entry in kept if entry.site.port == "param"]

    def _title(self) -> str:
        model = type(self._session.model).__name__
        return f"Capture of {model}: {len(self)} sites, {in_units(self.nbytes)}, in execution order"

    def _printed(self) -> tuple[Sequence[str], list[list[Any]]]:
        names = ("path", "module", "calls", "shape", "dtype")
        rows = [[*(record[name] for name in names), in_units(record["bytes"])] for record in self._records()]
        return ("site", *names[1:], "bytes"), [[row[0] or "''", *row[1:]] for row in rows]

    def _records(self) -> list[dict[str, Any]]:
        """One row per site, with its latest value."""
        latest: dict[str, StoredValue] = {}
        calls: dict[str, int] = {}
        for entry in self._in_order():
            latest[entry.site.path] = entry
            calls[entry.site.path] = calls.get(entry.site.path, 0) + 1
        kinds = {path: known.module_class for path, known in self._calls().items()}
        return [
            {
                "path": path,
                "module": getattr(kinds[path], "__name__", ""),
                "port": entry.site.port,
                "calls": calls[path],
                **_look(peek(entry.value)),
            }
            for path, entry in latest.items()
        ]


def _look(value: Any) -> dict[str, Any]:
    dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for _, tensor in leaves(value))
    return {"shape": shape_of(value), "dtype": "/".join(dtypes), "bytes": nbytes(value)}
