"""The shortcut from a call to the hook of a capture changes nothing: not the order of hooks, nor which of them run."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from specimens import hooks_of
from torchhook import Record, Session, Tap, capture
from torchhook.core.hooks.shortcut import Shortcut
from torchhook.core.torch_internals import graph_count

SLOT = "_compiled_call_impl"


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch):
    """Other tests of this process compile."""
    monkeypatch.setattr("torchhook.core.hooks.shortcut.graph_count", lambda: 0)


def net():
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))


def double(module, args, output):
    return 2 * output


def test_there_is_one_on_every_captured_leaf_until_the_end():
    model = net()
    before = hooks_of(model)
    with capture(model) as acts:
        assert all(isinstance(vars(layer)[SLOT], Shortcut) for layer in model)
        out = model(torch.ones(1, 3))
        assert len(acts) == 3 and acts["2"].output.equal(out)
    assert hooks_of(model) == before


def test_hooks_that_come_later_run_after_the_capture():
    model, x = net(), torch.ones(1, 3)
    with capture(model) as acts:
        handle = model[2].register_forward_hook(double)
        assert model(x).equal(2 * acts["2"].output)
        handle.remove()
        assert model(x).equal(acts["2"].output) and len(acts["2"].outputs) == 1


def test_hooks_that_are_there_already_run_before_it():
    model, x = net(), torch.ones(1, 3)
    model[2].register_forward_hook(double)
    with capture(model) as acts:
        assert SLOT not in vars(model[2])
        assert model(x).equal(acts["2"].output)


def test_hooks_of_other_kinds_run():
    model, x, seen = net(), torch.ones(1, 3, requires_grad=True), []
    with capture(model):
        handles = [
            model[0].register_forward_pre_hook(lambda *_: seen.append("before")),
            model[1].register_full_backward_pre_hook(lambda *_: seen.append("before backward")),
            model[2].register_full_backward_hook(lambda *_: seen.append("backward")),
            register_module_forward_pre_hook(lambda *_: seen.append("before any")),
            register_module_forward_hook(lambda *_: seen.append("after any")),
        ]
        try:
            model[1].inplace = False  # which torch's own backward hooks do not allow
            model(x).sum().backward()
        finally:
            for handle in handles:
                handle.remove()
    kinds = {"before": 1, "before backward": 1, "backward": 1, "before any": 4, "after any": 4}
    assert {kind: seen.count(kind) for kind in kinds} == kinds


def test_a_hook_whose_dictionary_was_replaced_does_not_run():
    model, x = net(), torch.ones(1, 3)
    with capture(model, on_silent="ignore") as acts:
        model[0]._forward_hooks = OrderedDict()
        model[2]._forward_hooks = OrderedDict({0: double})
        out = model(x)
        assert list(acts) == ["1"]
        assert out.equal(2 * nn.functional.linear(acts["1"].output, model[2].weight, model[2].bias))


def test_a_copy_by_hand_runs_its_own_forward():
    layer, x = nn.Linear(3, 3), torch.ones(1, 3)
    with capture(nn.Sequential(layer), on_silent="ignore"):
        twin = nn.Linear(3, 3)
        vars(twin)[SLOT] = vars(layer)[SLOT]
        replica = copy.copy(layer)
        vars(replica).update(vars(layer), _parameters=dict(twin._parameters))
        assert twin(x).equal(replica(x)) and not twin(x).equal(layer(x))


def test_a_slot_that_something_else_takes_stays_with_it():
    model, x = net(), torch.ones(1, 3)
    with capture(model) as outer, capture(model[0]) as inner:
        model(x)
        assert outer["0"].output.equal(inner[""].output)
        model[1].compile(backend="eager")
        compiled = vars(model[1])[SLOT]
    assert [vars(layer).get(SLOT) for layer in model] == [None, compiled, None]


def test_sessions_may_end_in_any_order():
    model, x = net(), torch.ones(1, 3)
    before = hooks_of(model)
    first, second, third = capture(model).open(), capture(model[0]).open(), capture(model, nn.Linear).open()
    model(x)
    for acts in (first, second, third):
        acts.close()
    assert first["0"].output.equal(second[""].output) and first["2"].output.equal(third["2"].output)
    assert hooks_of(model) == before


def test_a_session_that_pauses_takes_it_away():
    model, x = net(), torch.ones(1, 3)
    before = hooks_of(model)
    with Session(model, [Tap(nn.Linear, Record())]) as session:
        attached = hooks_of(model)
        session.pause()
        assert hooks_of(model) == before
        session.resume()
        assert {place: held for place, held in hooks_of(model).items() if place[0]} == {
            place: held for place, held in attached.items() if place[0]
        }
        model(x)
    assert hooks_of(model) == before


def test_classes_that_call_in_their_own_way_keep_it():
    class Loud(nn.Linear):
        def _call_impl(self, *args, **kwargs):
            return 2 * super()._call_impl(*args, **kwargs)

    class Counting(nn.Linear):
        registered = 0

        def register_forward_hook(self, hook, **options):
            self.registered += 1
            return super().register_forward_hook(hook, **options)

    model, x = nn.Sequential(Loud(3, 3), Counting(3, 3)), torch.ones(1, 3)
    out = model(x)
    with capture(model) as acts:
        assert model(x).equal(out) and acts["1"].output.equal(out)
    assert model[1].registered == 1
    assert not any(layer._forward_hooks for layer in model)


@pytest.mark.parametrize("replaced", ["before", "meanwhile"])
def test_a_single_layer_whose_call_was_replaced_keeps_it(replaced):
    model, x, seen = net(), torch.ones(1, 3), []

    def replace(layer):
        usual = layer._call_impl
        layer._call_impl = lambda *args: (seen.append(replaced), usual(*args))[1]

    if replaced == "before":
        replace(model[2])
    with capture(model) as acts:
        if replaced == "meanwhile":
            replace(model[2])
        assert model(x).equal(acts["2"].output)
    assert seen == [replaced]


def test_a_class_may_keep_its_hooks_in_a_place_of_its_own():
    class Elsewhere(nn.Linear):
        @property
        def _forward_hooks(self):
            return vars(self)["elsewhere"]

        @_forward_hooks.setter
        def _forward_hooks(self, hooks):
            vars(self)["elsewhere"] = hooks

    model, x = nn.Sequential(Elsewhere(3, 3)), torch.ones(1, 3)
    with capture(model) as acts:
        assert model(x).equal(acts["0"].output)
    assert not model[0]._forward_hooks


def test_a_call_that_another_library_replaces_meanwhile_is_the_one_that_runs(monkeypatch):
    model, x = net(), torch.ones(1, 3)
    with capture(model, on_silent="ignore"):
        monkeypatch.setattr(nn.Module, "_call_impl", lambda module, *args: "replaced")
        assert model[0](x) == "replaced"


def test_there_is_none_once_anything_was_compiled(monkeypatch):
    monkeypatch.setattr("torchhook.core.hooks.shortcut.graph_count", graph_count)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    model = net()
    with capture(model) as acts:
        assert not any(SLOT in vars(layer) for layer in model)
        model(torch.ones(1, 3))
    assert len(acts) == 3
