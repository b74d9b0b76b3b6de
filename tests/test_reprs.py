"""No object that a user meets is shown as a bare address."""

import inspect
import io
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchhook as th
from torchhook import compare, edits, explain, prune, rules, stats

BARE = re.compile(r" object at 0x|<function|<bound method|<lambda> at")


def net():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))


def observe(event):
    pass


X = torch.randn(4, 1, 8, 8)
LOADER = [(X, torch.tensor([0, 1, 0, 1])) for _ in range(2)]


def captured(model):
    with th.capture(model) as acts:
        model(X)
    return acts


def measured(model):
    with th.measure(model, stats=("moments", "histogram", "quantiles", "channels", "covariance", "topk")) as measured:
        model(X)
    return measured


def traced(model):
    with th.trace(model, file=io.StringIO()) as calls:
        model(X)
    return calls


def events(model):
    seen = []
    with th.Session(model, [th.Tap("0", seen.append)]):
        model(X)
    return seen


MADE = {
    "zero": lambda model: [edits.zero, edits.zero(at=0)],
    "ablate": lambda model: edits.ablate(channels=[1], with_=captured(model)),
    "patch": lambda model: edits.patch(captured(model)),
    "apply": lambda model: [edits.apply(lambda x: x), edits.apply(torch.relu), edits.apply(nn.ReLU())],
    "other edits": lambda model: [edits.add(X), edits.scale(2.0), edits.clamp(max=1), edits.noise(0.1)],
    "schedules": lambda model: [th.every(10), th.first(3), th.sample(0.5, seed=1)],
    "selectors": lambda model: [th.of_type(nn.ReLU), th.glob("*"), ~th.regex("0"), th.marked("m")],
    "sinks": lambda model: [th.Record(), th.Reduce("moments"), th.Ring(max_passes=1), th.Ring(max_passes=1)],
    "taps": lambda model: [
        th.Tap("0", observe, when=th.every(2)),
        th.Tap("0", lambda module, inputs, output: None),
        th.Tap(lambda path, module: True, edits.zero),
        th.Tap("0", th.Record(), transform=torch.relu),
    ],
    "sessions": lambda model: [th.Session(model), th.edit(model, {"0": torch.relu})],
    "not open yet": lambda model: [th.capture(model), th.measure(model), th.trace(model)],
    "events": events,
    "capture": lambda model: [captured(model), captured(model)["0"], captured(model).session],
    "stats": lambda model: [measured(model), measured(model)["0"], *measured(model)["0"].values()],
    "trace": lambda model: [traced(model), traced(model).calls[0]],
    "skip": lambda model: th.skip(model, "1"),
    "arm": lambda model: th.arm(model),
    "clip_gradients": lambda model: th.clip_gradients(model, value=1.0),
    "catch_nonfinite": lambda model: th.catch_nonfinite(model),
    "HookManager": lambda model: [th.HookManager(model), th.HookManager(model).add("0")],
    "hooks": lambda model: (th.HookManager(model).add("0"), th.hooks(model)),
    "ModelDiagnostics": lambda model: th.ModelDiagnostics(model, "0"),
    "overhead": lambda model: th.overhead(model, X, runs=1),
    "sweep": lambda model: th.sweep(model, X, ["0"], edits.zero, torch.sum),
    "Log": lambda model: th.Log(),
    "check": lambda model: th.check(measured(model)),
    "Profile": lambda model: th.Profile.of(model, LOADER),
    "diff": lambda model: th.diff(model, model, X),
    "FeatureExtractor": lambda model: th.FeatureExtractor(model, ["0"]),
    "prune": lambda model: [
        importance := prune.importance(model, LOADER, "taylor", F.cross_entropy),
        prune.plan(importance, 0.2),
    ],
    "explain": lambda model: explain.grad_cam(model, X, 0, "0"),
    "compare": lambda model: [compare.cka(model, None, LOADER), compare.inputs(model, X, X)],
}


@pytest.mark.parametrize("name", MADE)
def test_what_verbs_make_is_shown_in_words(name):
    made = MADE[name](net())
    for one in made if isinstance(made, (list, tuple)) and not hasattr(made, "_fields") else [made]:
        assert not BARE.search(repr(one)), repr(one)
        assert not BARE.search(str(one)), str(one)


def test_a_monitor_its_entries_and_its_logs(tmp_path):
    seen = []

    class Keeping(th.Log):
        def write(self, entry):
            seen.append(entry)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with th.Monitor(model, optimizer, every=1, price=None, to=[tmp_path, log := Keeping()]) as monitor:
        for _ in range(3):
            loss = model(X).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
    for one in (monitor, log, monitor.run, monitor.report, th.Run(monitor.run) if monitor.run else None, *seen):
        assert not BARE.search(repr(one)), repr(one)
    assert seen


def test_every_public_class_has_a_repr_of_its_own():
    named = {name: getattr(th, name) for name in th.__all__}
    named |= {f"{room.__name__}.{name}": getattr(room, name) for room in (edits, stats, rules) for name in room.__all__}
    bare = [
        name
        for name, kind in named.items()
        if inspect.isclass(kind) and not issubclass(kind, BaseException) and kind.__repr__ is object.__repr__
    ]
    assert bare == []


def test_edits_and_schedules_show_their_arguments():
    assert repr(edits.ablate(channels=[1])) == "ablate(channels=[1])"
    assert repr(edits.add(torch.ones(4))) == "add(tensor 4)"
    assert repr(edits.patch(torch.ones(2, 3), where=slice(1, 2))) == "patch(tensor 2×3, where=slice(1, 2, None))"
    assert repr(edits.apply(torch.relu, at=0)) == "apply(relu, at=0)"
    assert repr(th.every(10)) == "every(10)"
    assert repr(th.Record(copy="clone")) == "Record(copy='clone')"
    assert repr(th.Tap(nn.ReLU, edits.scale(2.0), when=th.first(3))) == "Tap(ReLU, scale(2.0), when=first(3))"
    assert repr(edits.ablate(channels=list(range(100)))) == "ablate(channels=[0, 1, 2, 3, 4, 5, … 94 more])"

    class Sign(th.Edit):
        def change(self, x, call):
            return x.sign()

    assert repr(Sign(at=1)) == "Sign(at=1)"
