"""The tree that connects the ranks: each sends what it has to its parent, and what the root says comes back down.

The parent of a rank is the rank without its lowest bit, so that a subtree has consecutive ranks and the depth grows
with the logarithm of their number. Whoever loses its parent turns to the next rank above, and the lowest rank that is
left becomes the root. These are plain connections, not collectives: no rank waits for another, and the process groups
of the training are never touched. Only ranks that know the secret in the training's key-value store are let in.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing import connection as links
from typing import Any

from torchhook.training.ranks.wire import Wire

_ARRIVAL = 60.0  # seconds for the parent to begin to watch
_GRACE = 1.0  # seconds for the ranks above it
_PAUSE = 0.05
_GREETING = 10.0  # seconds for one that calls to prove that it knows the secret


def parent_of(rank: int) -> int:
    """The rank above; the root has none.

    >>> [parent_of(rank) for rank in range(1, 8)]
    [0, 0, 2, 0, 4, 4, 6]
    """
    return rank & (rank - 1)


def above(rank: int) -> list[int]:
    """The ranks that may be asked to be the parent, the best one first.

    >>> above(7), above(4), above(1)
    ([6, 4, 0, 1, 2], [0, 1, 2], [0])
    """
    line, at = [], rank
    while at:
        at = parent_of(at)
        line.append(at)
    top = 1 << (rank.bit_length() - 1) if rank else 0
    siblings = [1 << bit for bit in range(rank.bit_length()) if 1 << bit < top]
    return line + [other for other in siblings if other not in line]


def below(rank: int, world: int) -> list[int]:
    """The ranks whose parent this is, of `world` ranks.

    >>> below(0, 6), below(4, 8)
    ([1, 2, 4], [5, 6])
    """
    return [
        rank + step for bit in range(world.bit_length()) if rank % (2 * (step := 1 << bit)) == 0 and rank + step < world
    ]


@dataclass
class Link:
    """A connection to another rank, with the layouts that both ends know."""

    rank: int
    pipe: links.Connection
    inward: Wire = field(default_factory=Wire)
    outward: Wire = field(default_factory=Wire)


class Tree:
    """The connections of one rank. `news` wakes the thread that reads them when a rank has called."""

    def __init__(self, rank: int, store: Any, name: str, host: str) -> None:
        self.rank = rank
        self.parent: Link | None = None
        self.children: dict[int, Link] = {}
        self.is_root = rank == 0
        self._store, self._name = store, name
        self._addresses: dict[int, tuple[str, int]] = {}
        self._callers: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self.news, self._bell = links.Pipe(duplex=False)
        self._listener = socket.create_server((host, 0), backlog=64)
        self._secret = b""
        self._knows_secret = threading.Event()
        if self.is_root:
            self._secret = secrets.token_hex(16).encode()
            store.set(f"{name}/secret", self._secret)
            self._knows_secret.set()
        address = f"{host} {self._listener.getsockname()[1]}"
        store.set(f"{name}/{rank}", address)
        threading.Thread(target=self._listen, name="torchhook ranks", daemon=True).start()

    def find(self, go_on: Callable[[], bool]) -> None:
        """Look up where the ranks above are, once they begin. Those beyond the parent matter only if that is lost."""
        self._look_up([-1, parent_of(self.rank)], _ARRIVAL, go_on)
        self._look_up(above(self.rank), _GRACE, go_on)

    @property
    def knows_secret(self) -> bool:
        """Whether rank 0 has begun, and the others can be called."""
        return bool(self._secret)

    def climb(self) -> None:
        """Connect to the nearest rank above that is still there; without any, this one is the root."""
        for other in above(self.rank) if self.knows_secret else ():
            if other in self._addresses and (link := self._called(other)) is not None:
                self.parent = link
                return
        self.parent, self.is_root = None, True

    def keep_run(self, run: str) -> None:
        """Keep where the run is, for a rank that has to go on with it and was not told."""
        self._store.set(f"{self._name}/run", run)

    def known_run(self) -> str | None:
        """Where the run is, if another rank has begun it."""
        key = f"{self._name}/run"
        with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            if self._store.check([key]):
                return str(self._store.get(key).decode())
        return None

    def admit(self) -> Iterator[Link]:
        """The ranks that have called since the last time."""
        while self.news.poll():
            self.news.recv_bytes()
        while not self._callers.empty():
            link = self._callers.get()
            self.children[link.rank] = link
            yield link

    def ring(self) -> None:
        """Wake the thread that reads."""
        with contextlib.suppress(OSError, ValueError):
            self._bell.send_bytes(b".")

    def drop(self, link: Link) -> None:
        """Let go of a connection that has ended."""
        link.pipe.close()
        if link is self.parent:
            self.parent = None
        elif self.children.get(link.rank) is link:
            del self.children[link.rank]

    def close(self) -> None:
        """Let go of everything."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in [*self.children.values(), *([self.parent] if self.parent else [])]:
            self.drop(link)
        self._bell.close()

    def _look_up(self, ranks: Iterable[int], patience: float, go_on: Callable[[], bool]) -> None:
        """Ask again and again: a call that waits would keep the training itself from using the store."""
        missing = [other for other in ranks if other not in self._addresses]
        until = time.monotonic() + patience
        while missing and go_on() and time.monotonic() < until:
            for other in list(missing):
                key = f"{self._name}/{'secret' if other < 0 else other}"
                if self._store.check([key]):
                    self._keep(other, self._store.get(key))
                    missing.remove(other)
            if missing:
                time.sleep(_PAUSE)

    def _keep(self, other: int, found: bytes) -> None:
        if other < 0:
            self._secret = found
            self._knows_secret.set()
        host, _, port = found.decode().rpartition(" ")
        self._addresses[other] = host, int(port) if other >= 0 else 0

    def _called(self, other: int) -> Link | None:
        """A connection to another rank; None if it is gone."""
        try:
            with socket.create_connection(self._addresses[other], timeout=_GREETING) as plain:
                plain.settimeout(None)
                pipe = links.Connection(plain.detach())
            self._greeted(pipe, links.answer_challenge, links.deliver_challenge)
            pipe.send_bytes(str(self.rank).encode())
        except (OSError, EOFError, AuthenticationError):
            return None
        return Link(other, pipe)

    def _listen(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(plain,), daemon=True).start()

    def _greet(self, plain: socket.socket) -> None:
        pipe = links.Connection(plain.detach())
        self._knows_secret.wait(_GREETING)  # others may be quicker than this rank
        try:
            self._greeted(pipe, links.deliver_challenge, links.answer_challenge)
            if not pipe.poll(_GREETING):
                raise EOFError
            self._callers.put(Link(int(pipe.recv_bytes(32)), pipe))
            self.ring()
        except (OSError, EOFError, ValueError, AuthenticationError):
            pipe.close()

    def _greeted(self, pipe: links.Connection, *steps: Callable[[Any, bytes], None]) -> None:
        """Both ends prove that they know the secret."""
        for step in steps:
            if step is links.answer_challenge and not pipe.poll(_GREETING):
                raise EOFError
            step(pipe, self._secret)
