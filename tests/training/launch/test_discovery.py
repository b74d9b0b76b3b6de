"""What `torchhook run` finds out by itself: who trains what, by which loss, in which step; and what it leaves."""

import copy
import gc
import math
import os
import socket
import sys
import threading
import warnings
import weakref

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

from specimens import Returning
from torchhook.core.errors import StopTraining
from torchhook.core.findings import Severity
from torchhook.training.launch import discovery, lanes
from torchhook.training.launch.discovery import Discovery
from torchhook.training.runs import Run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _nothing_left():
    """Whatever a test does, torch is as it was before."""
    before = patched(), hooks()
    yield
    assert (patched(), hooks()) == before
    assert not [known for known in warnings.filters if "global hooks" in str(known)]
    assert not [thread for thread in threading.enumerate() if thread.name == "torchhook"]


@pytest.fixture
def found(tmp_path):
    """A discovery, to be entered."""
    return Discovery(every=4, price=None, to=tmp_path, name="script")


def patched():
    """The functions of torch that are listened to."""
    schedulers = torch.optim.lr_scheduler
    of = {
        torch.amp.GradScaler: ["update"],
        torch.optim.Optimizer: ["__init__"],
        torch.utils.data.DataLoader: ["__iter__"],
        torch.utils.data.dataloader._BaseDataLoaderIter: ["__next__"],
        schedulers.LRScheduler: ["__init__", "step"],
        schedulers.ReduceLROnPlateau: ["__init__", "step"],
        schedulers.SequentialLR: ["__init__"],
        schedulers.CosineAnnealingWarmRestarts: ["step"],
    }
    return [torch.autograd.backward, *(vars(owner)[name] for owner, names in of.items() for name in names)]


def hooks():
    """The global ones of torch."""
    module = torch.nn.modules.module
    before, after = module._global_forward_pre_hooks, module._global_forward_hooks
    return [list(known) for known in (before, after, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)]


class First(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Second(First):
    pass


class Third(First):
    pass


def sgd(*models, lr=0.01):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr)


def train(model, optimizer, steps=20, x=None):
    """A plain loop; its losses."""
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(16, 4) if x is None else x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def named(discovery_):
    return [monitor.model_name for monitor in discovery_.watched]


def measured(monitor):
    """The measured steps of a run, and its losses."""
    with Run(monitor.run) as run:
        return [window.step for window in run.windows() if window.snapshot], run.losses


# ------------------------------------------------------------ what is trained


def test_a_plain_loop(found, tmp_path):
    """All of its first step is seen: the forward, the backward, and the update."""
    with found:
        model = First()
        optimizer = sgd(model)
        losses = train(model, optimizer, 20)
    [monitor] = found.watched
    steps, told = measured(monitor)
    assert steps == [0, 4, 8, 12, 16] and told == pytest.approx(dict(enumerate(losses)))
    assert monitor.steps == 20 and monitor.report.ok and found.is_main
    with Run(monitor.run) as run:
        assert (run.model, run.state, run.about["optimizer"]) == ("First", "ended", "SGD")
        assert run.window(0)["0"].count == run.window(4)["0"].count == 128
        places = [run.window(0).rows, run.window(4).rows]
        assert places[0].keys() == places[1].keys() >= {("0.weight", "update_ratio"), ("0", "input"), ("2", "output")}
    assert monitor.run.name.startswith("script-")


def test_an_optimizer_that_was_not_seen_when_it_was_created(found):
    """The loss of its first step is known, and what was there before it; the second step is the first to measure."""
    model = First()
    optimizer = sgd(model, lr=math.inf)
    with found:
        losses = train(model, optimizer, 10)
    steps, told = measured(found.watched[0])
    assert steps == [1, 5, 9] and told == pytest.approx(dict(enumerate(losses)), nan_ok=True)
    codes = {finding.code for top in found.watched[0].report.findings for finding in (top, *top.affected)}
    assert "TH101" in codes and "TH102" not in codes


@pytest.mark.parametrize("model", [nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2))], ids=["a layer", "a model"])
def test_the_first_call_is_seen_from_its_beginning(found, model):
    """Its hooks are there while torch is already calling it."""
    x = torch.randn(16, 4) + 7
    with found:
        train(model, sgd(model), 2, x)
    [path] = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    with Run(found.watched[0].run) as run:
        assert run.window(0)[path, "input"]["moments"].mean == pytest.approx(x.mean().item())
        assert run.window(0)[path, "output"].count == 32


def test_a_part_that_is_called_before_the_whole_is_no_model(found, tmp_path):
    """What was begun for it leaves no trace."""
    model = First()
    with found:
        optimizer = sgd(model)
        for _ in range(5):
            optimizer.zero_grad()
            (model[0](torch.ones(2, 4)).mean() + model(torch.randn(16, 4)).square().mean()).backward()
            optimizer.step()
    assert named(found) == ["First"] and measured(found.watched[0])[0] == [0, 4]
    assert [path.name for path in tmp_path.iterdir() if not path.is_symlink()] == [found.watched[0].run.name]


def test_of_two_optimizers_the_one_that_steps_trains(found, tmp_path):
    model = First()
    with found:
        unused, used = torch.optim.Adam(model.parameters()), sgd(model)
        losses = train(model, used, 6)
    [monitor] = found.watched
    with Run(monitor.run) as run:
        assert run.about["optimizer"] == "SGD" and unused.param_groups
    assert measured(monitor)[1] == pytest.approx(dict(enumerate(losses)))
    assert len([path for path in tmp_path.iterdir() if not path.is_symlink()]) == 1


def test_a_model_that_is_called_but_never_trained(found, tmp_path):
    model = First()
    with found:
        optimizer = sgd(model)
        model(torch.randn(16, 4)).sum().backward()
    assert not found.watched and not list(tmp_path.iterdir()) and optimizer.param_groups


def test_nothing_is_trained(found, tmp_path):
    model = First()
    with found:
        for _ in range(30):
            model(torch.randn(16, 4)).sum().backward()
    assert not found.watched and not list(tmp_path.iterdir())


def test_the_outermost_is_the_model(found):
    """Not the parts of it, nor the loss, which is a module too, nor who is called without gradients, nor a teacher."""
    model, teacher, copied, criterion = First(), Second(), Third(), nn.MSELoss()
    outer = nn.Sequential(nn.Identity(), model)
    evaluated = nn.ModuleList([outer])
    evaluated.forward = outer.forward
    teacher.requires_grad_(False)
    optimizer = sgd(model)
    with found:
        for _ in range(6):
            x = torch.randn(16, 4)
            with torch.no_grad():
                copied(x)
                evaluated(x)
            optimizer.zero_grad()
            criterion(outer(x), teacher(x)).backward()
            optimizer.step()
    [monitor] = found.watched
    assert monitor.model_name == "Sequential"
    assert {layer["site"] for layer in monitor.report.layers} >= {"1.0", "1.2.weight"}


def test_a_copy_that_is_averaged_is_not_trained(found):
    model = First()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    with found:
        for _ in range(6):
            train(model, optimizer, 1)
            averaged.update_parameters(model)
            averaged(torch.randn(16, 4))
    assert named(found) == ["First"]


def test_a_wrapper_of_processes(found, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own there, for good
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        model = First()
        wrapped = nn.parallel.DistributedDataParallel(model)
        small = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        with found:
            losses = train(wrapped, sgd(model), 6)
            train(small, sgd(small), 6)
        assert named(found) == ["First", "Linear"]
        steps, told = measured(found.watched[0])
        assert steps == [0, 4] and told == pytest.approx(dict(enumerate(losses)))
        with Run(found.watched[0].run) as run:
            assert run.window(0)["0"].count == 128 and ("0.weight", "param_grad_norm") in run.window(0)
    finally:
        distributed.destroy_process_group()


def test_two_models_that_are_trained_against_each_other(found):
    """Each has a monitor, and the loss that was its own."""

    class Generator(First):
        pass

    class Critic(nn.Linear):
        pass

    generator, critic = Generator(), Critic(2, 1)
    expected = {"Critic": [], "Generator": []}
    with found:
        makes, judges = sgd(generator), sgd(critic)
        for _ in range(12):
            judges.zero_grad()
            fake = generator(torch.randn(16, 4))
            loss = critic(fake.detach()).mean() - critic(torch.randn(16, 2)).mean()
            loss.backward()
            judges.step()
            expected["Critic"].append(loss.item())
            makes.zero_grad()
            loss = -critic(generator(torch.randn(16, 4))).mean()
            loss.backward()
            makes.step()
            expected["Generator"].append(loss.item())
    assert sorted(named(found)) == ["Critic", "Generator"]
    for monitor in found.watched:
        steps, told = measured(monitor)
        assert told == pytest.approx({step: expected[monitor.model_name][step] for step in told})
        assert set(told) == set(range(12)) and steps[0] == 0
        assert monitor.steps == 12


def test_parts_that_are_called_one_by_one(found):
    backbone, head = First(), nn.Linear(2, 3)
    optimizer = sgd(backbone, head)
    with found:
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(head(backbone(torch.randn(16, 4)).relu()), torch.randint(3, (16,))).backward()
            optimizer.step()
    assert named(found) == ["First", "Linear"]  # in the order in which they were called
    both = [measured(monitor) for monitor in found.watched]
    assert both[0] == both[1] and both[0][0] == [1, 5]


def test_layers_that_a_function_calls_are_no_models(found):
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))
    layers[7] = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
    optimizer = sgd(layers)
    with found, pytest.warns(UserWarning, match="trains 20 separate modules; only the 8 largest"):
        for _ in range(4):
            x = torch.randn(8, 4)
            for layer in layers:
                x = layer(x)
            optimizer.zero_grad()
            x.square().mean().backward()
            optimizer.step()
    assert len(found.watched) == 8 and "Sequential" in named(found)


def test_two_optimizers_by_turns_have_one_monitor(found):
    model = First()
    one, other = sgd(model[0]), torch.optim.Adam(model[2].parameters())
    with found:
        for _ in range(60):
            one.zero_grad()
            other.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            one.step()
            other.step()
    [monitor] = found.watched
    assert monitor.steps == 60
    with Run(monitor.run) as run:
        assert run.about["optimizer"] == "SGD" and run.state == "ended"


def test_an_optimizer_that_takes_the_place_of_another(found):
    model = First()
    first, second = sgd(model), torch.optim.Adam(model.parameters(), 1e-3)
    with found:
        train(model, first, 30)
        losses = train(model, second, 60)
    assert [monitor.steps for monitor in found.watched] == [30, 60]
    with Run(found.watched[0].run) as before, Run(found.watched[1].run) as after:
        assert (before.about["optimizer"], after.about["optimizer"]) == ("SGD", "Adam")
        assert before.state == after.state == "ended"
        assert after.losses == pytest.approx({step: losses[step] for step in after.losses}) and max(after.losses) == 59


def test_a_model_that_is_trained_later(found):
    first, second = First(), Second()
    optimizers = sgd(first), sgd(second)
    with found:
        train(first, optimizers[0], 10)
        losses = train(second, optimizers[1], 10)
        train(first, optimizers[0], 3)
    assert named(found) == ["First", "Second"] and [monitor.steps for monitor in found.watched] == [13, 10]
    _, told = measured(found.watched[1])
    assert told == pytest.approx({step: losses[step] for step in told}) and max(told) == 9
    assert found.watched[1].run.name.startswith("script-Second-")


def test_a_model_that_becomes_part_of_another(found):
    """First it is trained with a decoder, then with a head."""

    class Autoencoder(nn.Sequential):
        pass

    encoder = First()
    autoencoder = Autoencoder(encoder, nn.Linear(2, 4))
    with found:
        train(autoencoder, sgd(autoencoder), 10)
        classifier = nn.Sequential(encoder, nn.Linear(2, 2))
        train(classifier, sgd(classifier), 10)
    assert named(found) == ["Autoencoder", "Sequential"]
    assert {layer["site"] for layer in found.watched[1].report.layers} >= {"0.0", "1", "1.weight"}


def test_what_is_not_called_at_first(found):
    """A bare parameter is a training of its own."""
    model, scale = First(), nn.Parameter(torch.ones(3))
    optimizer, bare = sgd(model), torch.optim.SGD([scale], 0.1)
    with found:
        for step in range(12):
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in model.parameters()) if step < 5 else model(torch.ones(2, 4)).mean()
            loss.backward()
            optimizer.step()
            scale.sum().backward()
            bare.step()
        for _ in range(discovery._ATTEMPTS + 2):
            bare.step()
        assert not torch.nn.modules.module._global_forward_pre_hooks  # nobody looks any more
    [tensors, monitor] = found.watched
    assert monitor.steps == 12 and min(monitor.report.losses) == 5
    assert (tensors.model_name, tensors.steps) == ("Tensors", 12 + discovery._ATTEMPTS + 2)


@pytest.mark.parametrize("how", ["wrapped", "in place", "function"])
def test_compiled_models(found, how, nothing_compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = First()

        def forward(self, x):
            return self.inner(x)

    model = Net()
    options = {"backend": "aot_eager", "fullgraph": True}
    warnings.filterwarnings("error", category=UserWarning)  # until the end of the test
    with found:
        if how == "wrapped":
            called = torch.compile(model, **options)
        elif how == "in place":
            called = model
            model.compile(**options)
        else:
            called = torch.compile(lambda x: model(x), **options)
        losses = train(called, sgd(model), discovery._ATTEMPTS + 5)
    [monitor] = found.watched
    assert monitor.model_name == "Net" and monitor.steps == len(losses)


@pytest.mark.parametrize(
    "fault, expected",
    [("forward", ("TH101", "1", 0)), ("loss", ("TH104", "", 0)), ("backward", ("TH103", "2", 0))],
)
def test_what_is_not_finite_in_the_first_step_has_its_own_cause(found, fault, expected):
    """It is not "the parameters are broken", which they are from the second step on."""
    between = torch.log if fault == "forward" else torch.relu
    model = nn.Sequential(nn.Linear(4, 8), Returning(between), nn.Linear(8, 2))
    losses = {"loss": lambda y: y.mean() / 0, "backward": lambda y: (y - y.detach()).sum().abs().sqrt()}
    with found:
        optimizer = sgd(model)
        for _ in range(10):
            optimizer.zero_grad()
            losses.get(fault, torch.mean)(model(torch.randn(16, 4))).backward()
            optimizer.step()
    [first] = [finding for finding in found.watched[0].report.findings if finding.severity >= Severity.WARNING]
    assert (first.code, first.site, first.step) == expected


# ------------------------------------------------------------ losses and steps


def test_micro_batches_are_summed_as_they_were_divided(found):
    model = First()
    optimizer = sgd(model)
    expected = {}
    with found:
        for step in range(8):
            optimizer.zero_grad()
            parts = [model(torch.randn(16, 4)).square().mean() / 4 for _ in range(4)]
            for part in parts:
                part.backward()
            optimizer.step()
            expected[step] = sum(part.item() for part in parts)
    steps, told = measured(found.watched[0])
    assert steps == [1, 5] and told == pytest.approx(expected)


def test_a_scaler_is_taken_off_and_what_it_leaves_out_does_not_pile_up(found):
    model = First()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    taken = []
    with found:
        for step in range(16):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 4)).square().mean()
            scaler.scale(loss * (torch.inf if step in (2, 3, 9) else 1)).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                taken.append(loss.item())
    assert len(taken) == 13
    steps, told = measured(found.watched[0])
    assert steps == [1, 5, 9] and told == pytest.approx(dict(enumerate(taken)))
    assert found.watched[0].report.ok


def test_the_loss_of_a_closure_is_that_of_a_single_call(found):
    model, x = First(), torch.randn(16, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        calls.append(loss.item())
        return loss

    with found:
        for _ in range(6):
            calls = []
            optimizer.step(closure)
            seen.append(calls)
    _, told = measured(found.watched[0])
    assert list(told) == [0, 1, 2, 3, 4, 5]
    assert all(any(told[step] == pytest.approx(loss) for loss in seen[step]) for step in told)


def test_micro_batches_before_a_closure_are_part_of_the_step(found):
    """As Lightning accumulates."""
    model = First()
    optimizer = sgd(model)
    expected = {}

    def part():
        loss = model(torch.randn(16, 4)).square().mean() / 2
        loss.backward()
        parts.append(loss.item())
        return loss

    with found:
        for step in range(6):
            parts = []
            optimizer.zero_grad()
            part()
            optimizer.step(part)
            expected[step] = sum(parts)
    assert measured(found.watched[0])[1] == pytest.approx(expected)


def test_a_step_that_calls_that_of_its_parent_is_one(found):
    class Careful(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            return super().step(closure)

    model = First()
    sgd(model)  # from its first optimizer on, torch puts its own around the steps of a class
    optimizer = Careful(model.parameters(), 0.01)
    with found:
        losses = train(model, optimizer, 10)
    [monitor] = found.watched
    steps, told = measured(monitor)
    assert (steps, monitor.steps) == ([1, 5, 9], 10) and told == pytest.approx(dict(enumerate(losses)))


def test_backwards_that_nobody_steps_after_do_not_pile_up(found, monkeypatch):
    monkeypatch.setattr(lanes, "_BACKWARDS", 50)
    limited = Discovery(to=found._options["to"][0])
    model = First()
    with limited:
        for _ in range(200):
            model(torch.randn(1, 4)).sum().backward()
        assert len(limited._lane().losses) == 50


def test_training_is_the_same_to_the_last_bit(found):
    def trained():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))
        train(model, torch.optim.AdamW(model.parameters(), 0.01), 30)
        return {**copy.deepcopy(model.state_dict()), "random": torch.get_rng_state()}

    plain = trained()
    with found:
        watched = trained()
    assert found.watched and all(torch.equal(plain[name], watched[name]) for name in plain)


# ------------------------------------------------------------ what is left, and what fails


def test_what_nobody_trains_any_more_is_freed(found):
    """A script may train one model after another, each of which fills the device."""
    models = []
    with found:
        for _ in range(4):
            model = nn.Sequential(Second(), nn.Dropout(0.1))
            optimizer = sgd(model)
            models += [weakref.ref(model), weakref.ref(model[1])]
            train(model, optimizer, 6)
            del model, optimizer
            gc.collect()
            assert not any(reference() is not None for reference in models[:-2])
    gc.collect()
    assert models[-1]() is None
    assert [monitor.steps for monitor in found.watched] == [6, 6, 6, 6]
    assert all(monitor.report.ok and measured(monitor)[0][0] == 0 for monitor in found.watched)
    with Run(found.watched[0].run) as run:
        assert run.state == "ended"


def test_a_training_that_rests_for_long_is_over(found, monkeypatch):
    monkeypatch.setattr(discovery, "_IDLE", 15)
    first, second = First(), Second()
    optimizers = sgd(first), sgd(second)
    with found:
        train(first, optimizers[0], 5)
        train(second, optimizers[1], 20)
        with Run(found.watched[0].run) as run:
            assert run.state == "ended"
        train(first, optimizers[0], 5)  # and may begin again
    assert named(found) == ["First", "Second", "First"] and [monitor.steps for monitor in found.watched] == [5, 20, 10]


@pytest.mark.parametrize(
    "error, state", [(KeyboardInterrupt(), "interrupted"), (ValueError(), "failed"), (SystemExit(), "ended")]
)
def test_how_the_script_ended(found, error, state):
    model = First()
    optimizer = sgd(model)
    with pytest.raises(type(error)), found:
        train(model, optimizer, 6)
        raise error
    with Run(found.watched[0].run) as run:
        assert run.state == state and list(run.losses) == [0, 1, 2, 3, 4, 5]


def test_a_finding_may_stop_the_script(tmp_path):
    model = First()
    optimizer = sgd(model)
    with pytest.raises(StopTraining, match="TH10"):
        with Discovery(every=1, to=tmp_path, on_finding="stop") as found:
            train(model, optimizer, 3)
            with torch.no_grad():
                model[0].weight.fill_(torch.nan)
            train(model, optimizer, 3000)
    assert found.watched[0].steps < 3000


@pytest.mark.parametrize("method", ["_stepped", "_note", "_backward", "_meet", "_find", "_watch"])
@pytest.mark.filterwarnings("error")
def test_a_fault_of_ours_does_not_stop_the_script(found, monkeypatch, method):
    """Not where warnings are errors either, nor if there are others' hooks."""
    model, others = First(), []
    optimizer = sgd(model)
    monkeypatch.setattr(Discovery, method, lambda *args, **kwargs: 1 / 0)
    with found:
        handles = [register_optimizer_step_post_hook(lambda *args: others.append(1)) for _ in range(2)]
        try:
            losses = train(model, optimizer, 10)
        finally:
            for handle in handles:
                handle.remove()
    assert len(losses) == 10 and len(others) == 20 and losses[-1] != losses[0]
    assert not found.watched


def test_a_model_that_cannot_be_watched_is_left_alone(found):
    """It is said once, and others are watched all the same."""
    odd, model = nn.Sequential(First(), nn.LazyLinear(2)), First()
    with found, pytest.warns(UserWarning, match="could not watch Sequential: ValueError") as told:
        odd.forward = lambda x: odd[0](x)
        train(odd, torch.optim.SGD(odd[0].parameters(), 0.01), 10)
        train(model, sgd(model), 10)
    assert named(found) == ["First"] and found.watched[0].steps == 10
    assert len(told) == 1


def test_a_fault_is_told_once(found, monkeypatch):
    model = First()
    optimizer = sgd(model)
    monkeypatch.setattr(Discovery, "_meet", lambda *args: 1 / 0)
    with found, pytest.warns(UserWarning, match="stopped looking for what is trained: Zero") as told:
        train(model, optimizer, 10)
    assert len(told) == 1 and told[0].filename == __file__


def test_a_forked_process_writes_nothing(found, tmp_path):
    model = First()
    optimizer = sgd(model)
    with found:
        train(model, optimizer, 3)
        child = os.fork()
        if not child:
            try:
                train(model, optimizer, 3)
                train(other := Second(), sgd(other), 5)
                os._exit(len(found.watched) - 1)
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        train(model, optimizer, 3)
    assert named(found) == ["First"] and found.watched[0].steps == 6
    assert len([folder for folder in tmp_path.iterdir() if not folder.is_symlink()]) == 1


def test_hooks_for_all_modules_are_there_for_a_step_alone(found):
    known = torch.nn.modules.module._global_forward_pre_hooks
    model = First()
    optimizer = sgd(model)
    with found:
        assert len(known) == 1
        train(model, optimizer, 1)
        assert not known
        late = sgd(model)
        assert len(known) == 1
        train(model, late, 1)
        assert not known
        train(model, once := sgd(Second()), 1)  # it never steps again
        assert len(known) == 1
        train(model, optimizer, discovery._PATIENCE)
        assert not known and once.param_groups


# ------------------------------------------------------------ without modules, and without optimizers


weight, shifts = torch.zeros(3, 1, requires_grad=True), [torch.zeros(1, requires_grad=True)]  # variables to name


@pytest.fixture
def bare():
    """A line to fit, by the variables of this file."""
    with torch.no_grad():
        weight.zero_()
        shifts[0].zero_()
    weight.grad = shifts[0].grad = None
    x = torch.randn(40, 16, 3)
    return [(part, part.sum(1, keepdim=True)) for part in x]


def bare_loss(x, y):
    return F.mse_loss(x @ weight + shifts[0], y)


def found_in(monitor):
    return {finding.code for top in monitor.report.findings for finding in (top, *top.affected)}


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_tensors_of_no_module(found, kind):
    tensors = [kind(torch.zeros(3, 1)).requires_grad_(), kind(torch.zeros(1)).requires_grad_()]
    with found:
        optimizer = torch.optim.SGD(tensors, 0.1)
        losses = []
        for _ in range(12):
            x = torch.randn(16, 3)
            loss = F.mse_loss(x @ tensors[0] + tensors[1], x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    [monitor] = found.watched
    assert monitor.model_name == "Tensors" and monitor.report.ok
    steps, told = measured(monitor)
    assert steps == [1, 5, 9] and told == pytest.approx(dict(enumerate(losses)))
    with Run(monitor.run) as run:
        ports = {"param_grad", "step_grad_norm", "update_ratio"}
        assert {(path, port) for path in ("param0", "param1") for port in ports} <= run.window(1).rows.keys()


def test_tensors_have_the_names_of_variables(found, bare):
    with found:
        optimizer = torch.optim.SGD([weight, *shifts], 0.1)
        for x, y in bare:
            optimizer.zero_grad()
            bare_loss(x, y).backward()
            optimizer.step()
    assert {layer["site"] for layer in found.watched[0].report.layers} == {"weight", "shifts[0]"}


def test_tensors_that_the_script_itself_updates(found, bare):
    """A step is from one backward to the next."""
    losses = []
    with found:
        for x, y in bare:
            loss = bare_loss(x, y)
            loss.backward()
            with torch.no_grad():
                for tensor in (weight, *shifts):
                    tensor -= 0.1 * tensor.grad
                    tensor.grad = None
            losses.append(loss.item())
    [monitor] = found.watched
    steps, told = measured(monitor)
    assert (monitor.steps, steps[0]) == (40, 1) and told == pytest.approx(dict(enumerate(losses)))
    with Run(monitor.run) as run:
        assert run.window(1).rows.keys() == {("weight", "param_grad"), ("shifts[0]", "param_grad")}
    assert monitor.report.ok


def test_tensors_that_are_replaced_in_every_step(found):
    with found:
        value = torch.ones(2, requires_grad=True)
        losses = []
        for _ in range(10):
            loss = value.square().sum()
            loss.backward()
            value = (value - 0.1 * value.grad).detach().requires_grad_()
            losses.append(loss.item())
    assert found.watched[0].report.losses == pytest.approx(dict(enumerate(losses)))


@pytest.mark.parametrize("unused", [False, True])
def test_a_model_that_the_script_itself_updates(found, unused):
    """Also if there is an optimizer, which never steps."""
    model = First()
    losses, mean = [], []
    with found:
        kept = [sgd(model)] if unused else []
        for _ in range(40):
            x = torch.randn(16, 4)
            loss = model(x).square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
            losses.append(loss.item())
            mean.append(x.mean().item())
    [monitor] = found.watched
    first = discovery._LONELY * unused
    steps, told = measured(monitor)
    assert told == pytest.approx(dict(enumerate(losses[first:]))) and monitor.report.ok and len(kept) == unused
    with Run(monitor.run) as run:
        assert run.about["optimizer"] is None and steps[0] == 2
        assert run.window(2)["0", "input"]["moments"].mean == pytest.approx(mean[first + 2], abs=1e-6)


def test_gradients_that_nobody_learns_from(found, tmp_path):
    """Nor is an attack a training: the inputs change, but not the model."""
    model = First()
    with found:
        x = torch.randn(16, 4, requires_grad=True)
        for _ in range(30):
            model(x).square().mean().backward()
            x = (x + 0.01 * x.grad.sign()).detach().requires_grad_()
        assert not torch.nn.modules.module._global_forward_pre_hooks  # nobody looks any more
    assert not found.watched and not list(tmp_path.iterdir())


def test_an_image_is_trained_and_not_the_model_that_judges_it(found):
    judge = First()
    image = torch.randn(16, 4, requires_grad=True)
    with found:
        optimizer = torch.optim.Adam([image], 0.01)
        for _ in range(10):
            optimizer.zero_grad()
            judge(image).square().mean().backward()
            optimizer.step()
    assert named(found) == ["Tensors"] and found.watched[0].steps == 10


def test_inner_loops_are_no_trainings(found, tmp_path):
    """A copy of the model takes a step or two in every step of the outer loop."""
    model = First()
    with found:
        outer = sgd(model)
        for _ in range(30):
            copied = copy.deepcopy(model)
            train(copied, sgd(copied), 2)
            train(model, outer, 1)
            del copied
            gc.collect()
    [monitor] = found.watched
    assert monitor.steps == 30 and measured(monitor)[0][0] == 0
    assert len([path for path in tmp_path.iterdir() if not path.is_symlink()]) == 1


def test_a_training_of_a_single_step_is_told_of(found):
    model = First()
    with found:
        train(model, sgd(model), 1)
    assert [monitor.steps for monitor in found.watched] == [1]
