"""Threads of one script that train at the same time: what each of them does stays in its own run."""

import gc
import itertools
import math
import os
import queue
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchhook.core.instances import instances
from torchhook.training.launch.discovery import Discovery
from torchhook.training.runs import Run
from torchhook.training.runs.folders import find
from torchhook.training.runs.schema import create

THREADS, STEPS = 8, 6

SCRIPT = f"""
import sys, threading, warnings, torch
from torch import nn

TRIALS = int(sys.argv[1])
warnings.simplefilter("error")  # a warning of ours would be one of the failures

class Net(nn.Sequential):
    def __init__(self, number):
        super().__init__(nn.Linear(4, 3 + number), nn.Tanh(), nn.Linear(3 + number, 1))

def train(number):
    for trial in range(TRIALS):
        model = type(f"Net{{number}}", (Net,), {{}})(number)
        optimizer = torch.optim.SGD(model.parameters(), lr=float("inf") if number == 3 else 1e-3)
        for step in range({STEPS}):
            output = model(torch.randn(8, 4)).square().mean()
            loss = output - output.detach() + 1000 * (number + 1) + trial + step / 100
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

failed = []
def trained(number):
    try:
        train(number)
    except BaseException as error:
        failed.append(error)
        raise

threads = [threading.Thread(target=trained, args=(number,)) for number in range({THREADS})]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit(len(failed))
"""


def run_threads(tmp_path, trials):
    """What a script with threads says, and its runs: (model, losses, codes of the findings)."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torchhook", "run", "--every", "2", "--price", "off", "train.py", str(trials)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540)
    assert ended.returncode == 0, ended.stderr[-3000:]
    runs = []
    for folder in find(tmp_path / "runs"):
        with Run(folder) as run:
            codes = {finding.code for top in run.report.findings for finding in (top, *top.affected)}
            assert run.state == "ended"
            runs.append((run.model, run.losses, codes))
    return ended.stderr, runs


def own_losses(number, trial):
    """What a training is to have; the optimizer of thread 3 makes everything NaN in its first step."""
    losses = {step: 1000 * (number + 1) + trial + step / 100 for step in range(STEPS)}
    return losses if number != 3 else {step: loss if step == 0 else math.nan for step, loss in losses.items()}


def require_own(runs, trials):
    """Each training has one run, with its own losses, model and findings."""
    expected = [
        (f"Net{number}", pytest.approx(own_losses(number, trial), nan_ok=True))
        for number, trial in itertools.product(range(THREADS), range(trials))
    ]
    assert sorted(((model, losses) for model, losses, _ in runs), key=lambda known: known[1][0]) == expected
    for model, _, codes in runs:
        assert ("TH101" in codes) == (model == "Net3"), (model, codes)


def test_eight_threads_train_at_the_same_time(tmp_path):
    said, runs = run_threads(tmp_path, 1)
    require_own(runs, 1)
    lines = said.splitlines()
    assert sum(line.startswith("torchhook: ") and "nothing found" in line for line in lines) == THREADS - 1
    assert [line for line in lines if "Net" in line and "Net3" not in line] == []
    assert len(lines) < 60 and "stopped looking" not in said and "cannot be written" not in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_threads_with_fifty_trainings_each(tmp_path):
    require_own(run_threads(tmp_path, 50)[1], 50)


# ------------------------------------------------------------ one training, several threads


def in_thread(work):
    """Do something in another thread, and wait for it."""
    result = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join()
    return result[0]


def step(model, optimizer, x=None):
    loss = model(torch.randn(8, 4) if x is None else x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def plain():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def made():
    model = plain()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step_by_hand(model):
    model(torch.randn(8, 4)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.01 * parameter.grad)
    model.zero_grad()


def told(monitor):
    with Run(monitor.run) as run:
        return run.losses


def test_a_model_that_is_made_here_and_trained_in_another_thread(tmp_path):
    with Discovery(every=2, price=None, to=tmp_path) as found:
        model, optimizer = made()
        losses = in_thread(lambda: [step(model, optimizer) for _ in range(10)])
    [monitor] = found.watched
    assert told(monitor) == pytest.approx(dict(enumerate(losses))) and monitor.steps == 10


def test_a_model_that_is_trained_by_one_thread_after_another(tmp_path):
    with Discovery(every=2, price=None, to=tmp_path) as found:
        model, optimizer = made()
        losses = [in_thread(lambda: step(model, optimizer)) for _ in range(5)]
        losses += [step(model, optimizer) for _ in range(5)]
        losses += [in_thread(lambda: step(model, optimizer)) for _ in range(5)]
    [monitor] = found.watched
    assert told(monitor) == pytest.approx(dict(enumerate(losses)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_what_a_thread_trained_that_ends_with_an_error_has_failed(tmp_path, has_optimizer):
    """Although the script goes on, and ends well: a training in another thread, too."""

    def failing():
        model, optimizer = made() if has_optimizer else (plain(), None)
        for _ in range(4):
            step(model, optimizer) if has_optimizer else step_by_hand(model)
        raise OSError("shard 3 is damaged")

    before = threading.excepthook
    with Discovery(every=1, price=None, to=tmp_path) as found:
        thread = threading.Thread(target=failing)
        thread.start()
        thread.join()
        in_thread(lambda: [step(*both) for both in [made()] for _ in range(4)])
    assert threading.excepthook is before
    failed, ended = found.watched
    assert failed.ending.startswith("torchhook: nothing found in 4 steps before it failed → ")
    assert failed.report.about["error"]["message"] == "shard 3 is damaged"
    with Run(failed.run) as run, Run(ended.run) as other:
        assert (run.state, other.state) == ("failed", "ended")


class Beside:
    """A thread that does one thing after another."""

    def __init__(self):
        self.work, self.results = queue.Queue(), queue.Queue()
        threading.Thread(target=lambda: [self.results.put(call()) for call in iter(self.work.get, None)]).start()

    def do(self, call):
        self.work.put(call)
        return self.results.get(timeout=60)


@pytest.fixture
def beside():
    """Two threads."""
    both = Beside(), Beside()
    yield both
    for thread in both:
        thread.work.put(None)


def test_a_thread_that_runs_backwards_for_another(tmp_path, beside):
    """The loss belongs to the optimizer that has its parameters, also while another thread trains something else."""
    helper, rival = beside
    losses, others = [], []
    with Discovery(every=2, price=None, to=tmp_path) as found:
        (model, optimizer), (other, its) = made(), made()

        def backward():
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean() + 100
            loss.backward()
            return loss.item()

        for _ in range(10):
            losses.append(helper.do(backward))
            others.append(rival.do(lambda: step(other, its)))
            optimizer.step()
    runs = sorted((told(monitor) for monitor in found.watched), key=lambda known: max(known.values()))
    assert runs == [pytest.approx(dict(enumerate(others))), pytest.approx(dict(enumerate(losses)))]


def of(number):
    """A training of its own, whose losses are around 100 times its number."""
    model = nn.Sequential(nn.Linear(4, 5 + number), nn.Tanh(), nn.Linear(5 + number, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def backward(model, number):
    loss = model(torch.randn(8, 4)).square().mean() + 100 * number
    model.zero_grad()
    loss.backward()


def require_apart(found, count, steps):
    """Each of the trainings has its own losses."""
    by_width = {monitor.run: told(monitor) for monitor in found.watched}
    assert len(by_width) == count
    centres = sorted({round(sum(losses.values()) / len(losses), -2) for losses in by_width.values()})
    assert centres == [100 * number for number in range(count)]
    for losses in by_width.values():
        assert len(losses) == steps and max(losses.values()) - min(losses.values()) < 50


def test_backwards_of_several_trainings_in_a_pool_and_their_steps_here(tmp_path):
    with Discovery(every=2, price=None, to=tmp_path) as found, ThreadPoolExecutor(2) as pool:
        trained = [of(number) for number in range(3)]
        for _ in range(12):
            list(pool.map(backward, [model for model, _ in trained], range(3)))
            for _, optimizer in trained:
                optimizer.step()
    require_apart(found, 3, 12)


def test_backwards_in_threads_that_are_gone_when_their_optimizers_step(tmp_path):
    with Discovery(every=2, price=None, to=tmp_path) as found:
        trained = [of(number) for number in range(4)]
        for _ in range(12):
            for number, (model, _) in enumerate(trained):
                in_thread(partial(backward, model, number))
            for _, optimizer in trained:
                optimizer.step()
    require_apart(found, 4, 12)


def test_backwards_and_steps_in_any_thread_of_a_pool(tmp_path, beside):
    with Discovery(every=2, price=None, to=tmp_path) as found:
        trained = [of(number) for number in range(2)]
        for _ in range(12):
            for number, (model, _) in enumerate(trained):
                beside[number].do(partial(backward, model, number))
            for number, (_, optimizer) in enumerate(trained):
                beside[1 - number].do(optimizer.step)
    require_apart(found, 2, 12)


def test_batches_that_another_thread_loads(tmp_path):
    loader = DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=8)
    with Discovery(every=2, price=None, to=tmp_path) as found:
        batches = queue.Queue(maxsize=2)
        thread = threading.Thread(target=lambda: [*map(batches.put, loader), batches.put(None)])
        thread.start()
        model, optimizer = made()
        losses = [step(model, optimizer, batch) for (batch,) in iter(batches.get, None)]
        thread.join()
        [training] = found._trainings
        [feeding] = training.notes.facts()().feedings
    assert told(found.watched[0]) == pytest.approx(dict(enumerate(losses))) and len(losses) == 10
    assert feeding.taken == 10 and feeding.batches == 10


def test_loaders_of_threads_that_train_are_their_own(tmp_path, beside):
    """Also the first batch, which a thread draws before we know that it will train."""
    with Discovery(every=2, price=None, to=tmp_path) as found:
        pairs = made(), made()
        loaders = [DataLoader(TensorDataset(torch.randn(10 * size, 4)), batch_size=size) for size in (2, 4)]
        iterators = [iter(loader) for loader in loaders]
        first = beside[1].do(lambda: next(iterators[1]))
        for _ in range(3):
            beside[0].do(lambda: step(*pairs[0], *next(iterators[0])))
        beside[1].do(lambda: step(*pairs[1], *first))
        beside[1].do(lambda: step(*pairs[1], *next(iterators[1])))
        fed = [training.notes.facts()().feedings for training in found._trainings]
    assert [[feeding.taken for feeding in feedings] for feedings in fed] == [[3], [2]]


def test_a_training_by_hand_beside_one_with_an_optimizer(tmp_path, beside):
    weight = torch.zeros(4, requires_grad=True)

    def by_hand():
        loss = (torch.randn(8, 4) @ weight - 1).square().mean() + 100
        loss.backward()
        with torch.no_grad():
            weight.sub_(0.1 * weight.grad)
        weight.grad = None
        return loss.item()

    losses, others = [], []
    with Discovery(every=2, price=None, to=tmp_path) as found:
        model, optimizer = made()
        for _ in range(10):
            others.append(step(model, optimizer))
            losses.append(beside[0].do(by_hand))
    runs = sorted((told(monitor) for monitor in found.watched), key=lambda known: max(known.values()))
    assert runs == [pytest.approx(dict(enumerate(others))), pytest.approx(dict(enumerate(losses)))]


# ------------------------------------------------------------ what made runs fail


def test_objects_of_a_class_are_found_and_nothing_else_is_held():
    class Own(nn.Linear):
        pass

    module = Own(1, 1)
    assert instances(Own) == [module]
    assert module in instances(nn.Linear)
    del module
    gc.collect()
    assert instances(Own) == []


def test_a_run_is_whole_even_if_something_keeps_the_cursors_that_made_it(tmp_path, monkeypatch):
    """As a list of all objects does for some time, which another thread may ask the garbage collector for."""
    kept = []

    class Keeping(sqlite3.Connection):
        def execute(self, *args):
            kept.append(super().execute(*args))
            return kept[-1]

        def executescript(self, *args):
            kept.append(super().executescript(*args))
            return kept[-1]

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Keeping))
    create(tmp_path / "run.sqlite")
    assert kept
    with Run(tmp_path) as run:
        assert run.state == "running"
