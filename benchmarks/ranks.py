"""What several ranks cost: a training that is watched on all of them, and the way of a window up the tree.

`watching.py --ranks 2` trains GPT-2 with DistributedDataParallel over gloo, one process per rank, in blocks of steps as
`watching.py` does. Its ratios are of the processor time of all processes, with all their threads.

`watching.py --tree 2 4 8` sends made-up windows up the tree, and times them from the last rank's share to the merged
entry at the root, beside gloo's `all_reduce` of as many bytes. Its second table is on paper: levels of the tree, one
after the other, each with the time that packing, unpacking and merging shares of that many ranks took here.
"""

import socket
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import log2
from multiprocessing import get_context
from random import Random
from statistics import mean, median
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, TypeVar

import torch
from capture import let_torchvision_import
from harness import markdown, timed
from statistics_cpu import Loss, gpt2
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from watching import COPIES, Copy, Timed, ratio, verdict, without_collection

from torchhook import Monitor, Reduce, Site
from torchhook.core.torch_internals import default_store
from torchhook.rules.entry import Entry
from torchhook.training.ranks.gather import Answers, Gather
from torchhook.training.ranks.seat import Seat
from torchhook.training.ranks.share import Share, Vote
from torchhook.training.ranks.tree import Tree
from torchhook.training.ranks.wire import Wire

TARGET = 1.02
BLOCK = 10
PLACES = 400
WINDOWS = 30
WORLDS = (8, 64, 1_024, 16_384)  # on paper
LATENCIES = (20e-6, 200e-6, 2e-3)  # seconds
BANDWIDTH = 1.25e9  # bytes per second: 10 Gbit/s

Result = TypeVar("Result")


def watched(world: int, watching: dict[str, Any], blocks: int) -> None:
    """Train on `world` ranks, and print what watching cost."""
    found = on_ranks(world, _train, watching, blocks)
    lines, verdicts = [], []
    for part, first in {"all steps": 0, "later half": blocks // 2}.items():
        whole = {name: _together([timed[name] for timed, _ in found], first) for name in COPIES}
        plain = median(whole["plain"].seconds())
        ours, low, high = ratio(whole["watched"].blocks, whole["plain"].blocks)
        again = ratio(whole["plain again"].blocks, whole["plain"].blocks)
        measured = mean(is_measured for is_measured, _ in whole["watched"].steps)
        lines.append(
            [
                f"GPT-2, {world} ranks, {part}",
                f"{plain * 1e3:.1f} ms",
                f"{again[0]:.3f}× ({again[1]:.3f}–{again[2]:.3f})",
                f"{ours:.3f}×",
                f"{low:.3f}–{high:.3f}",
                f"1 in {1 / measured:.0f}" if measured else "none",
            ]
        )
        verdicts.append(verdict(f"{world} ranks, {part}: {ours:.3f}× ({low:.3f}–{high:.3f})", TARGET, low <= TARGET))
    print(markdown(["training", "plain step", "plain again", "watched", "95 %", "measured"], lines))
    sent = [f"rank {rank}: {bytes_:,.0f}" for rank, (_, bytes_) in enumerate(found)]
    print(f"\nbytes sent per window by {'; '.join(sent)}\n\n" + "\n".join(verdicts))


class OnRank(Copy):
    """A copy that is trained on several ranks."""

    def __init__(self, model: nn.Module, loss: Loss, watching: dict[str, Any] | None = None) -> None:
        super().__init__(model, loss, compiled=False)
        self.model = DistributedDataParallel(self.model)
        self.monitor = None if watching is None else Monitor(self.model, self.optimizer, **watching)

    def settle(self) -> None:
        """Wait until the shares of this rank and of those below it have gone up, and what came of that is done."""
        if self.monitor is None:
            return
        super().settle()
        gather = self.monitor._worker.gather
        assert gather is not None
        _await_turn(gather)
        while gather._pending:
            time.sleep(0.005)
        _await_turn(gather)
        super().settle()


def _await_turn(gather: Gather) -> None:
    """Wait until the thread that gathers has done what it has been asked for until now."""
    turn = Event()
    gather._do(turn.set)
    turn.wait()


def _train(rank: int, watching: dict[str, Any], blocks: int) -> tuple[dict[str, Timed], float]:
    """What each copy took on this rank, and the bytes it sent per window."""
    let_torchvision_import()
    torch.manual_seed(rank)  # so that ranks have other samples; the model is that of the first
    model, loss = gpt2()
    with TemporaryDirectory() as folder, without_collection():
        OnRank(model, loss).run(3)
        copies = {name: OnRank(model, loss) for name in COPIES if name != "watched"}
        copies["watched"] = OnRank(model, loss, {**watching, "to": [folder]})
        for number in range(blocks):
            for name in Random(number).sample(COPIES, len(COPIES)):
                copies[name].run(BLOCK if number else BLOCK // 2 + 3)  # no block begins with a measured step
        monitor = copies["watched"].monitor
        assert monitor is not None and monitor._worker.gather is not None
        sent = monitor._worker.gather.sent
        monitor.close()
    taken = {name: copy.timed for name, copy in copies.items()}
    return taken, sent / max(1, sum(is_measured for is_measured, _ in taken["watched"].steps))


def _together(ranks: list[Timed], first: int) -> Timed:
    """The processor time of all ranks, from this block on; the steps are those of the first rank."""
    steps = ranks[0].steps
    return Timed(
        [sum(blocks) for blocks in zip(*(timed.blocks for timed in ranks), strict=True)][first:],
        steps[len(steps) - BLOCK * (len(ranks[0].blocks) - first) :] if first else steps,
    )


def climbed(worlds: list[int]) -> None:
    """Send windows up trees of these sizes, and print how long they took; then what larger ones take on paper."""
    lines, costs = [], Costs()
    for world in worlds:
        found = on_ranks(world, _climb)
        arrived = found[0].arrived
        windows = range(1, WINDOWS)  # the first has the layouts
        climbs = [arrived[window] - max(rank.put[window] for rank in found) for window in windows]
        reduced = [found[0].reduced[window] - max(rank.called[window] for rank in found) for window in windows]
        largest = max(rank.sent for rank in found)
        lines.append(
            [
                f"{world}",
                f"{median(climbs) * 1e3:.1f} ms",
                f"{costs.climb(world, 0) * 1e3:.1f} ms",
                f"{median(reduced) * 1e3:.2f} ms",
                f"{found[1].sent:,.0f}",
                f"{largest:,.0f}",
            ]
        )
    print(f"{PLACES} places with moments, median of {WINDOWS - 1} windows\n")
    titles = ["ranks", "last share to entry", "on paper", "all_reduce", "bytes sent by a leaf", "by the rank with most"]
    print(markdown(titles, lines))
    titles = ["ranks", "levels", "bytes to the root", *(f"latency {1e6 * latency:,.0f} µs" for latency in LATENCIES)]
    print(f"\nOn paper, at {BANDWIDTH * 8 / 1e9:.0f} Gbit/s, each rank on a core of its own:\n")
    on_paper = [
        [
            f"{world:,}",
            f"{log2(world):.0f}",
            f"{costs.received(world):,}",
            *(f"{costs.climb(world, latency) * 1e3:,.1f} ms" for latency in LATENCIES),
        ]
        for world in WORLDS
    ]
    print(markdown(titles, on_paper))


class Climb:
    """When, on one rank, each window was put and arrived, and an all_reduce was called and done."""

    def __init__(self) -> None:
        self.put: list[float] = []
        self.arrived: dict[int, float] = {}
        self.called: list[float] = []
        self.reduced: list[float] = []
        self.sent = 0.0  # bytes per window


def _climb(rank: int) -> Climb:
    climb, done, world = Climb(), Event(), distributed.get_world_size()

    def deliver(entry: Entry) -> None:
        climb.arrived.setdefault(entry.step, time.monotonic())
        done.set()

    calls = Answers(deliver, lambda folder: -2, lambda news: None, print)
    gather = Gather(_seat(rank), world, Tree(rank, default_store(), "climb", "127.0.0.1"), calls)
    window = _window()
    for step in range(WINDOWS):
        distributed.barrier()
        climb.put.append(time.monotonic())
        gather.put(replace(window, step=step))
        if rank == 0:
            done.wait()
            done.clear()
        distributed.barrier()
        if step == 0:
            _await_turn(gather)
            before = gather.sent
    climb.sent = (gather.sent - before) / (WINDOWS - 1)
    size = torch.tensor(int(climb.sent))
    distributed.all_reduce(size, distributed.ReduceOp.MAX)
    values = torch.zeros(int(size) // 8, dtype=torch.float64)
    for _ in range(WINDOWS):
        distributed.barrier()
        climb.called.append(time.monotonic())
        distributed.all_reduce(values)
        climb.reduced.append(time.monotonic())
    gather.close(WINDOWS, "ended")
    return climb


class Costs:
    """What the levels of a tree take in time and bytes: at each, the shares of half of its ranks come to the others."""

    def __init__(self) -> None:
        window = _window()
        share = Share.of(window, _seat(0))
        self.begin = _seconds(lambda: Share.of(window, _seat(0)))
        self.levels: list[tuple[float, int]] = []  # seconds and bytes
        world = 1
        while world < max(WORLDS):
            other = _renumbered(share, world)
            out, back = Wire(), Wire()
            back.unpacked(out.packed(other))  # the layout, which is sent once
            data = out.packed(other)
            seconds = _seconds(lambda out=out, other=other: out.packed(other))
            seconds += _seconds(lambda back=back, data=data: back.unpacked(data))
            arrived = back.unpacked(data)
            begun = time.perf_counter()
            share.merge(arrived, {})
            self.levels.append((seconds + time.perf_counter() - begun, len(data)))
            world *= 2
        self.end = _seconds(lambda: share.snapshot(window.snapshot, 1))

    def received(self, world: int) -> int:
        """The bytes that come to the root per window."""
        return sum(size for _, size in self.levels[: round(log2(world))])

    def climb(self, world: int, latency: float) -> float:
        """Seconds from the last share to the merged entry."""
        levels = self.levels[: round(log2(world))]
        return self.begin + self.end + sum(seconds + latency + size / BANDWIDTH for seconds, size in levels)


def _seconds(call: Callable[[], object]) -> float:
    return median(timed(call) for _ in range(5))


def _seat(rank: int) -> Seat:
    return Seat(rank, "localhost", team=(rank,), averages=True)


def _window() -> Entry:
    """What a rank has measured: moments of outputs and of their gradients."""
    reduce = Reduce("moments")
    x, layer = torch.randn(64), nn.Linear(1, 1)
    for number in range(PLACES // 2):
        for port in ("output", "grad_output"):
            reduce.cell(Site(f"layers.{number}", port), layer).update(x)
    return Entry(0, 0.0, reduce.snapshot(), losses={0: 1.0})


def _renumbered(share: Share, by: int) -> Share:
    """The same of other ranks."""
    return replace(
        share,
        facts={rank + by: known for rank, known in share.facts.items()},
        tables={rank + by: table for rank, table in share.tables.items()},
        votes={
            key: [Vote(vote.bits, tuple(rank + by for rank in vote.ranks), vote.total) for vote in votes]
            for key, votes in share.votes.items()
        },
    )


def on_ranks(world: int, work: Callable[..., Result], *args: object) -> list[Result]:
    """What `work(rank, *args)` returns in as many processes, which are connected by gloo."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ProcessPoolExecutor(world, mp_context=get_context("spawn")) as processes:
        running = [processes.submit(_on_rank, rank, world, port, work, args) for rank in range(world)]
        return [one.result() for one in running]


def _on_rank(rank: int, world: int, port: int, work: Callable[..., Result], args: tuple[object, ...]) -> Result:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        return work(rank, *args)
    finally:
        distributed.destroy_process_group()
