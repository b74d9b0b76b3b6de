"""A monitor beside a compiled training: steps that are not measured run what they would run without it."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from torchhook import Monitor, capture
from torchhook.training.logs import Log

pytestmark = pytest.mark.usefixtures("nothing_compiled")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.block = nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x):
        return self.block(self.up(x))


def outer(model):
    return torch.compile(model, backend="aot_eager")


def own(model):
    model.compile(backend="aot_eager")
    return model


def part(model):
    model.block.compile(backend="aot_eager")
    return model


class Kept(Log):
    def __init__(self):
        self.windows = {}

    def write(self, entry):
        if entry.snapshot:
            self.windows[entry.step] = entry.snapshot


class Training:
    """A watched training, step by step."""

    def __init__(self, model, **options):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
        self.monitor = Monitor(model, self.optimizer, price=None, **{"to": [], **options}) if options else None
        self.batches = torch.Generator().manual_seed(0)

    def step(self):
        """One step; returns whether it was measured, and its loss."""
        is_measured = self.monitor is not None and self.monitor.is_measuring
        loss = self.model(torch.randn(3, 4, generator=self.batches)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.step(loss)
        return is_measured, loss.item()

    def steps(self, count):
        return [self.step() for _ in range(count)]


def ops_of(call):
    """How many of our ops run in `call`."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return sum(event.name.startswith("torchhook::") for event in seen.events())


@pytest.mark.parametrize("compiled", [outer, own])
def test_idle_steps_run_the_graph_that_has_no_taps(compiled):
    model = Net()
    plain, training = Training(copy.deepcopy(model)), Training(compiled(model), every=3)
    losses = training.steps(4)  # measured, idle, idle, measured
    graphs = counters["stats"]["unique_graphs"]
    assert [ops_of(lambda: losses.append(training.step())) > 0 for _ in range(6)] == [False, False, True] * 2
    assert counters["stats"]["unique_graphs"] == graphs == 2
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in plain.steps(10)])
    training.monitor.close()
    assert ops_of(training.step) == 0 and counters["stats"]["unique_graphs"] == graphs


def test_a_model_that_ran_before_it_was_watched_keeps_its_graph():
    training = Training(outer(Net()))
    training.step()
    watched = Training(training.model, every=2)
    assert [ops_of(watched.step) > 0 for _ in range(4)] == [True, False, True, False]
    assert counters["stats"]["unique_graphs"] == 2
    watched.monitor.close()


@pytest.mark.parametrize("compiled", [outer, own, part])
@pytest.mark.parametrize("closes", [False, True])
def test_a_capture_that_comes_in_an_idle_step_and_the_monitor_both_see_all(compiled, closes):
    log = Kept()
    training = Training(compiled(Net()), every=4, to=[log])
    training.steps(6)
    with capture(training.model, "block", keep=None) as acts:  # where the monitor itself has no hook
        training.steps(1 if closes else 7)
        assert len(acts["block"].outputs) == (1 if closes else 7)
    training.steps(13 - training.monitor.steps)
    training.monitor.close()
    assert list(log.windows) == [0, 4, 8, 12]
    seen = {(window["up"].count, window["block.1", "grad_output"].count) for window in log.windows.values()}
    assert seen == {(24, 12)}
