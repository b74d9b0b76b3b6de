"""`Monitor`: what it measures and when, how it ends, and that no training ever suffers from it."""

import copy
import gc
import io
import math
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from torchhook import Finding, Monitor, Report, check, measure
from torchhook.core.errors import StopTraining
from torchhook.rules.history import History
from torchhook.rules.watch import Watch
from torchhook.stats.optimizer import steps
from torchhook.stats.reading import Snapshot
from torchhook.training import judge, worker
from torchhook.training.logs import Entry, Log
from torchhook.training.runs import Run
from torchhook.training.runs.database import Database
from torchhook.training.runs.folders import delete
from zoo.nets import ConvNet
from zoo.tasks import digits

pytestmark = pytest.mark.usefixtures("one_thread")


class Kept(Log):
    """Keeps what it is told."""

    def __init__(self):
        self.about, self.entries, self.found_, self.ends, self.threads = None, [], [], [], set()

    def begin(self, about):
        self.about = about

    def write(self, entry):
        self.entries.append(entry)
        self.threads.add(threading.current_thread().name)

    def found(self, finding):
        self.found_.append(finding)

    def end(self, report, state):
        self.ends.append((report, state))

    @property
    def windows(self):
        return {entry.step: entry.snapshot for entry in self.entries if entry.snapshot}

    @property
    def losses(self):
        return {step: loss for entry in self.entries for step, loss in entry.losses.items()}


def small():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr)


def backward(model, x=None):
    """The forward and backward of a step."""
    model.zero_grad()
    loss = model(torch.randn(16, 4) if x is None else x).square().mean()
    loss.backward()
    return loss


def train(model, optimizer, monitor, steps=1):
    for _ in range(steps):
        loss = backward(model)
        optimizer.step()
        monitor.step(loss=loss)
    return loss


def hooks_of(model, optimizer=None):
    """All that anybody has put onto a model and its optimizer."""
    found = [
        hook
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        for hook in hooks.values()
    ]
    found += [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()]
    found += [hook for p in model.parameters() for hook in (p._backward_hooks or {}).values()]
    found += [name for module in model.modules() for name in ("_compiled_call_impl",) if name in vars(module)]
    if optimizer is not None:
        found += [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return found


def ours():
    """The threads of monitors."""
    return [thread for thread in threading.enumerate() if thread.name == "torchhook"]


# ------------------------------------------------------------ what is measured, and when


def test_a_window_is_the_very_step_it_is_said_to_be():
    """Outputs, gradients, norms and updates, beside the same numbers computed by hand."""
    model, log = small(), Kept()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    expected = {}
    with Monitor(model, optimizer, every=3, price=None, to=[log]) as monitor:
        for step in range(13):
            x = torch.randn(16, 4)
            before = {path: p.detach().clone() for path, p in model.named_parameters()}
            hidden = F.linear(x, before["0.weight"], before["0.bias"])
            loss = backward(model, x)
            grads = {path: p.grad.clone() for path, p in model.named_parameters()}
            optimizer.step()
            after = dict(model.named_parameters())
            expected[step] = {
                "mean": hidden.mean(),
                "std": hidden.std(),
                "max": hidden.relu().max(),
                "grad": {path: grad.norm() for path, grad in grads.items()},
                "ratio": {path: (after[path] - before[path]).norm() / before[path].norm() for path in before},
            }
            monitor.step(loss)
    assert list(log.windows) == [0, 3, 6, 9, 12]
    for step, window in log.windows.items():
        by_hand = expected[step]
        assert (window["0"].count, window["0", "grad_output"].count) == (128, 128)
        assert window["0"].mean == pytest.approx(by_hand["mean"].item(), rel=1e-4, abs=1e-6)
        assert window["0"].std == pytest.approx(by_hand["std"].item(), rel=1e-4)
        assert window["1"].max == pytest.approx(by_hand["max"].item(), rel=1e-5)
        for path, norm in by_hand["grad"].items():
            assert window[path, "param_grad_norm"].mean == pytest.approx(norm.item(), rel=1e-4)
            assert window[path, "update_ratio"].mean == pytest.approx(by_hand["ratio"][path].item(), rel=1e-4)


def test_a_window_is_what_measure_says_of_that_step():
    model, log = small(), Kept()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=4, price=None, to=[log]) as monitor:
        train(model, optimizer, monitor, 4)
        with measure(model, grads=True) as stats:
            train(model, optimizer, monitor)
        train(model, optimizer, monitor, 3)
    for place in (("0", "output"), ("1", "output"), ("2", "output"), ("0", "grad_output"), ("2", "grad_output")):
        assert log.windows[4][place]["moments"] == stats[place]["moments"]


OPS = st.lists(st.sampled_from(["train", "quiet", "evaluate", "infer", "skip"]), max_size=40)


@settings(max_examples=25, deadline=None)
@given(OPS, st.integers(1, 5), st.integers(0, 3))
def test_steps_and_losses_are_what_was_done(ops, every, first):
    """Steps without a loss, evaluations between steps, and steps that the optimizer took no part in."""
    model, log = small(), Kept()
    optimizer = sgd(model, 1e-3)
    losses, windows, passes, step, taken = {}, {}, 0, first, 0
    with Monitor(
        model, optimizer, every=every, price=None, to=[log], rules=["TH1", "TH404", "TH6"], first_step=first
    ) as monitor:
        for op in ops:
            if op in ("evaluate", "infer"):
                with torch.no_grad() if op == "evaluate" else torch.inference_mode():
                    model(torch.randn(5, 4))
                continue
            loss = backward(model)
            passes += 1
            if op != "quiet":
                losses[step] = loss.item()
            if op != "skip":
                optimizer.step()
                if taken % every == 0:
                    windows[step] = passes
                taken, passes = taken + 1, 0
            monitor.step(None if op == "quiet" else loss)
            step += 1
        assert monitor.steps == step
    assert log.losses == pytest.approx(losses)
    assert {number: window["0"].count // 128 for number, window in log.windows.items()} == windows
    assert all(len(entry.losses) or entry.snapshot for entry in log.entries)
    assert [entry.step for entry in log.entries] == sorted({entry.step for entry in log.entries})
    assert not log.entries or log.entries[-1].step <= step - 1


def test_losses_of_every_kind():
    model, log = small(), Kept()
    given_ = [torch.tensor(1.5), 2.5, torch.tensor([1.0, 3.0]), None, 4, torch.tensor(5.0, requires_grad=True) * 1]
    with Monitor(model, to=[log], every=4, price=None) as monitor:
        for loss in given_:
            backward(model)
            monitor.step(loss)
            if isinstance(loss, torch.Tensor):
                loss.detach().fill_(torch.nan)  # it is the loss as it was
    assert log.losses == {0: 1.5, 1: 2.5, 2: 2.0, 4: 4.0, 5: 5.0}


def test_the_numbers_of_steps_may_be_given():
    model, log = small(), Kept()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=2, price=None, to=[log]) as monitor:
        for number in (100, 110, 120):
            loss = backward(model)
            optimizer.step()
            monitor.step(loss, step=number)
    assert (list(log.windows), list(log.losses), monitor.steps) == ([100, 120], [100, 110, 120], 121)


def test_what_lies_in_a_run(tmp_path):
    model = small()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=4, price=None, to=[tmp_path], name="mine") as monitor:
        train(model, optimizer, monitor, 11)
    with Run(tmp_path / "latest") as run:
        assert (run.model, run.state, run.about["every"], run.about["optimizer"]) == ("Sequential", "ended", 4, "SGD")
        assert list(run.losses) == list(range(11))
        assert [window.step for window in run.windows() if window.snapshot] == [0, 4, 8]
        assert run.folder.samefile(monitor.run) and run.report == monitor.report


def test_accumulated_gradients_are_one_step():
    model, log = small(), Kept()
    optimizer = sgd(model)
    norms = []
    with Monitor(model, optimizer, every=2, price=None, to=[log]) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(4):
                (model(torch.randn(16, 4)).square().mean() / 4).backward()
            norms.append(model[0].weight.grad.norm().item())
            optimizer.step()
            monitor.step()
    assert list(log.windows) == [0, 2]
    for step, window in log.windows.items():
        assert window["0"].count == 4 * 128
        assert window["0.weight", "param_grad_norm"].mean == pytest.approx(norms[step], rel=1e-4)


def test_gradients_are_seen_before_and_after_clipping():
    model, log = small(), Kept()
    optimizer = sgd(model)
    with Monitor(model, optimizer, to=[log]) as monitor:
        loss = backward(model, 100 * torch.randn(16, 4))
        norm = model[2].weight.grad.norm().item()
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        monitor.step(loss)
    assert log.windows[0]["2.weight", "param_grad_norm"].mean == pytest.approx(norm, rel=1e-4)
    assert log.windows[0]["2.weight", "step_grad_norm"].mean == pytest.approx(norm / total, rel=1e-3)


def test_without_an_optimizer():
    model, log = small(), Kept()
    with Monitor(model, every=3, price=None, to=[log]) as monitor:
        for _ in range(7):
            monitor.step(backward(model))
    assert list(log.windows) == [0, 3, 6]
    ports = {port for window in log.windows.values() for _, port in window}
    assert {"output", "grad_output", "param_grad"} <= ports and not ports & {"update_ratio", "param_norm"}
    assert all(window["0"].count == window["0", "grad_output"].count == 128 for window in log.windows.values())
    assert log.about["optimizer"] is None and monitor.report.ok


def test_a_scaler_and_the_steps_that_it_leaves_out():
    """They are no steps of the optimizer; gradients are told without the scale."""
    model, log = small(), Kept()
    optimizer, scaler = sgd(model, 0.01), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    overflows, norms = (0, 3, 4), []
    with Monitor(model, optimizer, every=2, price=None, to=[log]) as monitor:
        for step in range(9):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 4)).square().mean()
            scale = scaler.get_scale()
            scaler.scale(loss * (torch.inf if step in overflows else 1)).backward()
            norms.append(model[0].weight.grad.norm().item() / scale)
            scaler.step(optimizer)
            scaler.update()
            monitor.step(loss)
    assert list(log.windows) == [1, 5, 7]  # the optimizer's steps 0, 2 and 4
    for step in (5, 7):
        assert log.windows[step]["0.weight", "param_grad_norm"].mean == pytest.approx(norms[step], rel=1e-3)
    assert list(log.losses) == list(range(9))
    assert monitor.report.ok and not log.found_


def test_the_first_step_with_a_scaler_is_measured_without_a_search_through_all_objects(monkeypatch):
    """That search takes a tenth of a second or more, as long as many whole trainings."""
    searched = Mock(return_value=None)
    monkeypatch.setattr(steps, "only_scaler", searched)
    model, log = small(), Kept()
    optimizer, scaler = sgd(model, 0.01), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with Monitor(model, optimizer, to=[log]) as monitor:
        scaler.scale(loss := model(torch.randn(16, 4)).square().mean()).backward()
        norm = model[0].weight.grad.norm().item() / 2**10
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss)
    assert log.windows[0]["0.weight", "param_grad_norm"].mean == pytest.approx(norm, rel=1e-3)
    assert not searched.called


def test_a_training_whose_scaler_leaves_out_every_step_is_not_forgotten(monkeypatch):
    """Then no step is measured, but the losses tell that it is broken, at once, while it goes on."""
    monkeypatch.setattr(judge, "_FIRST", 10**9)
    model, log = small(), Kept()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    with pytest.raises(StopTraining, match="TH104"):
        with Monitor(model, optimizer, every=1, to=[log], on_finding="stop") as monitor:
            for _ in range(2000):
                loss = model(torch.randn(16, 4)).square().mean() * torch.nan
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                monitor.step(loss)
                time.sleep(0.001)
    assert not log.windows


def test_a_closure_that_the_optimizer_calls_as_often_as_it_wants():
    model, log = small(), Kept()
    optimizer, x = torch.optim.LBFGS(model.parameters(), max_iter=4), torch.randn(16, 4)
    with Monitor(model, optimizer, every=2, price=None, to=[log]) as monitor:
        for _ in range(5):
            monitor.step(optimizer.step(lambda: backward(model, x)))
    assert list(log.windows) == [0, 2, 4] and list(log.losses) == list(range(5))
    assert all(window["0"].count % 128 == 0 and window["0"].count for window in log.windows.values())
    assert monitor.report.ok


def test_a_compiled_model(nothing_compiled):
    from torch._dynamo.utils import counters

    model, log, plain_log = small(), Kept(), Kept()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    batches = torch.randn(9, 16, 4)
    backward(compiled, batches[0])
    for net, kept, parts in ((compiled, log, model), (plain, plain_log, plain)):
        optimizer = sgd(parts)
        with Monitor(net, optimizer, every=2, price=None, to=[kept]) as monitor:
            for step, x in enumerate(batches):
                loss = backward(net, x)
                optimizer.step()
                monitor.step(loss)
                if step == 1:
                    graphs = counters["stats"]["unique_graphs"]
        assert counters["stats"]["unique_graphs"] == graphs  # nothing is compiled again from window to window
        assert monitor.model_name == "Sequential" and not hooks_of(parts, optimizer)
    assert list(log.windows) == list(plain_log.windows) == [0, 2, 4, 6, 8]
    for step, window in log.windows.items():
        for path in ("0", "1", "2"):
            assert window[path].count == plain_log.windows[step][path].count
            assert window[path].mean == pytest.approx(plain_log.windows[step][path].mean, rel=1e-4, abs=1e-6)
        assert window["0.weight", "param_grad_norm"].mean == pytest.approx(
            plain_log.windows[step]["0.weight", "param_grad_norm"].mean, rel=1e-4
        )


def test_modules_that_are_built_when_they_are_first_called():
    """Before that there is nothing to measure, which is said; after it they are like any other."""
    model, log = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2)), Kept()
    before, threads = len(hooks_of(model)), ours()
    for optimizer in (None, sgd(model)):
        with pytest.raises(ValueError, match="run the model once|with a dummy batch"):
            Monitor(model, optimizer, to=[])
        assert len(hooks_of(model)) == before and ours() == threads
    with Monitor(model, rules=["TH101", "TH801"], to=[]):
        pass  # these do not ask for parameters
    model(torch.randn(1, 4))
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=2, price=None, to=[log]) as monitor:
        train(model, optimizer, monitor, 5)
    assert list(log.windows) == [0, 2, 4] and log.windows[4]["0"].count == 128


def test_a_model_that_changes_its_precision_on_the_way():
    model, log = small(), Kept()
    optimizer = sgd(model, 0.01)
    with Monitor(model, optimizer, every=2, price=None, to=[log]) as monitor:
        for step in range(9):
            if step == 4:
                model.double()
            loss = backward(model, torch.randn(16, 4, dtype=model[0].weight.dtype))
            optimizer.step()
            monitor.step(loss)
    assert list(log.windows) == [0, 2, 4, 6, 8]
    assert all(window["0"].count == window["0", "grad_output"].count == 128 for window in log.windows.values())
    assert monitor.report.ok and not monitor.report.findings


def test_parameters_that_are_frozen_and_let_go_on_the_way():
    model, log = small(), Kept()
    model[0].requires_grad_(False)
    optimizer = sgd(model, 0.01)
    with Monitor(model, optimizer, every=1, price=None, to=[log]) as monitor:
        train(model, optimizer, monitor, 6)
        model[0].requires_grad_(True)
        model[2].requires_grad_(False)
        train(model, optimizer, monitor, 6)
        model[2].requires_grad_(True)
        train(model, optimizer, monitor, 6)
    assert len(log.windows) == 18 and all(window["2"].count == 32 for window in log.windows.values())
    assert not monitor.report.findings
    assert not hooks_of(model, optimizer)


def test_a_wrapper_does_not_change_the_names():
    model, log = small(), Kept()
    wrapped, optimizer = nn.DataParallel(model), sgd(model)
    with Monitor(wrapped, optimizer, every=1, price=None, to=[log]) as monitor:
        train(wrapped, optimizer, monitor, 2)
    assert log.windows[1]["0"].count == 128 and ("0.weight", "update_ratio") in log.windows[1]
    assert monitor.model_name == "Sequential"
    assert not hooks_of(wrapped, optimizer)


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["plain", "wrapped"])
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(4, 2), lambda: nn.Sequential(nn.Linear(4, 2))], ids=["a leaf", "around one"]
)
def test_the_smallest_of_models(wrap, make):
    model, log = wrap(make()), Kept()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=1, price=None, to=[log]) as monitor:
        train(model, optimizer, monitor, 2)
    assert [next(iter(window.values())).count for window in log.windows.values()] == [32, 32]
    assert not hooks_of(model, optimizer)


def test_a_model_that_calls_itself():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.attend = nn.Linear(4, 4), nn.MultiheadAttention(4, 2)

        def forward(self, x, depth=2):
            x = self.inner(x)
            x = self(x, depth - 1) if depth else x
            return self.attend(self.inner(x), x, x)[0]

    model, log = Again(), Kept()
    optimizer = sgd(model, 0.01)
    with Monitor(model, optimizer, every=1, price=None, to=[log]) as monitor:
        train(model, optimizer, monitor, 6)
    assert all(window["inner"].count == 6 * 64 for window in log.windows.values())
    assert torch._C._len_torch_function_stack() == 0 and monitor.report.ok


def test_others_may_call_the_model_in_threads_of_their_own():
    model, log, errors, over = nn.TransformerEncoderLayer(4, 2, 8), Kept(), [], threading.Event()
    optimizer = sgd(model, 0.01)

    def evaluate():
        try:
            while not over.is_set():
                with torch.no_grad():
                    model(torch.randn(3, 4))
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=evaluate)
    with Monitor(model, optimizer, every=1, price=None, to=[log]) as monitor:
        other.start()
        train(model, optimizer, monitor, 40)
        over.set()
        other.join()
    assert not errors and {window["linear1"].count for window in log.windows.values()} == {128}
    assert torch._C._len_torch_function_stack() == 0


def test_a_forward_that_raises_leaves_no_mode_behind():
    class Failing(nn.TransformerEncoderLayer):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls % 2:
                raise MemoryError
            return super().forward(x)

    model = Failing(4, 2, 8)
    optimizer = sgd(model, 0.01)
    with Monitor(model, optimizer, every=1, price=None, to=[]) as monitor:
        for _ in range(6):
            with pytest.raises(MemoryError), torch.device("cpu"):
                train(model, optimizer, monitor)
            assert torch._C._len_torch_function_stack() == 0
            train(model, optimizer, monitor)


class Parts(nn.Module):
    """Nobody calls it as a whole."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def loss(self, x):
        return self.second(self.first(x).relu()).square().mean()


@pytest.mark.parametrize("late", [False, True])
def test_a_model_that_is_called_part_by_part(late):
    model, log = Parts(), Kept()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=3, price=None, to=[log]) as monitor:
        for step in range(10):
            whole = late and step == 0
            loss = sum(p.square().sum() for p in model.parameters()) if whole else model.loss(torch.randn(16, 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.loss(torch.randn(5, 4))
            monitor.step(loss)
    counts = {step: window["first"].count for step, window in log.windows.items() if ("first", "output") in window}
    assert counts == dict.fromkeys((3, 6, 9) if late else (0, 3, 6, 9), 128)


def test_a_module_that_is_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = nn.Linear(4, 4)

        def forward(self, x):
            return self.second(self.first(x).relu())

    model, log = Twice(), Kept()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=1, price=None, to=[log]) as monitor:
        backward(model)
        norm = model.first.weight.grad.norm().item()
        optimizer.step()
        monitor.step()
    window = log.windows[0]
    assert window["first"].count == 2 * 64 and ("second", "output") not in window
    assert window["first.weight", "param_grad_norm"].mean == pytest.approx(norm, rel=1e-4)


def test_two_monitors_of_one_model():
    model, first, second = small(), Kept(), Kept()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=2, price=None, to=[first]) as one:
        with Monitor(model, optimizer, every=3, price=None, to=[second]) as other:
            for _ in range(7):
                loss = backward(model)
                optimizer.step()
                one.step(loss)
                other.step(loss)
        assert list(second.windows) == [0, 3, 6]
        train(model, optimizer, one, 3)
    assert list(first.windows) == [0, 2, 4, 6, 8]
    for step in (0, 6):
        assert first.windows[step]["1"]["moments"] == second.windows[step]["1"]["moments"]
    assert not hooks_of(model, optimizer)


def test_rules_are_chosen_by_their_codes():
    model, log = small(), Kept()
    optimizer = sgd(model)
    chosen = {"rules": ["TH1", "TH606"], "ignore": ["TH102", "TH105"], "per_module": {"0*": ["TH101"]}}
    with Monitor(model, optimizer, every=1, price=None, to=[log], **chosen) as monitor:
        train(model, optimizer, monitor, 3)
        loss = backward(model, torch.full((16, 4), torch.nan))
        monitor.step(loss)
    assert log.about["rules"] == ["TH101", "TH103", "TH104", "TH606"]
    assert {finding.code for finding in monitor.report.findings} <= {"TH101", "TH103", "TH104"}
    assert {port for window in log.windows.values() for _, port in window} == {"output", "grad_output"}


@pytest.mark.parametrize(
    "options, error",
    [
        ({"every": 0}, "every"),
        ({"on_finding": "shout"}, "on_finding must be"),
        ({"to": 3}, "to must be a folder, a log or a list of them, not 3"),
        ({"to": ["runs", 3]}, "to must be a folder, a log or a list of them, not 3"),
        ({"rules": ["TH999"]}, "no rule 'TH999'"),
        ({"max_bytes": 0, "to": ["runs"]}, "max_bytes"),
    ],
)
def test_what_is_asked_for_wrongly_is_said_at_once(options, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = small()
    optimizer = sgd(model)
    with pytest.raises((ValueError, TypeError), match=error):
        Monitor(model, optimizer, **{"to": [], **options})
    assert not hooks_of(model, optimizer) and not ours()


@pytest.mark.parametrize("as_path", [str, Path])
def test_one_folder_or_log_needs_no_list(as_path, tmp_path):
    model, log = small(), Kept()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=1, price=None, to=as_path(tmp_path)) as monitor:
        train(model, optimizer, monitor, 2)
    assert monitor.run.parent == tmp_path and monitor.run.is_dir()
    with Monitor(model, optimizer, every=1, price=None, to=log) as monitor:
        train(model, optimizer, monitor, 2)
    assert monitor.run is None and list(log.windows) == [0, 1]


# ------------------------------------------------------------ nothing suffers from it


class Noisy(nn.Module):
    """Dropout and batch norm: what is random, and what remembers."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.encode, self.head = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        x = self.drop(self.norm(self.conv(x)).relu()).flatten(2).mT
        x = self.encode(x + self.attend(x, x, x)[0])
        return self.head(x.mean(1))


def trained(watched, every=3):
    torch.manual_seed(3)
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    monitor = Monitor(model, optimizer, every=every, price=None, to=[]) if watched else None
    for _ in range(50):
        x = torch.randn(8, 1, 8, 8)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), torch.randint(3, (8,)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        if monitor is not None:
            monitor.step(loss=loss)
    if monitor is not None:
        monitor.close()
        assert not hooks_of(model, optimizer)
    return {**model.state_dict(), "random": torch.get_rng_state(), "loss": loss.detach()}


def test_a_training_that_is_watched_is_the_same_to_the_last_bit():
    plain = trained(watched=False)
    assert len({tensor.sum().item() for tensor in plain.values()}) > 5
    for every in (1, 3):
        watched = trained(watched=True, every=every)
        assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_one_line_is_printed_at_the_end(capfd, tmp_path, monkeypatch):
    model = small()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=1, price=None, to=[]) as monitor:
        train(model, optimizer, monitor, 12)
        with torch.no_grad():
            model[0].weight.fill_(torch.nan)
        train(model, optimizer, monitor, 3)
    out, err = capfd.readouterr()
    assert not monitor.report.ok and out == "" and re.fullmatch(r"torchhook: 1 error \(TH10\d at [01]\)\n", err)
    monkeypatch.chdir(tmp_path)
    healthy = small()
    monitor = Monitor(healthy, optimizer := sgd(healthy), every=5, price=None, first_step=7)
    train(healthy, optimizer, monitor, 12)
    assert capfd.readouterr() == ("", "")
    monitor.close()
    monitor.close()
    line = f"torchhook: nothing found in 12 steps → torchhook dashboard runs/{monitor.run.name}\n"
    assert capfd.readouterr() == ("", line) and monitor.ending == line.strip()


def test_other_ranks_and_a_closed_standard_error_say_nothing(capfd, monkeypatch):
    model = small()
    monkeypatch.setenv("RANK", "1")
    Monitor(model, to=[]).close()
    monkeypatch.setenv("RANK", "0")
    for gone in (None, io.StringIO()):
        if gone is not None:
            gone.close()
        monkeypatch.setattr(sys, "stderr", gone)
        with Monitor(model, to=[]) as monitor:
            pass
        assert monitor.report.ok
    assert capfd.readouterr() == ("", "")


def test_how_it_ended_is_in_the_line(capfd):
    model = small()
    for error, said in ((ValueError, "before it failed"), (KeyboardInterrupt, "before it was interrupted")):
        with suppress(error), Monitor(model, to=[]):
            raise error
        assert capfd.readouterr().err == f"torchhook: nothing found in 0 steps {said}\n"


def test_an_exception_without_a_text_is_said_as_python_says_it(capfd):
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    class Failing(Kept):
        def write(self, entry):
            raise Odd

    model, log = small(), Failing()
    with (
        suppress(Odd),
        pytest.warns(UserWarning, match="raised Odd: <exception str"),
        Monitor(model, sgd(model), every=1, price=None, to=[log]) as monitor,
    ):
        train(model, sgd(model), monitor, 3)
        raise Odd
    assert monitor.report.about["error"]["message"] == "<exception str() failed>"
    assert capfd.readouterr().err.count("\n") == 1


def test_a_run_that_cannot_be_written_is_said_so_and_not_where_it_is(capfd, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    model = small()
    for to in (tmp_path / "file", tmp_path / ("long" * 100)):
        with pytest.warns(UserWarning, match="no run is recorded"), Monitor(model, to=to) as monitor:
            pass
        line = capfd.readouterr().err
        assert line.startswith("torchhook: nothing found in 0 steps; the run could not be written: ")
        assert line.count("\n") == 1 and "dashboard" not in line and monitor.unwritten in line


def test_a_run_that_is_no_longer_written_says_since_when_and_why(capfd, tmp_path, monkeypatch):
    model = small()
    optimizer = sgd(model)

    def full(self, entry, groups):
        if entry.step >= 4:
            raise sqlite3.OperationalError("database or disk is full")
        return add(self, entry, groups)

    add = Database.add
    monkeypatch.setattr(Database, "add", full)
    with (
        pytest.warns(UserWarning, match="is lost"),
        Monitor(model, optimizer, every=1, price=None, to=tmp_path) as monitor,
    ):
        train(model, optimizer, monitor, 12)
    reason = "the run could not be written from step 4 on: database or disk is full"
    assert capfd.readouterr().err == f"torchhook: nothing found in 12 steps; {reason}\n"
    with Run(monitor.run) as run:
        assert run.state == "unwritten" and run.steps == [0, 1, 2, 3]
    monkeypatch.setattr(Database, "add", add)
    monkeypatch.setattr(Database, "end", lambda self, state: full(self, Entry(9, 0.0, Snapshot({})), []))
    with pytest.warns(UserWarning, match="the end is lost"), Monitor(model, to=tmp_path, name="end") as monitor:
        pass
    with Run(monitor.run) as run:
        assert run.state == "unwritten" and "dashboard" not in capfd.readouterr().err
    assert delete(monitor.run) and not monitor.run.exists()


def test_many_windows_take_no_more_memory_than_some():
    model = small()
    optimizer = sgd(model, 1e-3)
    sizes, windows = [], []
    with Monitor(model, optimizer, every=1, price=None, to=[], rules=["TH1", "TH6"]) as monitor:
        for step in range(2000):
            train(model, optimizer, monitor)
            while monitor._worker._windows.qsize() > 8:  # all of them are to be judged
                time.sleep(0.001)
            if step % 500 == 499:
                gc.collect()
                sizes.append(len(gc.get_objects()))
                windows.append(len(monitor._worker.judge.history.windows))
        history = monitor._worker.judge.history
        assert max(windows) <= 128 and len(history._moments) <= 130 and len(monitor._losses) < 3
        of_windows = 300 * (windows[-1] - windows[0])  # which are some more or some fewer, as it happens
        assert sizes[-1] - sizes[0] < of_windows + 500  # in 1500 steps
    assert not monitor.report.findings and len(monitor.report.losses) == 2000


def test_numbers_that_nobody_takes_do_not_pile_up(monkeypatch):
    """An optimizer that never steps, and one that nobody can look at: losses and rates go to the logs all the same."""
    model, log = small(), Kept()
    monkeypatch.setattr("torchhook.training.monitor._MOST", 50)
    with Monitor(model, sgd(model), every=2, price=None, to=[log]) as monitor:
        for step in range(500):
            monitor.step(loss=float(step))
            assert len(monitor._losses) <= 50 and len(monitor._rates) <= 50
    assert log.losses == {step: float(step) for step in range(500)} and not log.windows
    with Monitor(model, sgd(model), every=2, price=None, to=[]) as monitor:
        for _ in range(200):
            monitor.step()
        assert len(monitor._rates) <= 50


def test_a_model_can_be_copied_and_saved_while_it_is_watched():
    model, log = small(), Kept()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=1, price=None, to=[log]) as monitor:
        train(model, optimizer, monitor, 2)
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (twin, loaded):
            assert torch.equal(
                other(torch.ones(1, 4)), model.state_dict and other[2](other[1](other[0](torch.ones(1, 4))))
            )
            backward(other, torch.randn(99, 4))
        train(model, optimizer, monitor, 1)
    assert log.windows[2]["0"].count == 128  # and not of the copies
    assert not any("torchhook" in type(hook).__module__ for other in (twin, loaded) for hook in hooks_of(other))


def test_it_lets_the_model_go_when_it_is_closed():
    model = small()
    optimizer = sgd(model)
    monitor = Monitor(model, optimizer, every=1, price=None, to=[])
    train(model, optimizer, monitor, 3)
    monitor.close()
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert monitor.report.ok and len(monitor.report.losses) == 3
    assert monitor.unscaled(torch.tensor(2.0)) == 2 and "3 steps" in repr(monitor)


# ------------------------------------------------------------ how it ends


def test_once_is_as_good_as_twice(tmp_path):
    model, log = small(), Kept()
    optimizer = sgd(model)
    monitor = Monitor(model, optimizer, every=1, price=None, to=[log, tmp_path])
    train(model, optimizer, monitor, 3)
    monitor.close()
    report = monitor.report
    monitor.close("failed")
    with monitor:
        pass
    train(model, optimizer, monitor, 2)
    assert monitor.report is report and monitor.steps == 3
    assert log.ends == [(report, "ended")] and len(log.entries) == 3
    assert not hooks_of(model, optimizer) and not ours()
    with Run(monitor.run) as run:
        assert run.state == "ended"


@pytest.mark.parametrize(
    "error, state",
    [
        (SystemExit(1), "failed"),
        (SystemExit(0), "ended"),
        (KeyboardInterrupt(), "interrupted"),
        (RuntimeError("of yours"), "failed"),
    ],
)
@pytest.mark.parametrize("where", ["forward", "backward", "before the monitor's step"])
def test_how_the_training_ended_is_written_with_all_that_was_seen(tmp_path, error, state, where):
    class Raising(nn.ReLU):
        def forward(self, x):
            if where == "forward" and step == 6:
                raise error
            return super().forward(x)

    model, step = nn.Sequential(nn.Linear(4, 8), Raising(), nn.Linear(8, 2)), -1
    optimizer = sgd(model)

    def raising(grad):
        if where == "backward" and step == 6:
            raise error

    with pytest.raises(type(error)):
        with Monitor(model, optimizer, every=3, price=None, to=[tmp_path]) as monitor:
            for step in range(9):
                output = model(torch.randn(16, 4))
                output.register_hook(raising)
                loss = output.square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if where == "before the monitor's step" and step == 6:
                    raise error
                monitor.step(loss)
    with Run(monitor.run) as run:
        assert run.state == state and list(run.losses) == list(range(6))
        measured = [window.step for window in run.windows() if window.snapshot]
        assert measured == ([0, 3, 6] if where == "before the monitor's step" else [0, 3])
        assert run.report == monitor.report
    assert not hooks_of(model, optimizer) and not ours()


@pytest.mark.parametrize("steps", [0, 1, 11])
def test_who_forgets_it_leaves_nothing_behind_and_is_told(tmp_path, steps, capfd):
    """Also while attention is looked at, when hooks hold more."""
    model = small()
    optimizer = sgd(model)
    monitor = Monitor(model, optimizer, every=1, price=None, to=[tmp_path])
    if steps:
        train(model, optimizer, monitor, steps)
    folder, thread = monitor.run, monitor._worker._thread
    if steps == 11:
        monitor.myself = monitor  # then the garbage collector finds it
    del monitor
    gc.collect()
    assert not hooks_of(model, optimizer) and not thread.is_alive()
    count = "1 step" if steps == 1 else f"{steps} steps"
    assert capfd.readouterr().err == f"torchhook: nothing found in {count} → torchhook dashboard {folder}\n"
    with Run(folder) as run:
        assert run.state == "ended" and len(run.losses) == steps


FORGETFUL = """
import sys, torch
from torchhook import Monitor

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
monitor = Monitor(model, optimizer, every=10)
for step in range(25):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    monitor.step(loss)
if sys.argv[1:]:
    raise ValueError("of yours")
"""


@pytest.mark.parametrize(("argument", "state", "how"), [([], "ended", ""), (["fail"], "failed", " before it failed")])
def test_a_script_that_never_closes_it_ends_with_the_line_too(tmp_path, argument, state, how):
    command = [sys.executable, "-c", FORGETFUL, *argument]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    with Run(tmp_path / "runs" / "latest") as run:
        assert run.state == state and list(run.losses) == list(range(25))
    line = f"torchhook: nothing found in 25 steps{how} → torchhook dashboard runs/"
    assert done.returncode == bool(argument) and done.stderr.splitlines()[-1].startswith(line)


def test_it_may_be_collected_in_its_own_thread(capfd):
    """Garbage is collected wherever there is some: the thread cannot wait for itself."""
    forgotten, collected = threading.Event(), threading.Event()

    class Collecting(Kept):
        def write(self, entry):
            super().write(entry)
            assert forgotten.wait(20)
            if not collected.is_set():
                gc.collect()
                collected.set()

    model, log = small(), Collecting()
    optimizer = sgd(model)
    gc.collect()
    gc.disable()
    try:
        monitor = Monitor(model, optimizer, every=1, price=None, to=[log])
        thread = monitor._worker._thread
        train(model, optimizer, monitor, 70)  # and there is no room for more
        monitor.myself = monitor
        del monitor
        forgotten.set()
        assert collected.wait(20)
    finally:
        gc.enable()
    thread.join(20)
    assert not thread.is_alive() and not hooks_of(model, optimizer)
    deadline, told = time.monotonic() + 20, ""
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
        told = capfd.readouterr().err
    assert [state for _, state in log.ends] == ["ended"] and told == "torchhook: nothing found in 70 steps\n"


def test_windows_are_the_business_of_one_thread(monkeypatch):
    """To close while what is dear is measured must not touch the history that is being judged."""
    threads = []
    add = History.add
    monkeypatch.setattr(
        History, "add", lambda self, *args: (threads.append(threading.current_thread().name), add(self, *args))[1]
    )
    model = small()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=1, price=None, to=[]) as monitor:
        train(model, optimizer, monitor, 4)
        assert monitor._instruments.watch.is_thorough
    assert threads == ["torchhook"] * 4 and not monitor.report.findings


def test_a_forked_process_does_not_write(tmp_path):
    model, log = small(), Kept()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=1, price=None, to=[log, tmp_path]) as monitor:
        train(model, optimizer, monitor, 3)
        child = os.fork()
        if not child:
            try:
                train(model, optimizer, monitor, 5)
                monitor.close("failed")
                del monitor
                gc.collect()
                os._exit(0 if log.ends == [] and len(log.entries) <= 3 else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        train(model, optimizer, monitor, 2)
    with Run(monitor.run) as run:
        assert run.state == "ended" and list(run.losses) == list(range(5)) and run.steps == list(range(5))
    assert not list(tmp_path.glob("*/*/run.sqlite"))


class Batches(Dataset):
    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 24

    def __getitem__(self, number):
        with torch.no_grad():
            self.model(torch.ones(1, 4))
        return torch.randn(4)


def test_workers_of_a_loader_may_use_the_model(tmp_path):
    model, log = small(), Kept()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=1, price=None, to=[log, tmp_path]) as monitor:
        for x in DataLoader(Batches(model), 8, num_workers=1, multiprocessing_context="fork"):
            loss = backward(model, x)
            optimizer.step()
            monitor.step(loss)
    assert [window["0"].count for window in log.windows.values()] == [64] * 3
    with Run(monitor.run) as run:
        assert (run.state, run.steps) == ("ended", [0, 1, 2])


# ------------------------------------------------------------ what it finds


def test_stop_raises_soon_after_something_broke():
    model, log = small(), Kept()
    optimizer = sgd(model)
    with pytest.raises(StopTraining, match=r"TH101 error: 0 \(Linear\), step 57") as stopped:
        with Monitor(model, optimizer, every=1, price=None, to=[log], on_finding="stop") as monitor:
            for step in range(500):
                if step == 57:
                    with torch.no_grad():
                        model[0].weight[0, 0] = torch.nan
                train(model, optimizer, monitor)
                time.sleep(0.002)
    assert 58 <= monitor.steps < 200 and monitor.should_stop
    assert [(finding.code, finding.site) for finding in monitor.findings] == [("TH101", "0")]
    assert "catch_nonfinite" in str(stopped.value) and [state for _, state in log.ends] == ["failed"]


def test_stop_does_not_come_too_late_for_a_short_training():
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = sgd(model, 1e-3)
    with torch.no_grad():
        model[0].bias.fill_(-1000)
    with pytest.raises(StopTraining, match=r"TH20[14] error: 1"):
        with Monitor(model, optimizer, every=10, to=[], on_finding="stop") as monitor:
            for _ in range(600):
                train(model, optimizer, monitor)


@pytest.mark.parametrize("on_finding, looked", [(None, [8]), (print, [8, 10, 13, 17, 22, 28, 35, 44, 55, 69, 87])])
def test_who_waits_for_findings_is_told_whatever_a_check_takes(monkeypatch, on_finding, looked):
    windows = []
    with Monitor(small(), price=None, to=[], on_finding=on_finding) as monitor:
        judged = monitor._worker.judge

        def check(history):
            windows.append(judged._windows)
            time.sleep(0.01)  # half a percent of two seconds
            return Report()

        monkeypatch.setattr(judged, "_check", check)
        for step in range(100):
            judged.add(Entry(step, 0.0, Snapshot({}), {step: 1.0}))
        monkeypatch.undo()
    assert windows == looked


def test_a_module_that_layers_of_different_width_share_is_no_fault(tmp_path):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.relu = nn.Linear(4, 8), nn.Linear(8, 2), nn.ReLU()

        def forward(self, x):
            return self.relu(self.second(self.relu(self.first(x))))

    model = Shared()
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Monitor(model, optimizer, every=1, price=None, to=[tmp_path]) as monitor:
            train(model, optimizer, monitor, 12)
    with Run(monitor.run) as run:
        for report in (monitor.report, check(run.history())):
            assert "TH000" not in {finding.code for finding in report.findings}
            assert [note for note in report.notes if "'relu' were not judged: there were 8 units" in note]


def test_what_explains_a_broken_loss_is_told_at_once():
    steps = Finding("TH501", "error", "the steps are too large", step=0)
    broken = replace(steps, affected=(Finding("TH104", "error", "the loss is inf", step=1),))
    for found, told in ((steps, []), (broken, [broken])):
        judged = judge.Judge(History(), lambda _, found=found: Report((found,)))
        assert judged.add(Entry(0, 0.0, Snapshot({}), {0: 1.0})) is None
        assert judged.add(Entry(5, 0.0, Snapshot({}), {1: math.inf})) == told


def test_a_nan_between_two_windows_is_found_where_it_is():
    model = small()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=10, price=None, to=[]) as monitor:
        for step in range(100):
            if step == 57:
                with torch.no_grad():
                    model[2].bias[0] = torch.nan
            train(model, optimizer, monitor)
    found = {finding.code: (finding.site, finding.step) for finding in monitor.report.findings}
    assert found == {"TH104": ("", 57)}  # which explains that by the next measured step, all of it is broken
    assert not monitor.report.ok


def test_warn_warns_where_the_training_is():
    model = small()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=1, to=[], on_finding="warn") as monitor:
        train(model, optimizer, monitor, 2)
        with torch.no_grad():
            model[0].weight.fill_(torch.nan)
        with pytest.warns(UserWarning, match="TH101 error: 0") as warned:
            for _ in range(100):
                train(model, optimizer, monitor)
                time.sleep(0.002)
    assert warned[0].filename == __file__ and len(warned) == 1


def test_a_function_is_called_in_the_thread_of_the_training():
    model, told = small(), []
    optimizer = sgd(model)

    def tell(finding):
        told.append((finding.code, finding.site, threading.get_ident()))

    with Monitor(model, optimizer, every=1, to=[], on_finding=tell) as monitor:
        with torch.no_grad():
            model[0].weight.fill_(torch.nan)
        for _ in range(100):
            train(model, optimizer, monitor)
            time.sleep(0.002)
    assert told == [("TH101", "0", threading.get_ident())]


def test_a_function_that_raises_is_the_user_s_own_business():
    model = small()
    optimizer = sgd(model)

    def refuse(finding):
        raise LookupError(finding.code)

    with pytest.raises(LookupError, match="TH101"):
        with Monitor(model, optimizer, every=1, to=[], on_finding=refuse) as monitor:
            with torch.no_grad():
                model[0].weight.fill_(torch.nan)
            for _ in range(500):
                train(model, optimizer, monitor)
                time.sleep(0.002)


def digits_training(model, optimizer, steps, every=5, plant=None, **options):
    """Train on real digits, with something planted at a step."""
    batches = digits(0)
    with Monitor(model, optimizer, every=every, price=None, to=[], **options) as monitor:
        for step in range(steps):
            if plant is not None:
                plant(step)
            x, y = batches[step % len(batches)]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


def test_nothing_is_found_in_a_healthy_training():
    model = ConvNet(width=8, depth=2, norm=nn.BatchNorm2d)
    monitor = digits_training(model, torch.optim.Adam(model.parameters(), 3e-3), 150)
    assert str(monitor.report) == "ConvNet: nothing found"
    losses = list(monitor.report.losses.values())
    assert len(losses) == 150 and sum(losses[-20:]) < sum(losses[:20]) / 3
    assert len(monitor.report.checked) > 15


def rectified():
    convolutions = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 10))


def test_units_that_die_of_a_learning_rate_are_found():
    model = rectified()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def plant(step):
        optimizer.param_groups[0]["lr"] = 1.0 if 70 <= step < 80 else 0.05

    report = digits_training(model, optimizer, 200, plant=plant).report
    everything = [part for finding in report.findings for part in (finding, *finding.affected)]
    [found] = [part for part in everything if part.code == "TH201"]
    assert found.site == "3" and 70 <= found.step <= 150 and not report.ok


def test_a_loss_that_explodes_is_found():
    model = rectified()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def plant(step):
        optimizer.param_groups[0]["lr"] = 1.0 if 70 <= step < 73 else 3e-3

    report = digits_training(model, optimizer, 150, plant=plant).report
    found = report.findings[0]
    assert found.code == "TH602" and 70 <= found.step <= 73
    assert "after the learning rate went from 0.003 to 1" in found.message


# ------------------------------------------------------------ faults that are not yours


class Broken(Kept):
    """Raises in one of its methods."""

    def __init__(self, where, error):
        super().__init__()
        self.where, self.error = where, error

    def __getattribute__(self, name):
        if name in ("begin", "write", "found", "keep", "end") and name == object.__getattribute__(self, "where"):
            return self._raise
        return object.__getattribute__(self, name)

    def _raise(self, *args):
        raise self.error


@pytest.mark.parametrize("where", ["begin", "write", "found", "keep", "end"])
@pytest.mark.parametrize(
    "in_step, error",
    [(False, RuntimeError("no room")), (False, SystemExit(3)), (True, RuntimeError("no room"))],
    ids=["beside", "beside, and exits", "in step"],
)
def test_a_log_that_raises_ends_alone(where, in_step, error):
    class Here(Broken):
        pass

    Here.in_step = in_step
    model, bad, good = small(), Here(where, error), Kept()
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Monitor(model, optimizer, every=1, price=None, to=[bad, good], rules=["TH101"]) as monitor:
            train(model, optimizer, monitor, 12)
            with torch.no_grad():
                model[0].weight.fill_(torch.nan)
            train(model, optimizer, monitor, 3)
    assert len(good.entries) == 15 and [state for _, state in good.ends] == ["ended"]
    assert [finding.code for finding in good.found_] == ["TH101"]
    [said] = [finding.message for finding in monitor.report.findings if finding.code == "TH000"]
    assert said.startswith("the log Here (which is no longer used) raised ") and str(error) in said
    assert len(bad.entries) == {"begin": 0, "write": 0, "end": 15}.get(where, len(bad.entries))


@pytest.mark.filterwarnings("error")
def test_where_warnings_are_errors_nothing_stops():
    """Neither the thread, nor the training, nor the end."""
    model, bad, good = small(), Broken("write", RuntimeError("no room")), Kept()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=1, price=None, to=[Broken("begin", OSError()), bad, good]) as monitor:
        train(model, optimizer, monitor, 8)
    assert len(good.entries) == 8 and len(monitor.report.findings) == 2


def test_a_slow_log_loses_windows_but_no_losses(monkeypatch):
    class Slow(Kept):
        def write(self, entry):
            time.sleep(0.1)
            super().write(entry)

    monkeypatch.setattr(worker, "_WAITING", 4)
    model, log = small(), Slow()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=1, price=None, to=[log], rules=["TH1"]) as monitor:
        begun = time.monotonic()
        train(model, optimizer, monitor, 400)
        took = time.monotonic() - begun
    assert took < 400 * 0.1  # the training does not wait
    assert list(log.losses) == list(range(400)) and len(log.windows) < 300
    assert any("windows were dropped" in note for note in monitor.report.notes)


@pytest.mark.parametrize("where", ["write", "end"])
def test_a_log_that_never_comes_back_is_left_behind(monkeypatch, where):
    class Stuck(Kept):
        pass

    setattr(Stuck, where, lambda self, *args: never.wait())
    never = threading.Event()
    monkeypatch.setattr(worker, "_PATIENCE", 0.3)
    monkeypatch.setattr(worker, "_WAITING", 4)
    model = small()
    optimizer = sgd(model)
    monitor = Monitor(model, optimizer, every=1, price=None, to=[Stuck()])
    train(model, optimizer, monitor, 12)
    begun = time.monotonic()
    with pytest.warns(UserWarning, match="the rest is lost"):
        monitor.close()
    assert time.monotonic() - begun < 5
    assert any("the rest is lost" in finding.message for finding in monitor.report.findings)
    assert not hooks_of(model, optimizer)
    [thread] = ours()
    never.set()
    thread.join(20)
    assert not thread.is_alive()  # should it ever come back, it ends


@pytest.mark.parametrize("what", ["window", "rate", "count_step"])
def test_a_fault_of_ours_ends_the_watch_and_not_the_training(monkeypatch, what):
    model, log = small(), Kept()
    optimizer = sgd(model)
    monitor = Monitor(model, optimizer, every=2, price=None, to=[log])
    train(model, optimizer, monitor, 5)
    monkeypatch.setattr(Watch, what, lambda self: 1 / 0)
    before = model[0].weight.detach().clone()
    with pytest.warns(UserWarning, match="watching .which has stopped. raised ZeroDivisionError"):
        train(model, optimizer, monitor, 5)
    assert not torch.equal(before, model[0].weight)
    assert not hooks_of(model, optimizer) and not ours()
    assert monitor.report.findings[0].code == "TH000" and "ZeroDivisionError" in monitor.report.findings[0].message
    assert [state for _, state in log.ends] == ["failed"] and list(log.losses)[:5] == list(range(5))


def test_a_statistic_that_raises_is_a_finding(monkeypatch):
    from torchhook.stats import Moments

    model = small()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=1, price=None, to=[]) as monitor:
        train(model, optimizer, monitor, 2)
        monkeypatch.setattr(Moments, "update", lambda self, state, x: 1 / 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, optimizer, monitor, 2)
        monkeypatch.undo()
    assert "TH000" in {finding.code for finding in monitor.report.findings}


def traced(model):
    torch.jit.trace(model, torch.randn(1, 4))


def scripted(model):
    torch.jit.script(model)


def exported(model):
    torch.export.export(model, (torch.randn(1, 4),))


def differentiated(model):
    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, x).sum()

    torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(model.named_parameters()), torch.randn(3, 4))


HOOKED = pytest.mark.xfail(strict=True, reason="TorchScript wants to compile every hook")


@pytest.mark.parametrize(
    "use",
    [
        traced,
        pytest.param(scripted, marks=HOOKED),
        exported,
        differentiated,
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_watched_model_can_be_used_in_every_way(use):
    model, log = small(), Kept()
    optimizer = sgd(model)
    with Monitor(model, optimizer, every=1, price=None, to=[log]) as monitor:
        train(model, optimizer, monitor, 2)
        use(model)
        train(model, optimizer, monitor, 2)


@pytest.mark.parametrize(
    "what", ["torchhook.stats.reduce.Reduce._add", "torchhook.stats.optimizer.drafts.Drafts.measure"]
)
def test_a_fault_of_ours_inside_a_step_does_not_stop_the_training(monkeypatch, what):
    model, log = small(), Kept()
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Monitor(model, optimizer, every=1, price=None, to=[log]) as monitor:
            train(model, optimizer, monitor, 2)
            monkeypatch.setattr(what, lambda *args: 1 / 0)
            train(model, optimizer, monitor, 2)
    assert "TH000" in {finding.code for finding in monitor.report.findings}
