"""Entries for the logs: what a monitor would give them."""

import threading
import time
import warnings
from contextlib import contextmanager

import torch

from torchhook import Reduce, Site
from torchhook.core.findings import Finding, Report, Trial
from torchhook.training.logs import Entry

SCRIPT = "blocks[0].<script>alert(1)</script>"
TWIN = "blocks(0).<script>alert(1)</script>"  # the same, once what is illegal is replaced
NAMES = [SCRIPT, TWIN, "слой.重み", "x" * 400, "x" * 399 + "y", "a//b", "..", "", "fc\ud800", "fc\x00", "fc", "Ф" * 150]

TRIED = Trial("learning rate a tenth", without=2.28, repaired=0.31, steps=100)
BROKEN = Finding("TH101", "error", "312 values are NaN", SCRIPT, 7, hint="Look at <b>bold</b>.", tried=TRIED)
LESSER = Finding("TH403", "warning", "a step moves the weight by 41 %", "fc.weight", 9)
REPORT = Report((BROKEN, LESSER), model="<Net>", checked=("TH101",))


def entry(step, places, **more):
    """What was seen at `places`: tensors by path, or by path and port."""
    reduce = Reduce("moments", "histogram")
    for place, values in places.items():
        path, port = (place, "output") if isinstance(place, str) else place
        reduce.cell(Site(path, port), None).update(values)
    return Entry(step, 1.7e9 + step, reduce.snapshot(), **more)


def many(step, places):
    """An entry of so many layers, whose names have leading zeros."""
    return entry(step, {f"layers.{number:04d}": torch.ones(3) for number in range(places)})


@contextmanager
def silence():
    """Nothing is warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        yield
    assert not [str(warning.message) for warning in told if warning.category is UserWarning]


def elsewhere(work):
    """Do it in another thread, as the monitor does, and wait for that; say how long it took."""
    raised = []

    def guarded():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread, begun = threading.Thread(target=guarded), time.perf_counter()
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return time.perf_counter() - begun
