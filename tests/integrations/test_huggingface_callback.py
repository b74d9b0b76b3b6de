"""What a Hugging Face Trainer trains is watched: the losses that it logs, and a training that does not notice."""

import gc
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from specimens import hooks_of
from torchhook.integrations import huggingface
from torchhook.integrations.huggingface import TorchhookCallback
from torchhook.training.logs import Log
from torchhook.training.monitor import Monitor
from torchhook.training.runs import Run

pytestmark = pytest.mark.usefixtures("one_thread")
transformers.logging.set_verbosity_error()
SMALL = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 16}


@pytest.fixture(autouse=True)
def _no_scalers_of_other_tests():
    gc.collect()


def texts(number, seed, longest=9):
    """Some are longer than others, so that batches differ in their tokens."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, longest, (number,), generator=random).tolist()
    return [{"labels": torch.randint(11, (length,), generator=random)} for length in lengths]


def collated(rows):
    labels = nn.utils.rnn.pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(0), "labels": labels}


class Kept(Log):
    def __init__(self):
        self.entries = []

    def write(self, entry):
        self.entries.append(entry)

    @property
    def losses(self):
        return {step: loss for entry in self.entries for step, loss in entry.losses.items()}


class MeanOfBatch(GPT2LMHeadModel):
    """Knows nothing of how many tokens all accumulated batches have."""

    accepts_loss_kwargs = False

    def forward(self, input_ids, labels=None):
        return super().forward(input_ids=input_ids, labels=labels)


class Tuples(GPT2LMHeadModel):
    def forward(self, input_ids, labels=None, num_items_in_batch=None, **kwargs):
        return super().forward(
            input_ids=input_ids, labels=labels, num_items_in_batch=num_items_in_batch, return_dict=False
        )


def made(kind=GPT2LMHeadModel, dropout=0.1):
    torch.manual_seed(0)
    probabilities = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return kind(GPT2Config(**SMALL, **probabilities, bos_token_id=0, eos_token_id=0))


def trainer(folder, *callbacks, model=None, kind=Trainer, **options):
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    usual = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "logging_steps": 1, "learning_rate": 0.01}
    usual |= {"remove_unused_columns": False, "logging_nan_inf_filter": False}
    return kind(
        model or made(),
        TrainingArguments(str(folder / "out"), **{**quiet, **usual, **options}),
        train_dataset=texts(22, 1),
        eval_dataset=texts(4, 2, longest=15),
        data_collator=collated,
        callbacks=list(callbacks),
    )


def logged(there):
    return {row["step"]: row["loss"] for row in there.state.log_history if "loss" in row}


def same_weights(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


ACCUMULATING = {"gradient_accumulation_steps": 3}  # 11 batches: the last step has two
SETTINGS = {
    "plain": (GPT2LMHeadModel, {}),
    "accumulating": (GPT2LMHeadModel, ACCUMULATING),
    "accumulating means": (MeanOfBatch, ACCUMULATING),
    "accumulating tuples": (Tuples, ACCUMULATING),
    "bf16": (GPT2LMHeadModel, {"bf16": True}),
    "checkpointing": (GPT2LMHeadModel, {"gradient_checkpointing": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_loss_of_each_step_is_what_the_trainer_logs(setting, tmp_path):
    kind, options = SETTINGS[setting]
    kept = Kept()
    there = trainer(tmp_path, TorchhookCallback(2, price=None, to=[kept]), model=made(kind), **options)
    there.train()
    assert len(kept.losses) == there.state.global_step in (8, 22)
    assert kept.losses == pytest.approx(logged(there), rel=1e-6)


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)


def test_what_is_recorded_is_what_a_loop_by_hand_records(tmp_path):
    kept, by_hand = Kept(), Kept()
    there, twin = (
        trainer(tmp_path, *callbacks, model=made(dropout=0.0), kind=InOrder, num_train_epochs=1)
        for callbacks in ([TorchhookCallback(2, price=None, to=[kept])], [])
    )
    there.train()
    batches = [collated(there.train_dataset[first : first + 2]) for first in range(0, 22, 2)]
    model = twin.model.train()
    twin.create_optimizer_and_scheduler(len(batches))
    with Monitor(model, twin.optimizer, every=2, price=None, to=[by_hand], first_step=1) as monitor:
        for batch in batches:
            loss = model(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            twin.optimizer.step()
            monitor.step(loss)
            twin.lr_scheduler.step()
            model.zero_grad()
    assert [entry.step for entry in kept.entries] == [entry.step for entry in by_hand.entries] == list(range(1, 12, 2))
    for entry, expected in zip(kept.entries, by_hand.entries, strict=True):
        assert entry.scalars == pytest.approx(expected.scalars, rel=1e-4, abs=1e-6, nan_ok=True)
    assert same_weights(there.model, model) and len({entry.rate for entry in kept.entries}) > 3


def test_an_evaluation_in_between_is_no_part_of_it(tmp_path):
    kept, other = Kept(), Kept()
    for log, seed in ((kept, 2), (other, 3)):
        there = trainer(
            tmp_path, TorchhookCallback(2, price=None, to=[log]), eval_strategy="steps", eval_steps=1, max_steps=6
        )
        there.eval_dataset = texts(4, seed, longest=15)
        there.train()
        assert sum("eval_loss" in row for row in there.state.log_history) == 6
    assert [entry.scalars for entry in kept.entries] == [entry.scalars for entry in other.entries]


def test_the_training_is_the_same_to_the_bit_and_nothing_is_left(tmp_path):
    alone, watched = made(), made()
    trainer(tmp_path, model=alone, gradient_accumulation_steps=2).train()
    there = trainer(tmp_path, TorchhookCallback(1, price=None, to=[]), model=watched, gradient_accumulation_steps=2)
    there.train()
    assert same_weights(alone, watched)
    assert hooks_of(watched) == hooks_of(alone)
    optimizer = there.optimizer.optimizer
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("options", [{"label_smoothing_factor": 0.1}, {"kind": OwnLoss}], ids=["smoothed", "own"])
def test_a_loss_that_the_model_did_not_return_is_known_by_the_log(options, tmp_path):
    kept = Kept()
    there = trainer(tmp_path, TorchhookCallback(2, price=None, to=[kept]), **options)
    there.train()
    said = logged(there)
    assert kept.losses == {step + 1: said[step] for step in range(1, 22)}


class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.02)


class Breaks(GPT2LMHeadModel):
    """Its loss is NaN from some call on, while its gradients are fine; or it raises."""

    calls, when, raises = 0, 10, None

    def forward(self, *args, **kwargs):
        self.calls += 1
        outputs = super().forward(*args, **kwargs)
        if self.calls > self.when:
            if self.raises is not None:
                raise self.raises
            outputs.loss = outputs.loss + outputs.loss.detach() * torch.nan
        return outputs


def test_an_error_stops_the_trainer_as_it_stops_early(tmp_path):
    callback = TorchhookCallback(2, ["TH104"], to=[], on_finding="stop")
    there = trainer(tmp_path, callback, Slow(), model=made(Breaks), num_train_epochs=50)
    with pytest.warns(UserWarning, match="stopping the training: TH104"):
        there.train()
    assert 10 < there.state.global_step < 60
    assert not callback.report.ok and callback.monitor is None


def test_otherwise_a_finding_stops_nothing(tmp_path, recwarn, capfd):
    callback = TorchhookCallback(2, price=None, to=[])
    there = trainer(tmp_path, callback, model=made(Breaks))
    there.train()
    assert there.state.global_step == 22 and not callback.report.ok
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("torchhook: ")]
    assert re.match(r"torchhook: \d error.* \(TH\d+ at ", line)
    assert not [warning for warning in recwarn if "TH1" in str(warning.message)]


def test_a_function_is_told_of_findings_in_the_thread_of_the_training(tmp_path):
    told = []
    callback = TorchhookCallback(2, to=[], on_finding=lambda found: told.append(threading.current_thread()))
    trainer(tmp_path, callback, Slow(), model=made(Breaks)).train()
    assert told and set(told) == {threading.main_thread()}


@pytest.mark.parametrize("end", [("failed", ValueError), ("interrupted", KeyboardInterrupt)], ids=lambda end: end[0])
def test_at_the_end_of_a_block_a_training_that_raised_is_closed(end, tmp_path):
    state, error = end
    model = made(Breaks)
    before = hooks_of(model)
    model.raises = error()
    with pytest.raises(error), TorchhookCallback(2, price=None, to=[tmp_path]) as callback:
        trainer(tmp_path, callback, model=model).train()
    with Run(callback.run) as run:
        assert run.state == state and list(run.losses) == list(range(1, 11))
        assert (run.why().to_dict()["error"] or {}).get("type") == ("ValueError" if state == "failed" else None)
    assert {key: value for key, value in hooks_of(model).items() if key[1] != "attributes"} == {
        key: value for key, value in before.items() if key[1] != "attributes"
    }
    assert callback.report is not None


def test_the_next_training_closes_one_that_raised(tmp_path):
    model, callback = made(Breaks), TorchhookCallback(2, price=None, to=[tmp_path])
    model.raises = ValueError()
    there = trainer(tmp_path, callback, model=model)
    with pytest.raises(ValueError):
        there.train()
    first = callback.run
    model.raises, model.when = None, 1000
    there.train()
    with Run(first) as failed, Run(callback.run) as run:
        assert failed.state == "failed" and run.state == "ended" and len(run.losses) == 22
        assert run.about["optimizer"] == "AdamW"
    alone = made(Breaks)
    trainer(tmp_path, model=alone).train()
    assert {key for key, value in hooks_of(model).items() if value} == {
        key for key, value in hooks_of(alone).items() if value
    }


@pytest.mark.slow
def test_a_checkpoint_has_nothing_of_it_and_steps_go_on_where_it_was_made(tmp_path):
    whole, rest = Kept(), Kept()
    trainer(tmp_path, TorchhookCallback(2, price=None, to=[whole]), save_strategy="steps", save_steps=8).train()
    folder = tmp_path / "out" / "checkpoint-8"
    state = json.loads((folder / "trainer_state.json").read_text())
    assert not any("Torchhook" in name for name in state["stateful_callbacks"])
    callback, numbers = TorchhookCallback(2, price=None, to=[rest]), []
    asking = TrainerCallback()
    asking.on_step_begin = lambda *args, **kwargs: numbers.append(callback.monitor.steps)  # the number of the next step
    trainer(tmp_path, callback, asking).train(resume_from_checkpoint=str(folder))
    assert numbers == list(range(9, 23))
    assert rest.losses == pytest.approx({step: loss for step, loss in whole.losses.items() if step > 8})


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "torchhook\[huggingface\]"'):
        runpy.run_path(huggingface.__file__)


SEVERAL = """
import os, sys
from pathlib import Path
import torch
from test_huggingface_callback import Breaks, TorchhookCallback, logged, made, trainer

model = made(Breaks)
model.when = 12 if os.environ["RANK"] == "1" else 10_000
callback = TorchhookCallback(2, ["TH104"], to=[sys.argv[1]], on_finding="stop")
there = trainer(
    Path(sys.argv[1]), callback, model=model, gradient_accumulation_steps=2, max_steps=500, ddp_backend="gloo",
    ddp_find_unused_parameters=False,
)
there.train()
print(there.state.global_step, logged(there)[2])
"""


@pytest.mark.slow
def test_processes_have_one_run_and_stop_together(tmp_path):
    script = tmp_path / "several.py"
    script.write_text(SEVERAL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ["PYTHONPATH"]])
    shared = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    shared["MASTER_ADDR"] = "127.0.0.1"
    command = [sys.executable, "-W", "ignore", script, tmp_path / "runs"]
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    (first, mean), (second, _) = (text.splitlines()[-1].split() for text in said)
    assert first == second and int(first) % 2 == 0 and int(first) < 500
    folder = (tmp_path / "runs" / "latest").resolve()
    with Run(folder) as run:
        assert [found.code for found in run.findings] == ["TH104"]
        assert run.losses[2] == pytest.approx(float(mean))
        assert run.state == "ended" and set(run.ranks()[-1].members) == {0, 1}
