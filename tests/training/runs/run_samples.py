"""What the tests of runs write: snapshots that follow from the number of their step, and how to compare them."""

import functools

import torch
from torch import nn

from torchhook.core.site import Site
from torchhook.rules.history import settled
from torchhook.stats.reduce import Reduce
from torchhook.training.logs import Entry

SITES = ("conv", "layers.0.fc", "head")


@functools.lru_cache(None)
def module():
    return nn.Linear(2, 2)


def snapshot_at(step, stats=("moments",), sites=SITES, ports=("output", "param"), size=50):
    """What was measured in a step; always the same for the same number."""
    random = torch.Generator().manual_seed(step)
    reduce = Reduce(*stats)
    for number, site in enumerate(sites):
        for port in ports:
            reduce.cell(Site(site, port), module()).update(torch.randn(4, size, generator=random) * (number + 1))
    return settled(reduce.snapshot())


def entry_at(step, **settings):
    return entry_of(step, snapshot_at(step, **settings))


def entry_of(step, snapshot):
    return Entry(step, 1000.0 + step, snapshot, losses={step: 1 / (step + 1)}, rate=1e-3 * step)


def written(log, steps, **settings):
    """Begin a log and write some steps to it."""
    log.begin({"model": "Net", "settings": {"lr": 0.1}})
    for step in steps:
        log.write(entry_at(step, **settings))
    return log


def states_of(snapshot):
    """Everything that is measured, as bits: NaN equals itself, and -0 is not 0."""
    return {
        place: {
            key: (tuple(state.shape), state.contiguous().view(torch.int64).tolist()) for key, state in found.items()
        }
        for place, found in ((place, snapshot[place].states()) for place in snapshot)
    }
