"""Watching changes no result, only computes marks, stops nothing by its own errors, and leaves nothing behind."""

import gc
import warnings
import weakref

import pytest
import torch
from sick_models import Calls, Divide, Log, Sqrt, linear
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from specimens import Blocks, hooks_of
from torchhook import capture
from torchhook.core.errors import NonfiniteError
from torchhook.origins import Catch
from torchhook.rules.origin import search, sink
from torchhook.rules.origin.catch import catch_nonfinite


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "_to_cpu")


def test_a_healthy_model_pays_with_marks_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    x = torch.randn(4, 8)

    def ops(context):
        model.zero_grad()
        with context, Ops() as seen:
            model(x).sum().backward()
        return seen.names

    plain, watched = ops(torch.enable_grad()), ops(catch_nonfinite(model))
    assert not [name for name in watched if any(wait in name for wait in WAITS)]
    extra = {name for name in watched if watched.count(name) > plain.count(name)}
    assert {name.split(".")[1] for name in extra} <= {"aminmax", "_foreach_norm", "_lazy_clone", "detach", "stack"}
    # Nothing is read before the last op of the forward, and then nothing before the end of the backward.
    first_read = watched.index("aten.stack.default")
    linear_ops = [number for number, name in enumerate(watched) if name.startswith("aten.addmm")]
    assert len(linear_ops) == plain.count("aten.addmm.default") and first_read > linear_ops[-1]
    assert watched.count("aten.stack.default") == 2


def test_only_the_call_at_fault_is_run_again():
    often = []

    def fine(self, x):
        often.append(1)
        return self.fc(x)

    scaled = Calls(lambda self, x: x + self.scale.sqrt())
    scaled.scale = nn.Parameter(torch.zeros(4))
    for sick, backward in ((Divide(), False), (Sqrt(), True), (scaled, True)):
        model = nn.Sequential(Calls(fine, fc=linear()), sick, Calls(fine, fc=linear()))
        often.clear()
        with Catch(model, None, "record") as catch:
            out = model(torch.ones(2, 4) if not backward else torch.zeros(2, 4))
            if backward:
                out.sum().backward()
        assert catch.origin.path == "1" and len(often) == 2


def sick_forward():
    return nn.Sequential(linear(), Divide()), lambda model: model(torch.ones(1, 4))


def sick_backward():
    return nn.Sequential(linear(), Sqrt()), lambda model: model(torch.zeros(1, 4)).sum().backward()


def healthy():
    return nn.Sequential(linear(), nn.ReLU()), lambda model: model(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("make", [sick_forward, sick_backward, healthy])
@pytest.mark.parametrize("on_found", ["raise", "warn"])
def test_nothing_is_left_behind(make, on_found):
    model, run = make()
    before = hooks_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with catch_nonfinite(model, on_found=on_found) as catch:
                run(model)
        except NonfiniteError:
            assert on_found == "raise" and make is not healthy
    assert (catch.finding is None) == (make is healthy)
    assert hooks_of(model) == before
    alive = weakref.ref(model[0].weight)
    del model, catch
    gc.collect()
    assert alive() is None


def test_nothing_is_left_behind_after_an_error_of_the_user_s():
    model = nn.Sequential(linear(), nn.ReLU())
    before = hooks_of(model)
    for error in (KeyError, KeyboardInterrupt):
        with pytest.raises(error):
            with catch_nonfinite(model):
                model(torch.ones(1, 4))
                raise error
    assert hooks_of(model) == before


def test_what_is_kept_goes_with_the_next_pass_and_with_the_block():
    class Token:
        pass

    model = Calls(lambda self, x, token: self.layer(x), layer=linear())
    with catch_nonfinite(model):
        first, second = Token(), Token()
        alive = [weakref.ref(first), weakref.ref(second)]
        out = model(torch.ones(1, 4), token=first)  # its graph stays
        del first
        assert alive[0]() is not None
        model(torch.ones(1, 4), token=second)
        del second
        assert alive[0]() is None and alive[1]() is not None
    assert alive[1]() is None and out.requires_grad


def test_warn_warns_once_and_watches_no_more():
    model = nn.Sequential(linear(), Divide())
    with pytest.warns(UserWarning, match="produced by aten.div in '1'") as seen:
        with catch_nonfinite(model, on_found="warn") as catch:
            for _ in range(3):
                model(torch.ones(1, 4)).sum().backward()
    assert len(seen) == 1 and catch.finding.step == 0


def test_after_it_was_raised_the_model_goes_on():
    model = nn.Sequential(linear(), Divide())
    with catch_nonfinite(model):
        with pytest.raises(NonfiniteError):
            model(torch.ones(1, 4))
        assert not model(torch.ones(1, 4)).isfinite().any()


def test_a_replay_that_raises_is_said_and_no_more(monkeypatch):
    def sick(self, x):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("not again")
        return x / 0

    model = nn.Sequential(linear(), Calls(sick))
    model[1].left = 1
    with Catch(model, None, "record") as catch:
        model(torch.ones(1, 4))
    assert (catch.origin.path, catch.origin.op) == ("1", "")
    assert "RuntimeError: not again" in catch.origin.note and "not again" in catch.finding.message


@pytest.mark.parametrize("into", [lambda y: y, lambda y: torch.empty_like(y).copy_(y)])
def test_a_replay_that_does_not_show_it_is_said_and_no_more(into):
    often = []

    def sick(self, x):
        often.append(1)
        return into(x / 0 if len(often) == 1 else x)

    model = nn.Sequential(linear(), Calls(sick))
    with Catch(model, None, "record") as catch:
        model(torch.ones(1, 4))
    assert (catch.origin.path, catch.origin.op, catch.origin.what) == ("1", "", "Inf")
    assert "did not reproduce it" in catch.finding.message


def test_an_error_of_our_own_ends_the_watching_and_not_the_training(monkeypatch):
    def fail(*args):
        raise RuntimeError("ours")

    monkeypatch.setattr(sink, "in_forward", fail)
    model = nn.Sequential(linear(), Divide())
    with pytest.warns(UserWarning, match="no longer watching.*ours"):
        with catch_nonfinite(model) as catch:
            for _ in range(2):
                model(torch.ones(1, 4))
    assert catch.finding is None


def test_an_error_of_the_model_s_is_never_replaced_and_gets_a_note():
    def strict(self, x):
        if not x.isfinite().all():
            raise ValueError("mine")
        return x

    model = nn.Sequential(linear(), Log(), Calls(strict))
    with pytest.raises(ValueError, match="mine") as error:
        with catch_nonfinite(model) as catch:
            model(torch.zeros(1, 4) - 1)
    assert (catch.origin.path, catch.origin.op) == ("1", "aten.log")
    if hasattr(error.value, "__notes__"):
        assert any("aten.log" in note for note in error.value.__notes__)
    with pytest.raises(ValueError, match="mine") as error:
        with catch_nonfinite(model[1:]) as catch:
            raise ValueError("mine")
    assert catch.finding is None and not hasattr(error.value, "__notes__")


def test_a_forward_that_raised_and_was_caught_is_forgotten():
    def forward(self, x, error):
        h = self.first(x)
        if error:
            raise error
        return self.last(h)

    for last in (Divide(), linear()):
        model = Calls(forward, first=linear(), last=last)
        with Catch(model, None, "record") as catch:
            for _ in range(2):
                with pytest.raises(KeyError):
                    model(torch.ones(1, 4), KeyError("mine"))
            model(torch.ones(1, 4), None)
        assert (catch.finding is not None) == isinstance(last, Divide)


def test_other_sessions_and_hooks_see_nothing_of_the_replay():
    model = nn.Sequential(linear(), Divide())
    seen = []
    with capture(model, keep=None, max_bytes=2**20) as acts, Catch(model, None, "record"):
        model[1].on = False
        model(torch.ones(1, 4))
        model[1].on = True
        model(torch.ones(1, 4))
    assert len(acts["1"].outputs) == 2 and not seen


def test_gradients_of_the_parameters_are_not_touched_by_a_replay():
    model = nn.Sequential(linear(), Sqrt())
    with Catch(model, None, "record") as catch:
        model(torch.ones(1, 4)).sum().backward()
        before = model[0].weight.grad.clone()
        model(torch.zeros(1, 4))
    assert catch.finding is None and torch.equal(model[0].weight.grad, before)
    model.zero_grad()
    with Catch(model, None, "record") as catch:
        model(torch.zeros(1, 4)).sum().backward()
    assert catch.finding is not None
    watched = model[0].bias.grad
    model.zero_grad()
    model(torch.zeros(1, 4)).sum().backward()
    assert torch.equal(watched, model[0].bias.grad)


def test_a_model_that_never_ran_is_said_to_be_unwatched():
    with pytest.warns(UserWarning, match="nothing was watched.*did not run"):
        with catch_nonfinite(linear()):
            pass


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        catch_nonfinite([linear()])
    with pytest.raises(ValueError, match="on_found must be 'raise' or 'warn'"):
        catch_nonfinite(linear(), on_found="print")


def test_masks_are_not_replayed_in_every_pass_of_a_healthy_model(monkeypatch):
    calls = []
    monkeypatch.setattr(search, "replay_call", lambda *a, **k: calls.append(a))
    model = Blocks()
    with catch_nonfinite(model):
        for _ in range(3):
            model(torch.randn(2, 8)).sum().backward()
    assert not calls
