"""A loop with accelerate is watched: steps and losses as they are, numbers in its trackers, its trigger to stop."""

import gc
import re
import threading
import time

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from specimens import hooks_of
from torchhook.integrations.accelerate import monitored
from torchhook.training.logs import Log
from torchhook.training.monitor import Monitor
from torchhook.training.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


@pytest.fixture(autouse=True)
def _no_accelerator_of_other_tests():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Kept(Log):
    def __init__(self):
        self.entries = []

    def write(self, entry):
        self.entries.append(entry)

    @property
    def losses(self):
        return {step: loss for entry in self.entries for step, loss in entry.losses.items()}


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(X, Y), batch_size=4)


def unchanged(number, loss):
    return loss


def trained(accelerator, changed=unchanged, epochs=2, **options):
    """Train as the documentation of accelerate does; the model, its monitor, and the number of batches."""
    raw, *others = parts()
    model, optimizer, loader = accelerator.prepare(raw, *others)
    batches = 0
    with monitored(accelerator, model, optimizer, **options) as monitor:
        for _ in range(epochs):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = changed(batches, F.cross_entropy(model(x), y))
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                monitor.step(loss)
                batches += 1
                if accelerator.check_trigger():
                    return raw, monitor, batches
    return raw, monitor, batches


def by_hand(accumulate, context):
    model, optimizer, loader = parts()
    kept = Kept()
    with Monitor(model, optimizer, every=2, price=None, to=[kept]) as monitor:
        for _ in range(2):
            batches = list(loader)
            for first in range(0, len(batches), accumulate):
                losses = []
                for x, y in batches[first : first + accumulate]:
                    with context:
                        out = model(x)
                    losses.append(F.cross_entropy(out.float(), y))
                    (losses[-1] / accumulate).backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(torch.stack(losses).detach().mean())
    return kept, model


def same_weights(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("accumulate", [1, 3])  # of 10 batches an epoch: the last step has one
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_what_is_recorded_is_what_a_loop_by_hand_records(accumulate, precision):
    kept = Kept()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    model, monitor, _ = trained(accelerator, every=2, price=None, to=[kept])
    expected, twin = by_hand(accumulate, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"))
    assert same_weights(model, twin)
    assert len(kept.losses) == (20 if accumulate == 1 else 8)
    assert kept.losses == pytest.approx(expected.losses, rel=1e-6)
    assert [entry.step for entry in kept.entries] == [entry.step for entry in expected.entries]
    for entry, same in zip(kept.entries, expected.entries, strict=True):
        assert entry.scalars == pytest.approx(same.scalars, rel=1e-5, abs=1e-7, nan_ok=True)
    assert monitor.report.ok


def test_a_loop_that_tells_of_real_steps_alone_is_as_good():
    kept = Kept()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, loader = accelerator.prepare(*parts())
    with monitored(accelerator, model, optimizer, every=1, price=None, to=[kept], first_step=7) as monitor:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                monitor.step(loss.item())
    assert list(kept.losses) == [7, 8, 9, 10]


def test_the_training_is_the_same_to_the_bit_and_nothing_is_left():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    alone, optimizer, loader = accelerator.prepare(*parts())
    for x, y in loader:
        with accelerator.accumulate(alone):
            accelerator.backward(F.cross_entropy(alone(x), y))
            optimizer.step()
            optimizer.zero_grad()
    watched, *_ = trained(accelerator, epochs=1, every=1, to=[])
    assert same_weights(alone, watched) and hooks_of(watched) == hooks_of(alone)


def test_a_loop_that_raises_has_failed(tmp_path):
    def failing(number, loss):
        if number == 7:
            raise ValueError
        return loss

    with pytest.raises(ValueError):
        trained(Accelerator(cpu=True), failing, to=[tmp_path], name="loop")
    with Run(tmp_path / "latest") as run:
        assert run.state == "failed" and len(run.losses) == 7 and run.about["optimizer"] == "SGD"


def broken(number, loss):
    if number < 10:
        return loss
    time.sleep(0.02)
    return loss * torch.nan


def test_an_error_sets_the_trigger():
    with pytest.warns(UserWarning, match="to stop the training: TH10"):
        *_, monitor, batches = trained(Accelerator(cpu=True), broken, 50, every=2, to=[], on_finding="stop")
    assert 10 < batches < 60 and not monitor.report.ok


def test_otherwise_a_finding_stops_nothing(recwarn, capfd):
    *_, monitor, batches = trained(Accelerator(cpu=True), broken, every=2, to=[])
    assert batches == 20 and not monitor.report.ok
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("torchhook: ")]
    assert re.match(r"torchhook: \d error.* \(TH\d+ at ", line)
    assert not [warning for warning in recwarn if "TH1" in str(warning.message)]


class Curves(GeneralTracker):
    name, requires_logging_directory, tracker = "curves", False, None

    def __init__(self):
        super().__init__()
        self.rows, self.threads = [], set()

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **options):
        self.threads.add(threading.current_thread())
        self.rows.append((step, values, options))


class Rows(Curves):
    """Like that of W&B, by its name."""

    name = "wandb"


def test_numbers_go_to_the_trackers():
    curves, rows, kept = Curves(), Rows(), Kept()
    accelerator = Accelerator(cpu=True, log_with=[curves, rows])
    accelerator.init_trackers("project")
    trained(accelerator, every=4, to=[kept], layers="2*")
    assert curves.threads == {threading.main_thread()}
    assert [step for step, *_ in curves.rows] == [entry.step for entry in kept.entries]
    step, values, options = curves.rows[1]
    assert step == 4 and not options
    assert values["torchhook/grad_norm/2.weight"] == kept.entries[1].scalars["grad_norm/2.weight"]
    assert values["torchhook/loss"] == kept.losses[4] and not any("0.weight" in name for name in values)
    step, values, options = rows.rows[1]  # W&B takes nothing of a step that is over
    assert step is None and options == {"commit": False} and values["torchhook/step"] == 4


@pytest.mark.parametrize(
    "layers, names", [((), {"torchhook/loss", "torchhook/grad_norm", "torchhook/learning_rate"}), (None, set())]
)
def test_as_many_as_are_asked_for(layers, names):
    curves = Curves()
    accelerator = Accelerator(cpu=True, log_with=curves)
    accelerator.init_trackers("project")
    trained(accelerator, every=4, to=[], layers=layers)
    assert {name for _, values, _ in curves.rows for name in values} == names
