"""Whatever happens in a session, the model has exactly the hooks that it had before."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from specimens import hooks_of
from torchhook import FeatureExtractor, HookManager, Record, Ring, SelectionError, Session, Tap, capture, measure, trace
from torchhook.core import marks
from torchhook.core.scope import sessions_here


class Fails(nn.Module):
    """Raises on its n-th call."""

    def __init__(self, error, after):
        super().__init__()
        self.error, self.left = error, after

    def forward(self, x):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return x


class Boom(Exception):
    pass


LAYERS = st.sampled_from(
    [
        lambda: nn.Linear(3, 3),
        lambda: nn.Dropout(0.5, inplace=True),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)),
        nn.Identity,
    ]
)
TREES = st.recursive(
    LAYERS.map(lambda make: make()),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda layers: nn.Sequential(*layers)),
    max_leaves=6,
)
PORTS = st.sampled_from(["input", "output", "grad_input", "grad_output", "param", "param_grad"])
ERRORS = st.sampled_from([None, Boom, KeyboardInterrupt])
WHERE = st.sampled_from(["model", "tap", "block"])


def foreign(module, args, output):
    foreign.calls += 1


@settings(max_examples=150, deadline=None)
@given(TREES, st.lists(PORTS, min_size=1, max_size=4), ERRORS, WHERE, st.integers(0, 4), st.booleans(), st.data())
def test_fuzzed_over_trees_taps_and_failure_points(tree, ports, error, where, after, shared, data):
    culprit = Fails(error, after) if error is not None and where == "model" else nn.Identity()
    model = nn.Sequential(tree, culprit, nn.Linear(3, 3))
    foreign.calls = 0
    model[0].register_forward_hook(foreign)
    before, listening = hooks_of(model), sessions_here.get()
    left = [after]

    def observe(event):
        left[0] -= 1
        if error is not None and where == "tap" and left[0] < 0:
            raise error

    actions = [data.draw(st.sampled_from([observe, Record(Ring(max_entries=5))])) for _ in ports]
    taps = [
        Tap(data.draw(st.sampled_from(["**", nn.Linear, "0", "", "2"])), action, port=port)
        for action, port in zip(actions, ports, strict=True)
    ]
    passes = 0
    try:
        with Session(model, taps, scope="all" if shared else "thread"):
            for _ in range(3):
                model(torch.ones(2, 3)).sum().backward()
                passes += 1
            if error is not None and where == "block":
                raise error
    except SelectionError:  # no parameters there
        assert "param" in ports and passes == 0
    except (Boom, KeyboardInterrupt) as caught:
        assert error is not None and isinstance(caught, error)
    assert hooks_of(model) == before and sessions_here.get() == listening and marks._listeners == ()
    fired = foreign.calls
    assert fired >= passes
    culprit.left = 9
    model(torch.ones(2, 3)).sum().backward()
    assert foreign.calls == fired + 1
    assert not any(p._backward_hooks for p in model.parameters())


SCOPES = {
    "capture": lambda model: capture(model, grads=True, inputs=True, params=True).open(),
    "session": lambda model: Session(model, [Tap("0", print, port="param_grad"), Tap("", print)]).open(),
    "stop": lambda model: capture(model, "0", stop=True).open(),
    "trace": lambda model: trace(model, progress=False).open(),
}


@pytest.mark.parametrize("opened", SCOPES.values(), ids=SCOPES.keys())
def test_dropping_the_object_takes_the_hooks_away(opened):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    before, others = hooks_of(model), sessions_here.get()
    thing = opened(model)
    assert hooks_of(model) != before and sessions_here.get() - others
    del thing
    gc.collect()
    assert hooks_of(model) == before and sessions_here.get() <= others  # which another test may have left open


@pytest.mark.parametrize("opened", SCOPES.values(), ids=SCOPES.keys())
def test_the_model_is_not_kept_alive(opened):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    gone = weakref.ref(model)
    thing = opened(model)
    del model, thing
    gc.collect()
    assert gone() is None


def test_an_error_while_attaching_leaves_nothing(monkeypatch):
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)])
    before = hooks_of(model)
    real, calls = nn.Module.register_forward_hook, []

    def failing(module, *args, **kwargs):
        calls.append(module)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "register_forward_hook", failing)
    with pytest.raises(KeyboardInterrupt):
        capture(model).open()
    assert len(calls) == 4 and hooks_of(model) == before


def test_feature_extractor_and_manager_leave_nothing():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    before = hooks_of(model)
    extractor = FeatureExtractor(model, ["0"])
    extractor(torch.ones(1, 3))
    assert hooks_of(model) == before
    with pytest.raises(RuntimeError):
        extractor(torch.ones(1, 4))
    assert hooks_of(model) == before
    manager = HookManager(model)
    manager.add("0")
    del manager
    assert hooks_of(model) == before


@pytest.mark.parametrize("verb", [capture, measure])
def test_what_a_pass_made_is_gone_without_the_garbage_collector(verb):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    x = torch.randn(4, 3, 16, 16)

    def tensors_after(passes):
        for _ in range(passes):
            model(x).sum().backward()
        return sum(issubclass(type(known), torch.Tensor) for known in gc.get_objects())

    with verb(model, grads=True, inputs=True):
        tensors_after(3)
        gc.collect()
        gc.disable()
        try:
            before = tensors_after(1)
            assert tensors_after(5) == before
        finally:
            gc.enable()
