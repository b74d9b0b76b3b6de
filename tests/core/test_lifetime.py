"""Everything that attaches to a model does so at `open` or ``with``, and is gone after `close`."""

import gc
import weakref

import pytest
import torch
from torch import nn

from specimens import hooks_of
from torchhook import (
    HookManager,
    ModelDiagnostics,
    Monitor,
    Session,
    Tap,
    arm,
    capture,
    catch_nonfinite,
    clip_gradients,
    edit,
    edits,
    hooks,
    measure,
    skip,
    trace,
)


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def manager(model):
    manager = HookManager(model)
    manager.add("0")
    return manager


LATER = {
    "capture": lambda model: capture(model, grads=True),
    "measure": lambda model: measure(model),
    "session": lambda model: Session(model, [Tap("0", print)], on_silent="ignore"),
    "edit": lambda model: edit(model, {"0": edits.zero}, on_silent="ignore"),
    "trace": lambda model: trace(model, progress=False),
    "skip": lambda model: skip(model, "1"),
    "catch_nonfinite": lambda model: catch_nonfinite(model),
    "arm": lambda model: arm(model),
}
AT_ONCE = {
    "HookManager": manager,
    "ModelDiagnostics": lambda model: ModelDiagnostics(model),
    "clip_gradients": lambda model: clip_gradients(model, value=1.0),
    "Monitor": lambda model: Monitor(model, torch.optim.SGD(model.parameters(), 0.1), to=[]),
}


def attached(model):
    """What is on a model: hooks, and what replaces its forwards."""
    forwards = [path for path, module in model.named_modules() if "forward" in vars(module)]
    on_parameters = [parameter._backward_hooks for parameter in model.parameters() if parameter._backward_hooks]
    return hooks_of(model), forwards, len(on_parameters), hooks(model)


def run(model):
    model(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize("name", LATER)
def test_nothing_is_attached_before_it_is_opened_nor_after_it_is_closed(name):
    model = net()
    before = attached(model)
    made = LATER[name](model)
    assert attached(model) == before
    with made as entered:
        assert entered is made and attached(model) != before
        run(model)
    assert attached(model) == before
    by_hand = LATER[name](model)
    assert by_hand.open() is by_hand and attached(model) != before
    run(model)
    by_hand.close()
    by_hand.close()
    assert attached(model) == before


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_acts_from_the_beginning_ends_in_the_same_ways(name):
    model = net()
    before = attached(model)
    made = AT_ONCE[name](model)
    assert attached(model) != before
    with made as entered:
        assert entered is made
        run(model)
    assert attached(model) == before
    made.close()
    with pytest.raises(ZeroDivisionError), AT_ONCE[name](model):
        raise ZeroDivisionError
    assert attached(model) == before


@pytest.mark.parametrize("name", LATER)
def test_the_old_names_work_and_name_the_new_ones(name):
    model = net()
    before = attached(model)
    made = LATER[name](model)
    with pytest.warns(DeprecationWarning, match=r"now called open\(\)") as said:
        assert made.attach() is made
    assert said[0].filename == __file__ and attached(model) != before
    run(model)
    with pytest.warns(DeprecationWarning, match=r"now called close\(\)"):
        made.detach()
    assert attached(model) == before


def test_remove_is_now_called_close():
    model = net()
    before = attached(model)
    for make in (lambda: clip_gradients(model, value=1.0), lambda: arm(model).open()):
        made = make()
        with pytest.warns(DeprecationWarning, match=r"now called close\(\)"):
            made.remove()
        assert attached(model) == before


def test_a_manager_that_was_closed_keeps_its_features_and_can_be_opened_again():
    model = net()
    kept = manager(model)
    run(model)
    kept.close()
    run(model)
    assert len(kept.get("0")) == 1 and kept.get_keys() == ["0"]
    with kept:
        run(model)
    assert len(kept.get("0")) == 2
    kept.remove("0")
    assert kept.get_keys() == [] and hooks(model) == []


def test_diagnostics_and_clipping_can_be_opened_again():
    model = net()
    diagnostics, clip = ModelDiagnostics(model, "0"), clip_gradients(model, value=1e-6)
    for ended in (diagnostics, clip):
        ended.close()
    with diagnostics, clip:
        run(model)
    assert list(diagnostics.features) == ["0"] and clip.clipped > 0


def test_a_capture_that_is_let_go_is_freed_without_the_garbage_collector():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    gc.collect()
    gc.disable()
    try:
        with capture(model) as acts:
            model(torch.ones(1, 2))
        value, session = weakref.ref(acts["1"].output), weakref.ref(acts.session)
        del acts
        assert value() is None
        assert session() is None
    finally:
        gc.enable()


def test_a_thread_that_was_about_to_record_when_the_session_ended_does_not_fail():
    model = net()
    acts = capture(model, scope="all").open()
    model(torch.ones(1, 4))
    hook = acts.session.points[0].hook
    pass_of_call = acts.session.scope.pass_here  # the session was open when the thread asked whether it is seen
    acts.close()
    assert hook(model[0], (), torch.ones(1)) is None
    pass_of_call().pages[0].put(0, 0, torch.ones(1))
    assert len(acts["0"].outputs) == 1
