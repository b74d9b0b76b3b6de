"""The thread in which the shares of all ranks come together. One rank, the root, gets them and writes the run."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing import connection as links
from typing import Any

from torchhook.core.text import warn
from torchhook.rules.entry import Entry
from torchhook.rules.ranks import LOST, Member, RankStep, Split
from torchhook.stats.reading import Snapshot
from torchhook.training.ranks.seat import Seat
from torchhook.training.ranks.share import SUMS, Decided, Share, named
from torchhook.training.ranks.tree import Link, Tree, below

_SHARE, _FACTS = b"S", b"F"
_LATE = 10.0  # seconds that a step waits for the ranks below
_HOLD = 1.0  # seconds for the ranks below one that was lost to come back
_END = 5.0  # seconds that the end waits for the ranks below, per level of the tree: those below wait, too
_FAREWELL = 2.0  # seconds for the parent to take the last message
_MOST = 16  # steps that wait
_AGAIN = 4  # the last shares, which are sent again if the parent is lost
_LARGEST = 1 << 29  # bytes of a message


@dataclass(frozen=True)
class Answers:
    """What a gathering calls, in its own thread.

    `deliver` gets the merged entries on the root. `take_over` tells a rank that it is the root from now on, and where
    the run is if there is one; it returns the last step in it. `hear` gets what the root says, `fail` what was raised.
    """

    deliver: Callable[[Entry], None]
    take_over: Callable[[str | None], int]
    hear: Callable[[Mapping[str, Any]], None]
    fail: Callable[[Exception], None]


@dataclass
class _Pending:
    share: Share
    since: float


class Gather:
    """Sends the shares of this rank, merged with those of the ranks below it, to the rank above."""

    def __init__(self, seat: Seat, world: int, tree: Tree, calls: Answers) -> None:
        self.seat, self.world = seat, world
        self.sent = 0  # bytes
        self.worked = 0.0  # seconds of this thread
        self._tree, self._calls = tree, calls
        self._seats: dict[int, Seat] = {seat.rank: seat}
        self._left: dict[int, dict[str, Any]] = {}  # ranks that have ended, with their steps and state
        self._untold: tuple[set[int], set[int]] = {seat.rank}, set()  # seats and ends that the parent does not know
        self._seen: dict[int, int] = {}  # the last step of each rank
        self._passed = dict.fromkeys([seat.rank, *below(seat.rank, world)], -2)  # the last step of each subtree
        self._awaited = set(below(seat.rank, world))  # ranks that have not ended, or not come yet
        self._run: str | None = None
        self._above = ""  # the host of the parent
        self._own: dict[int, Entry] = {}
        self._pending: dict[int, _Pending] = {}
        self._sent: deque[Share] = deque(maxlen=_AGAIN)
        self._decided: Decided = {}
        self._flushed = -2
        self._latest: RankStep | None = None  # that was delivered
        self._held = 0.0  # until when nothing is passed on
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._state: dict[str, Any] = {}
        self._closed = 0.0  # when this rank ended
        self._until: float | None = None  # when the end no longer waits
        self._thread = threading.Thread(target=self._work, name="torchhook ranks", daemon=True)
        self._thread.start()

    @property
    def is_root(self) -> bool:
        """Whether this rank writes the run."""
        return self._tree.is_root

    def put(self, entry: Entry) -> None:
        """Send what this rank has measured in a step."""
        self._do(lambda: self._put(entry))

    def say(self, news: Mapping[str, Any]) -> None:
        """Tell the ranks below."""
        self._do(lambda: self._say(news))

    def close(self, steps: int, state: str, error: str = "", apart: bool = False) -> None:
        """This rank has ended. Waits a little for those below, so that what they still send is not lost."""
        patience = _END * (1 + len(below(self.seat.rank, self.world)))
        self._state = {"steps": steps, "state": state, "ended": time.time(), "error": error, "apart": apart}
        self._closed = time.monotonic()
        self._until = self._closed + patience
        self._tree.ring()
        self._thread.join(patience + 2 * _FAREWELL)

    def _do(self, work: Callable[[], None]) -> None:
        self._inbox.put(work)
        self._tree.ring()

    def _work(self) -> None:
        try:
            if self.is_root:
                self._calls.take_over(None)
            else:
                self._tree.find(lambda: self._until is None or time.monotonic() < self._until)
                self._climb()
                if not self._tree.knows_secret and self._until is None:
                    warn(f"rank 0 is not watched yet, so rank {self.seat.rank} writes a run of its own")
            while not self._is_over():
                self._guarded(self._receive)
                while not self._inbox.empty():
                    self._guarded(self._inbox.get())
                self._guarded(self._flush)
                self.worked = time.thread_time()
            self._guarded(self._leave)
        finally:
            self._tree.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        """A fault of ours in one share must not keep those that follow from the run."""
        try:
            work()
        except Exception as error:
            self._calls.fail(error)

    def _is_over(self) -> bool:
        """Whether this rank has ended, and those below have, too, or were waited for long enough."""
        if self._until is None or not self._inbox.empty():
            return False
        now = time.monotonic()
        have_come = len(self._seats) > 1
        if not have_come and now > self._closed + _END:  # the others may not be watched at all
            return True
        return (not self._awaited and now > self._held) or now > self._until

    def _leave(self) -> None:
        while self._pending:  # if the parent is lost now, what was sent waits again
            self._flush(at_end=True)
        self._know_left(self.seat.rank, self._state)
        for link in list(self._tree.children.values()):
            self._tell(link, {"left": self._state})
        if self.is_root:
            last = self._latest or self._step(Share(max(self._flushed, 0)))
            ended = replace(last, members=self._members())
            self._calls.deliver(Entry(ended.step, time.time(), Snapshot({}), ranks=ended))
        elif self._tree.parent is not None:
            self._send_facts()
            self._await_farewell(self._tree.parent)

    def _await_farewell(self, parent: Link) -> None:
        """Wait until the parent hangs up: what is not read by then would be lost if this process were gone."""
        until = time.monotonic() + _FAREWELL
        try:
            while parent.pipe.poll(max(0, until - time.monotonic())):
                parent.pipe.recv_bytes(_LARGEST)
        except (OSError, EOFError):
            pass

    def _receive(self) -> None:
        tree = self._tree
        links_ = [*tree.children.values(), *([tree.parent] if tree.parent else [])]
        is_waiting = self._until is not None or bool(self._pending)
        ready = set(links.wait([tree.news, *(link.pipe for link in links_)], 0.1 if is_waiting else None))
        for link in tree.admit():
            self._passed[link.rank] = -2
            self._awaited.add(link.rank)
            self._tell(link, {"run": self._run, "host": self.seat.host})
        for link in links_:
            if link.pipe in ready:
                self._read(link)

    def _read(self, link: Link) -> None:
        """Take all that is there from one connection."""
        try:
            while link.pipe.poll():
                data = link.pipe.recv_bytes(_LARGEST)
                if data[:1] == _SHARE:
                    self._take(link.inward.unpacked(data[1:]), link.rank)
                else:
                    self._take_facts(json.loads(data[1:]), link)
        except (OSError, EOFError, ValueError):  # it is gone, or sends what is no share
            self._lose(link)

    def _lose(self, link: Link) -> None:
        is_parent = link is self._tree.parent
        self._tree.drop(link)
        if not is_parent:
            self._passed.pop(link.rank, None)
            self._awaited.discard(link.rank)
            if link.rank not in self._left:
                self._held = time.monotonic() + _HOLD
                self._know_left(link.rank, {"state": LOST})
            return
        is_lost = link.rank not in self._left
        if is_lost:
            self._seats.setdefault(link.rank, Seat(link.rank, self._above))
            self._know_left(link.rank, {"state": LOST})
        if is_lost or self._until is None:  # the parent of a rank that ends may end before it does
            self._climb()

    def _climb(self) -> None:
        """Find a parent; without one, this rank is the root from now on."""
        was_root = self.is_root
        self._tree.climb()
        self._untold = set(self._seats), set(self._left)
        if self.is_root and not was_root:
            self._flushed = self._calls.take_over(self._run or self._tree.known_run())
            self._seen |= {rank: self._flushed for rank in self._left if rank not in self._seen}
            self._adopt()
        for share in list(self._sent):
            self._take(share, self.seat.rank)

    def _adopt(self) -> None:
        """Wait for the ranks that were below those that have left: they come here now."""
        orphans = {child for rank in self._left for child in below(rank, self.world)}
        self._awaited |= orphans - self._left.keys() - {self.seat.rank}
        self._held = time.monotonic() + _HOLD

    def _put(self, entry: Entry) -> None:
        self._own[entry.step] = entry
        while len(self._own) > _MOST:
            del self._own[min(self._own)]
        self._take(Share.of(entry, self.seat), self.seat.rank)

    def _take(self, share: Share, child: int) -> None:
        """A share has come from this rank or from one below."""
        self._passed[child] = max(self._passed.get(child, -2), share.step)
        self._seen.update((rank, max(self._seen.get(rank, -2), share.step)) for rank in share.facts)
        known = self._pending.get(share.step)
        if known is None:
            share.decided = self._decided
            if share.step > self._flushed or not self.is_root:  # what comes late goes up by itself
                self._pending[share.step] = _Pending(share, time.monotonic())
        elif not known.share.facts.keys() & share.facts.keys():  # else it came twice
            known.share.merge(share, self._teams())

    def _take_facts(self, facts: Mapping[str, Any], link: Link) -> None:
        if link is self._tree.parent:
            self._above = facts.get("host", self._above)
            if "left" in facts:
                self._left[link.rank] = facts["left"]
            else:
                self._calls.hear(facts)
                self._say(facts)
            return
        for known in facts["seats"]:
            seat = Seat(**{**known, "team": tuple(known["team"])})
            self._seats.setdefault(seat.rank, seat)
            self._untold[0].add(seat.rank)
            if self._left.get(seat.rank, {}).get("state") == LOST:  # it has come back
                del self._left[seat.rank]
        for rank, state in facts["left"].items():
            self._know_left(int(rank), state)
        if link.rank in self._left:
            self._lose(link)

    def _know_left(self, rank: int, state: dict[str, Any]) -> None:
        self._left[rank] = state
        self._untold[1].add(rank)

    def _flush(self, at_end: bool = False) -> None:
        """Pass on the steps that are complete, in their order, and those that have waited for too long."""
        now = time.monotonic()
        if now < self._held and not at_end:
            return
        waits_for = [step for rank, step in self._passed.items() if rank != self.seat.rank or self._until is None]
        until = min(waits_for, default=max(self._pending, default=-2))
        for step in sorted(self._pending):
            is_late = now - self._pending[step].since > _LATE or len(self._pending) > _MOST
            if is_late:  # those that have never come are no longer waited for
                known = {self.seat.rank, *self._tree.children}
                self._passed = {rank: passed for rank, passed in self._passed.items() if rank in known}
            if step <= until or is_late or at_end:
                self._pass_on(self._pending.pop(step).share)

    def _pass_on(self, share: Share) -> None:
        self._flushed = max(self._flushed, share.step)
        if self.is_root:
            self._calls.deliver(self._merged(share))
            return
        self._sent.append(share)
        self._send_facts()
        if self._tree.parent is not None:
            self._send(self._tree.parent, _SHARE + self._tree.parent.outward.packed(share))

    def _send_facts(self) -> None:
        """Tell the parent which ranks are new, and which have ended."""
        seats, left = self._untold
        if self._tree.parent is not None and (seats or left):
            facts = {
                "seats": [_told(self._seats[rank]) for rank in seats],
                "left": {rank: self._left[rank] for rank in left if rank in self._left},
            }
            self._untold = set(), set()
            self._tell(self._tree.parent, facts)

    def _say(self, news: Mapping[str, Any]) -> None:
        if news.get("run") and self.is_root:
            self._tree.keep_run(news["run"])
        self._run = news.get("run") or self._run
        for link in list(self._tree.children.values()):
            self._tell(link, news)

    def _tell(self, link: Link, facts: Mapping[str, Any]) -> None:
        self._send(link, _FACTS + json.dumps(facts).encode())

    def _send(self, link: Link, data: bytes) -> None:
        try:
            link.pipe.send_bytes(data)
            self.sent += len(data)
        except (OSError, ValueError):
            self._lose(link)

    def _teams(self) -> dict[int, int]:
        return {seat.lead: len(seat.team) for seat in self._seats.values()}

    def _merged(self, share: Share) -> Entry:
        """The entry of all ranks; what is not sent is that of this one."""
        own = self._own.pop(share.step, None) or Entry(share.step, time.time(), Snapshot({}))
        seats = [seat for seat in self._seats.values() if seat.rank in share.facts]
        leads = {(seat.stage, seat.lead) for seat in seats if seat.averages}
        teams = max([sum(stage == other for other, _ in leads) for stage, _ in leads], default=1)
        snapshot = share.snapshot(own.snapshot, teams)
        losses = {step: total / count for step, (total, count) in sorted(share.losses.items())}
        self._latest = self._step(share)
        return replace(own, snapshot=snapshot, losses=losses, ranks=self._latest)

    def _members(self) -> dict[int, Member]:
        return {
            rank: Member(seat.host, seat.stage, seat.lead, self._seen.get(rank, -2), **self._left.get(rank, {}))
            for rank, seat in sorted(self._seats.items())
        }

    def _step(self, share: Share) -> RankStep:
        names = named([*share.places, *(key[:3] for key in share.votes)])
        places = list(dict.fromkeys((names[cell], cell[2]) for cells, _ in share.tables.values() for cell in cells))
        at = {place: number for number, place in enumerate(places)}
        tables = {}
        for rank, (cells, table) in sorted(share.tables.items()):
            tables[rank] = table.new_full((len(places), table.size(1)), float("nan"))
            tables[rank][[at[names[cell], cell[2]] for cell in cells]] = table
        splits = tuple(Split(names[key[:3]], key[2], key[3], values) for key, values in share.apart())
        return RankStep(
            share.step,
            self.world,
            self._members(),
            dict(sorted(share.facts.items())),
            places,
            tables,
            splits,
            frozenset(key[2] for key in share.votes if key[2] in SUMS),
            len({key[:2] for key in share.votes if key[2] == "param"}),
            any(seat.averages for seat in self._seats.values()),
            any(seat.split for seat in self._seats.values()),
        )


def _told(seat: Seat) -> dict[str, Any]:
    """A seat as other ranks need it: which parameters are where is in the shares."""
    return asdict(replace(seat, shards={}, sole=frozenset(), widths={})) | {"sole": []}
