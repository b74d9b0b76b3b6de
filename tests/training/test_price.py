"""What watching costs stays under its price: in simulated time, to see long trainings, and in real ones."""

import gc
import re
import time
import weakref
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchhook import Monitor, Run, StopTraining, measure
from torchhook.render.words import header
from torchhook.training import price as account
from torchhook.training import timeline
from torchhook.training.price import Kind, Price


class Simulated:
    """A training whose steps take as long as it is told, and its price."""

    def __init__(self, monkeypatch, step, costs, beside, share=0.02, every=10, **options):
        self.now = 0.0
        for module in (account, timeline):
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        self.step, self.costs, self.beside, self.every = step, costs, beside, every
        self.price = Price(share, nn.Linear(1, 1), **options)
        self.price.begin(Kind.RARE)
        self.kind, self.steps, self.spent, self.plain, self.measured = Kind.RARE, 0, 0.0, 0.0, [0]
        self.most_overdrawn, self.owes, self.left = 0.0, False, 0

    def run(self, steps, pause=lambda step: 0.0):
        for _ in range(steps):
            cost = 0.0 if self.kind is None else self.costs[self.kind]
            self.now += self.step + cost + pause(self.steps)
            self.steps += 1
            ended, self.kind = self.kind, None
            if ended is not None:
                self.price.book_beside(self.beside)
                self.spent += cost + self.beside
            self.plain += self.step
            if self.steps % self.every == 0 and not self.price.is_refusing:
                number = len(self.measured)
                self.owes |= number in (4, 8, 16, 32, 64) or number % 100 == 0
                usual = Kind.SELDOM if number % 10 == 0 or number < 5 else Kind.OFTEN
                kinds = [Kind.RARE, usual] if self.owes else [usual]
                self.kind = next((kind for kind in kinds if self.price.allows(kind)), None)
                self.owes &= self.kind is not Kind.RARE
                if self.kind is not None:
                    self.measured.append(self.steps)
            if self.left and self.kind is None:
                self.left -= 1
                continue
            self.price.end_step(ended, self.kind is not None, self.now, self.left)
            self.left = self.price.quiet
            self.most_overdrawn = max(self.most_overdrawn, self.spent - 0.02 * self.plain)
        return self


COSTS = {Kind.OFTEN: 1.0, Kind.SELDOM: 2.0, Kind.RARE: 5.0}


def costs(unit):
    return {kind: cost * unit for kind, cost in COSTS.items()}


@pytest.mark.parametrize("step, unit", [(0.0005, 0.002), (0.005, 0.005), (0.05, 0.02), (0.03, 0.1), (0.014, 0.2)])
def test_a_long_training_stays_under_its_price_and_uses_it(monkeypatch, step, unit):
    training = Simulated(monkeypatch, step, costs(unit), unit / 2).run(round(80 / step))
    assert training.spent <= 0.02 * training.plain * 1.02
    asked = training.steps / 10 * 1.6 * unit  # what every tenth step would cost
    assert training.spent >= 0.7 * min(0.02 * training.plain, asked)


@pytest.mark.parametrize("is_prompt", [False, True])
def test_a_short_training_is_overdrawn_by_a_second_at_most(monkeypatch, is_prompt):
    training = Simulated(monkeypatch, 0.03, costs(0.04), 0.02, is_prompt=is_prompt).run(400)
    assert training.measured[:6] == [0, 10, 20, 30, 40, 50] and len(training.measured) < 20
    assert 0.2 < training.most_overdrawn <= 1.0


def test_a_cheap_measurement_is_made_as_often_as_it_is_asked_for(monkeypatch):
    training = Simulated(monkeypatch, 0.1, costs(0.001), 0.001).run(1000)
    assert training.measured == list(range(0, 1001, 10))


def test_evaluations_are_neither_cost_nor_time_of_the_training(monkeypatch):
    plain = Simulated(monkeypatch, 0.01, costs(0.02), 0.01).run(20_000)
    paused = Simulated(monkeypatch, 0.01, costs(0.02), 0.01).run(20_000, lambda step: 30.0 * (step % 1000 == 0))
    assert len(paused.measured) == pytest.approx(len(plain.measured), rel=0.15)


def test_a_training_that_becomes_slower_is_measured_more_often(monkeypatch):
    training = Simulated(monkeypatch, 0.01, costs(0.05), 0.0).run(10_000)
    quick = len(training.measured)
    training.step = 0.04
    training.run(10_000)
    assert len(training.measured) - quick > 3 * quick
    assert training.spent <= 0.02 * training.plain * 1.02


def test_an_alarm_is_paid_from_the_savings_and_an_urgent_one_at_once(monkeypatch):
    training = Simulated(monkeypatch, 0.01, costs(0.1), 0.0).run(20_000)
    while training.price.allows(Kind.OFTEN):
        pass
    training.price.alarm()
    assert training.price.allows(Kind.OFTEN)
    while training.price.allows(Kind.OFTEN):
        pass
    training.price.alarm(is_urgent=True)
    assert training.price.allows(Kind.OFTEN) and not training.price.allows(Kind.OFTEN)


# ------------------------------------------------------------ real trainings


def mlp():
    x, y = torch.randn(64, 64), torch.randint(10, (64,))
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), x, y


def cnn(width, batch):
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    layers = [nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)), x, y


class Trained:
    """A copy of a model that is trained in blocks, whose processor time is added up."""

    def __init__(self, model, x, y, **watching):
        self.model, self.x, self.y, self.seconds = deepcopy(model), x, y, 0.0
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.monitor = Monitor(self.model, self.optimizer, **watching) if watching else None

    def run(self, steps):
        begun = time.process_time()
        for _ in range(steps):
            loss = F.cross_entropy(self.model(self.x), self.y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.monitor is not None:
                self.monitor.step(loss)
        if self.monitor is not None:
            self.monitor._worker._windows.join()  # what it does beside the training takes the same processor
        self.seconds += time.process_time() - begun


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "made, steps",
    [(mlp, 4000), (lambda: cnn(16, 8), 500), (lambda: cnn(32, 48), 80)],
    ids=["0.5 ms", "5 ms", "50 ms"],
)
def test_each_training_costs_little_however_often_it_is_asked_for(tmp_path, made, steps):
    """The price, and the second that a short training may overdraw; without a price, the first takes 9 × as long."""
    torch.manual_seed(0)
    task = made()
    plain, watched = Trained(*task), Trained(*task, every=1, to=tmp_path)
    for _ in range(10):
        plain.run(steps // 10)
        watched.run(steps // 10)
    watched.monitor.close()
    assert watched.seconds < 1.02 * plain.seconds + 1.0
    with Run(watched.monitor.run) as run:
        assert run.steps[0] == 0 and 4 <= len(run.steps) < steps / 4
        said = run.about["watching"]
        every = re.fullmatch(r"measured 1 step in ([\d,]+) to stay under 2 %", said)[1].replace(",", "")
        assert int(every) == pytest.approx(steps / len(run.steps), rel=0.1)
        assert said == watched.monitor.report.about["watching"]
        assert run.about["price"] == 0.02 and len(run.losses) == steps
    assert said in header(watched.monitor.report)[0]


@pytest.mark.usefixtures("one_thread")
def test_what_is_measured_belongs_to_its_step_though_most_quick_steps_are_not_looked_at(tmp_path):
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with Monitor(model, optimizer, every=10, to=tmp_path) as monitor:
        for step in range(500):
            loss = model(torch.full((8, 4), float(step))).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    with Run(monitor.run) as run:
        steps, paths, values = run.series("mean")
        assert values[paths.index("0")].tolist() == steps and {step % 10 for step in steps} == {0}
        assert len(steps) > 2 and run.last_step == 499


def test_idle_steps_have_no_hooks():
    model, x, y = mlp()
    with Monitor(model, optimizer := torch.optim.SGD(model.parameters(), 0.1), every=3, price=None, to=[]) as monitor:
        hooks = []
        for _ in range(7):
            hooks.append(
                sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
                + sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())
            )
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            monitor.step()
    assert [bool(count) for count in hooks] == [True, False, False, True, False, False, True]


def test_what_is_not_finite_is_found_soon_though_few_steps_are_measured():
    model, x, y = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with pytest.raises(StopTraining, match=r"TH10[14] error.*, step 200\d"):
        with Monitor(model, optimizer, every=100, to=[], on_finding="stop") as monitor:
            for step in range(4000):
                if step == 2001:
                    with torch.no_grad():
                        model[0].weight[0, 0] = torch.nan
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step(loss)
                time.sleep(0.002 if step > 2001 else 0)
    assert monitor.steps < 2090


@pytest.mark.parametrize("price", [0, -0.1, 1, 2, "2%", True])
def test_a_price_that_is_no_share(price):
    with pytest.raises(ValueError, match="price must be a share"):
        Monitor(nn.Linear(2, 2), to=[], price=price)


# ------------------------------------------------------------ letting go


def train(model, optimizer, after, steps=12):
    x, y = torch.randn(64, 64), torch.randint(10, (64,))
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(loss)


def watched_by_monitor(model, optimizer):
    monitor = Monitor(model, optimizer, every=1, to=[])
    monitor.tells = False
    train(model, optimizer, monitor.step)
    monitor.close()
    return monitor


def measured(model, optimizer):
    with measure(model, grads=True, params=True, param_grads=True, updates=True, optimizer=optimizer) as stats:
        train(model, optimizer, lambda loss: None)
    return stats


@pytest.mark.parametrize("watch", [watched_by_monitor, measured])
def test_what_was_watched_is_freed_without_the_garbage_collector(watch):
    model, _, _ = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)  # the first of a process leaves its frames in a cycle
    gc.collect()
    gc.disable()
    try:
        result = watch(model, optimizer)
        gone = [weakref.ref(thing) for thing in (model, optimizer, model[0].weight, model[0].weight.grad)]
        if watch is measured:  # a result that can still be read knows its model
            del result
        del model, optimizer
        assert [reference() for reference in gone] == [None] * 4
    finally:
        gc.enable()


def test_the_price_is_named_only_if_it_held_measurements_back():
    price = Price(0.02, nn.Linear(1, 1), every=2)
    price.steps, price.measured = 100, 50
    assert price.did["said"] == "measured 1 step in 2"
    price.measured = 10
    assert price.did["said"] == "measured 1 step in 10 to stay under 2 %"
