"""What a Lightning Trainer trains is watched: the same numbers as by hand, and a training that does not notice."""

import copy
import gc
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from specimens import hooks_of
from torchhook.integrations import lightning
from torchhook.integrations.lightning import TorchhookCallback
from torchhook.training.logs import Log
from torchhook.training.monitor import Monitor
from torchhook.training.runs import Run

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:lightning"), pytest.mark.usefixtures("one_thread")]

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
BATCH = 4  # 16 batches an epoch
OTHERS = TensorDataset(100 * X, Y)  # to validate on: what is seen of these shows


@pytest.fixture(autouse=True)
def _no_scalers_of_other_tests():
    gc.collect()


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CallsItsPart(Net):
    """As many do: what Lightning calls is no forward of the module."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class Kept(Log):
    def __init__(self):
        self.entries = []

    def write(self, entry):
        self.entries.append(entry)

    @property
    def losses(self):
        return {step: loss for entry in self.entries for step, loss in entry.losses.items()}

    @property
    def scalars(self):
        return {entry.step: entry.scalars for entry in self.entries}


def made(kind=Net):
    torch.manual_seed(0)
    return kind()


def trainer(*callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet["enable_checkpointing"] = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return pl.Trainer(callbacks=list(callbacks), **{"max_epochs": 2, **quiet, **options})


def loader(data=None):
    return DataLoader(data or TensorDataset(X, Y), batch_size=BATCH)


def fit(module, *callbacks, validate=False, **options):
    there = trainer(*callbacks, **options)
    there.fit(module, loader(), loader(OTHERS) if validate else None)
    return there


def by_hand(accumulate=1, context=nullcontext, scaler=None, every=2, epochs=2):
    module, kept = made(), Kept()
    optimizer = module.configure_optimizers()
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    with Monitor(module, optimizer, every=every, price=None, to=[kept]) as monitor:
        for _ in range(epochs):
            batches = list(loader())
            for first in range(0, len(batches), accumulate):
                losses = []
                optimizer.zero_grad()
                for batch in batches[first : first + accumulate]:
                    with context():
                        losses.append(module.training_step(batch, 0))
                    scaler.scale(losses[-1] / accumulate).backward()
                scaler.step(optimizer)
                scaler.update()
                monitor.step(torch.stack(losses).detach().mean())
    return kept, module


def same_numbers(found, expected):
    assert list(found.scalars) == list(expected.scalars) and len(found.scalars) > 5
    for step, scalars in expected.scalars.items():
        assert found.scalars[step] == pytest.approx(scalars, rel=1e-5, abs=1e-7, nan_ok=True), step
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)


def same_weights(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def half():
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def half_scaled():
    return torch.autocast("cpu", torch.float16, cache_enabled=False)


def quickly_growing():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


SETTINGS = {
    "plain": ({}, {}),
    "accumulating": ({"accumulate_grad_batches": 3}, {"accumulate": 3}),  # 16 batches: the last step has one
    "bf16": ({"precision": "bf16-mixed"}, {"context": half}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Net, CallsItsPart])
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_recorded_is_what_a_loop_by_hand_records(kind, setting):
    options, same = SETTINGS[setting]
    kept, module = Kept(), made(kind)
    callback = TorchhookCallback(2, price=None, to=[kept])
    fit(module, callback, validate=True, val_check_interval=5, **options)
    expected, twin = by_hand(**same)
    same_numbers(kept, expected)
    assert same_weights(module, twin)
    assert callback.report.ok and callback.monitor is None


def test_a_loss_is_told_as_it_was_before_it_was_scaled():
    kept = Kept()
    precision = MixedPrecision("16-mixed", "cpu", quickly_growing())
    fit(made(), TorchhookCallback(2, price=None, to=[kept]), plugins=[precision], accumulate_grad_batches=2)
    expected, _ = by_hand(accumulate=2, context=half_scaled, scaler=quickly_growing())
    assert precision.scaler.get_scale() > 2**11
    assert kept.losses == pytest.approx(expected.losses, rel=1e-3)


def test_the_training_is_the_same_to_the_bit_and_nothing_is_left():
    alone, watched = made(), made()
    fit(alone, validate=True)
    there = fit(watched, TorchhookCallback(1, price=None, to=[]), validate=True)
    assert same_weights(alone, watched)
    assert hooks_of(watched) == hooks_of(alone)
    (optimizer,) = there.optimizers
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    twin = pickle.loads(pickle.dumps(copy.deepcopy(watched)))
    assert torch.equal(twin(X), watched(X))


def test_the_run_is_in_a_folder_and_a_second_fit_has_another(tmp_path):
    callback = TorchhookCallback(4, price=None, to=[tmp_path], name="first", ignore=["TH6"])
    assert callback.report is None and callback.run is None
    module = made()
    fit(module, callback)
    with Run(callback.run) as run:
        assert run.state == "ended" and run.report.model == "Net" and len(run.losses) == 32
        assert run.about["optimizer"] == "SGD" and run.folder.name.startswith("first-")
        assert not any(code.startswith("TH6") for code in run.about["rules"])
    first = callback.run
    fit(module, callback, max_epochs=1)
    assert callback.run != first and len(Run(callback.run).losses) == 16
    copy.deepcopy(callback), pickle.dumps(callback)


class Breaks(Net):
    """From some batch on its loss is NaN, or it raises; and then it takes its time."""

    when, raises, slow = 12, None, 0.02

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.trainer.fit_loop.total_batch_idx < self.when:
            return loss
        if self.raises is not None:
            raise self.raises
        time.sleep(self.slow)
        return loss * torch.nan


def test_an_error_stops_the_trainer_as_it_stops_early():
    callback = TorchhookCallback(2, to=[], on_finding="stop")
    with pytest.warns(UserWarning, match="stopping the training: TH10"):
        there = fit(made(Breaks), callback, max_epochs=50)
    assert 12 < there.global_step < 40
    assert there.should_stop and there.state.status == "finished"
    assert not callback.report.ok


def test_otherwise_a_finding_stops_nothing(recwarn, capfd):
    callback = TorchhookCallback(2, price=None, to=[])
    there = fit(made(Breaks), callback)
    assert there.global_step == 32 and not callback.report.ok
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("torchhook: ")]
    assert re.match(r"torchhook: \d error.* \(TH\d+ at ", line)
    assert not [warning for warning in recwarn if "TH1" in str(warning.message)]


def test_a_function_is_told_of_findings_in_the_thread_of_the_training():
    told = []
    fit(made(Breaks), TorchhookCallback(2, to=[], on_finding=lambda found: told.append(threading.current_thread())))
    assert told and set(told) == {threading.main_thread()}


ENDS = {"failed": ValueError("no"), "interrupted": KeyboardInterrupt(), "interrupted by SIGTERM": SIGTERMException()}


@pytest.mark.parametrize("end", ENDS)
def test_a_fit_that_raises_is_closed(end, tmp_path):
    module, callback = made(Breaks), TorchhookCallback(2, price=None, to=[tmp_path])
    module.raises = ENDS[end]
    before = hooks_of(module.net)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((ValueError, SystemExit)):
            fit(module, callback)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    with Run(callback.run) as run:
        assert run.state == end.split()[0] and len(run.losses) == 12
        assert (run.why().to_dict()["error"] or {}).get("message") == ("no" if end == "failed" else None)
    assert hooks_of(module.net) == before
    assert callback.monitor is None and callback.report is not None


def test_a_checkpoint_has_nothing_of_it_and_steps_go_on_where_it_was_made(tmp_path):
    whole, rest = Kept(), Kept()
    fit(
        made(), TorchhookCallback(2, price=None, to=[whole]), ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1)
    )
    (file,) = tmp_path.glob("*step=16*")
    assert not any("Torchhook" in key for key in torch.load(file, weights_only=False)["callbacks"])
    callback, numbers = TorchhookCallback(2, price=None, to=[rest]), []
    module = made()
    module.on_before_backward = lambda loss: numbers.append(callback.monitor.steps)  # the number of the next step
    trainer(callback).fit(module, loader(), ckpt_path=file)
    assert numbers == list(range(16, 32))
    assert rest.losses == pytest.approx({step: loss for step, loss in whole.losses.items() if step >= 16})


class Two(Net):
    """Two optimizers, by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for part, optimizer in zip((self.other, self.net), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(part(x), y))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.other.parameters()), torch.optim.SGD(self.net.parameters(), lr=0.1)]


def test_of_several_optimizers_the_largest_is_watched(tmp_path):
    module, kept = made(Two), Kept()
    callback = TorchhookCallback(2, price=None, to=[kept, tmp_path])
    with torch.no_grad():
        x, y = next(iter(loader()))
        expected = F.cross_entropy(module.other(x), y) + F.cross_entropy(module.net(x), y)
    fit(module, callback)
    assert callback.report.ok, callback.report
    assert list(kept.losses) == list(range(32)) and kept.losses[0] == pytest.approx(expected.item())
    scalars = kept.scalars[0]
    assert "update_ratio/net.0.weight" in scalars and "update_ratio/other.weight" not in scalars
    assert "grad_norm/other.weight" in scalars
    assert Run(callback.run).about["optimizer"] == "SGD"


class Newton(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


def test_of_an_optimizer_with_several_tries_the_last_loss_counts():
    kept, told = Kept(), []
    module = made(Newton)
    step = module.training_step
    module.training_step = lambda batch, batch_idx: told.append(step(batch, batch_idx)) or told[-1]
    fit(module, TorchhookCallback(1, price=None, to=[kept]), max_steps=1)
    assert len(told) > 2 and kept.losses == {0: told[-1].item()}


def test_a_compiled_module_is_trained_and_watched_all_the_same(nothing_compiled):
    kept, module = Kept(), made()
    fit(torch.compile(module, backend="eager"), TorchhookCallback(2, price=None, to=[kept]), max_epochs=1)
    expected, twin = by_hand(epochs=1)
    assert same_weights(module, twin) and kept.losses == pytest.approx(expected.losses)
    for name in ("grad_norm", "grad_norm/net.0.weight", "update_ratio/net.2.weight"):
        assert kept.scalars[4][name] == pytest.approx(expected.scalars[4][name])


class Curves(Logger):
    name, version = "curves", 0

    def __init__(self):
        super().__init__()
        self.rows, self.threads = {}, set()

    def log_metrics(self, metrics, step=None):
        self.threads.add(threading.current_thread())
        self.rows.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, *args, **kwargs):
        pass


def test_numbers_go_to_the_loggers_if_they_are_asked_for():
    kept, curves = Kept(), Curves()
    callback = TorchhookCallback(4, price=None, to=[kept], layers="net.2*")
    fit(made(), callback, logger=curves)
    rows = {step: row for step, row in curves.rows.items() if "torchhook/grad_norm" in row}
    assert set(range(0, 32, 4)) <= set(rows) and curves.threads == {threading.main_thread()}
    row = rows[4]
    assert row["torchhook/grad_norm/net.2.weight"] == kept.scalars[4]["grad_norm/net.2.weight"]
    assert row["torchhook/loss"] == kept.losses[4] and not any("net.0" in name for name in row)
    for layers, names in (((), {"torchhook/loss", "torchhook/grad_norm", "torchhook/learning_rate"}), (None, set())):
        curves = Curves()
        fit(made(), TorchhookCallback(4, price=None, to=[], layers=layers), logger=curves, max_steps=8)
        assert {name for row in curves.rows.values() for name in row if "torchhook" in name} == names


def test_the_other_package_takes_it_too(monkeypatch):
    pytorch_lightning = pytest.importorskip("pytorch_lightning")

    class Other(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = made().net

        forward, training_step, configure_optimizers = Net.forward, Net.training_step, Net.configure_optimizers

    kept = Kept()
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    there = pytorch_lightning.Trainer(
        max_epochs=2, enable_checkpointing=False, callbacks=[TorchhookCallback(2, price=None, to=[kept])], **options
    )
    there.fit(Other(), loader())
    assert kept.losses == pytest.approx(by_hand()[0].losses)
    assert lightning._package() == "lightning.pytorch"
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert lightning._package() == "pytorch_lightning"


def test_without_lightning_it_says_what_to_install(monkeypatch):
    packages = ("lightning", "pytorch_lightning")
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, name)
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "torchhook\[lightning\]"'):
        runpy.run_path(lightning.__file__)


SEVERAL = """
import sys
from pathlib import Path
import torch
from test_lightning_callback import Net, TorchhookCallback, loader, made, trainer

class OneIsBroken(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + loss.detach() * torch.nan if self.global_rank == 1 and batch_idx > 3 else loss

    def on_fit_end(self):
        Path(sys.argv[0]).with_name(f"rank{self.global_rank}").write_text(str(self.trainer.global_step))

if __name__ == "__main__":
    callback = TorchhookCallback(2, ["TH104"], to=[sys.argv[1]], on_finding="stop")
    trainer(callback, devices=2, strategy="ddp_fork", max_epochs=50).fit(made(OneIsBroken), loader())
"""


@pytest.mark.slow
def test_processes_have_one_run_and_stop_together(tmp_path):
    script = tmp_path / "several.py"
    script.write_text(SEVERAL)
    here = str(Path(__file__).parent)
    paths = [here, str(Path(here).parent), os.environ["PYTHONPATH"]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", script, tmp_path / "runs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    first, second = (int((tmp_path / f"rank{rank}").read_text()) for rank in range(2))
    assert first == second < 400 and first % 2 == 1
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    with Run(folder) as run:
        assert [found.code for found in run.findings] == ["TH104"]
        assert run.state == "ended" and set(run.ranks()[-1].members) == {0, 1}
