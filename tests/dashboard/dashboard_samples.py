"""Runs to look at: of a training that is well, of one with a dead layer, of any size, with any names."""

import math
import sqlite3
from contextlib import closing

import torch
import torch.nn.functional as F
from torch import nn

from torchhook import Finding, Monitor, Report
from torchhook.core.site import Site
from torchhook.rules.history import settled
from torchhook.rules.ranks import LOST, Member, RankStep
from torchhook.stats.reading import Snapshot
from torchhook.stats.reduce import Reduce
from torchhook.training.logs import Entry
from torchhook.training.runs import RunLog
from torchhook.training.runs.schema import FILE

HOSTILE = (
    "<script>window.__pwned=1</script>",
    "<img src=x onerror=window.__pwned=1>",
    "<a href='javascript:window.__pwned=1'>\"'`</a>",
    "a/b?c=d&e#f%2e%2e",
    "größe.層.🙂",
    "\x1b[31m\u202ereversed",
    "long" * 75,
    "<b>bold</b>",  # which plotly would draw, as it would the next
    "<a href='//x'>link</a>",
)
_MODULE = nn.Linear(2, 2)


def snapshot(number, sites=("conv", "fc"), ports=("output", "grad_output"), stats=("moments",), scale=1.0):
    """What was measured in a step; always the same for the same number."""
    random = torch.Generator().manual_seed(number)
    reduce = Reduce(*stats)
    for depth, site in enumerate(sites):
        for port in ports:
            values = torch.randn(64, generator=random) * (depth + 1) * scale
            reduce.cell(Site(site, port), _MODULE).update(values)
    return settled(reduce.snapshot())


def append(log, steps, **settings):
    """Some steps more, with a loss each."""
    for step in steps:
        log.write(Entry(step, 1e9 + step, snapshot(step, **settings), losses={step: 2 * math.exp(-step / 50) + 0.1}))


def written(folder, steps, **settings):
    """A run that goes on: its log."""
    log = RunLog(folder)
    log.begin({"model": "Net"})
    append(log, steps, **settings)
    return log


def ended(folder, steps=range(3), **settings):
    """A run that is over: its folder."""
    written(folder, steps, **settings).end(Report(model="Net"), "ended")
    return folder


def trained(root, name, is_dead=False, steps=40):
    """A real training, watched: a small network, all of whose units can be dead from the first; its folder."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(1, 8, 3))
    model.add_module("relu", nn.ReLU())
    model.add_module("flat", nn.Flatten())
    model.add_module("head", nn.Sequential(nn.Linear(8 * 36, 16), nn.Tanh(), nn.Linear(16, 4)))
    if is_dead:
        nn.init.constant_(model.conv.bias, -10)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with Monitor(model, optimizer, every=1, price=None, to=[root], name=name) as monitor:
        for _ in range(steps):
            labels = torch.randint(0, 4, (16,))
            images = torch.randn(16, 1, 8, 8) + labels.view(-1, 1, 1, 1)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor.run


def hostile(folder):
    """Names that mean harm, wherever there are names."""
    sites = tuple(f"{name}.{inner}" for name in HOSTILE for inner in ("0", "fc"))
    log = RunLog(folder)
    log.begin({"model": HOSTILE[0], "optimizer": HOSTILE[1], "every": HOSTILE[2]})
    append(log, range(3), sites=sites, ports=("output", "grad_output", "param_grad"))
    for site in sites:
        log.found(Finding(HOSTILE[0], "error", HOSTILE[1], site, 1, {HOSTILE[2]: HOSTILE[0]}, hint=HOSTILE[0]))
    log.write(Entry(3, 0.0, Snapshot({}), maps={sites[0]: torch.rand(2, 4, 4)}))
    log.end(Report(model=HOSTILE[0]), "ended")
    return folder


def large(folder, layers=500, windows=2000, losses=20_000):
    """As a long training of a deep network leaves it. A few windows are written, and copied again and again."""
    sites = [f"blocks.{number // 10}.{number % 10}.projection" for number in range(layers)]
    log = RunLog(folder)
    log.begin({"model": "Deep"})
    for number in range(8):
        log.write(Entry(number, 1e9, snapshot(number, sites, scale=1 / (1 + number))))
    for number in range(20):
        site = sites[number * 7 % layers]
        log.found(Finding("TH201", "warning", f"Finding number {number}", site, number * losses // 20))
    log.write(Entry(8, 1e9, Snapshot({}), losses={step: 2 * math.exp(-step / 5000) + 0.1 for step in range(losses)}))
    log.end(Report(model="Deep"), "ended")
    every = losses // windows
    with closing(sqlite3.connect(folder / FILE)) as db, db:
        for step in range(losses - 1, 8, -every):
            copied = {"step": step, "of": step // every % 8}
            db.execute("INSERT INTO windows SELECT :step, time, rate FROM windows WHERE step = :of", copied)
            db.execute("INSERT INTO states SELECT :step, layout, data FROM states WHERE step = :of", copied)
    return folder


def garbage(folder):
    """Has the name of a run's file, and nothing of a run."""
    folder.mkdir()
    (folder / FILE).write_bytes(b"SQLite format 3\x00" + bytes(range(256)) * 64)
    return folder


def newer(folder):
    """As a later torchhook might write it."""
    ended(folder)
    with closing(sqlite3.connect(folder / FILE)) as db:
        db.execute("PRAGMA user_version = 99")
    return folder


def ranked(folder, found=()):
    """A run of three ranks: its log.

    Rank 1 is odd in the last measured step, and was lost. Of step 3 only the losses are known, and of what came before
    the first step only the parameters.
    """
    places = [("fc", "output"), ("head", "output")]
    log = RunLog(folder)
    log.begin({"model": "Net"})
    log.write(Entry(-1, 0.0, Snapshot({}), ranks=RankStep(-1, 3, parameters=4)))
    for finding in found:
        log.found(finding)
    for step in range(3):
        sizes = [1.0, 100.0 if step == 2 else 1.0, 1.0]
        tables = {rank: torch.tensor([[0.0, size, -3, 3, 0.1, 0]] * 2) for rank, size in enumerate(sizes)}
        members = {rank: Member(host, 0, rank, step) for rank, host in enumerate("aba")}
        if step == 2:
            members[1] = members[1]._replace(state=LOST)
        facts = {rank: {"loss": 1.0 / (step + 1), "grad_norm": size} for rank, size in enumerate(sizes)}
        reduce = Reduce("moments")
        for path, _ in places:
            reduce.cell(Site(path), torch.nn.Linear(1, 1)).update(torch.randn(8))
        known = RankStep(step, 3, members, facts, places, tables)
        log.write(Entry(step, 0.0, reduce.snapshot(), losses={step: 1.0}, ranks=known))
    log.write(Entry(3, 0.0, Snapshot({}), ranks=RankStep(3, 3, members, facts)))
    return log
