"""``torchhook run`` on scripts as people write them, in real processes: Lightning, Hugging Face, and several ranks."""

import os
import subprocess
import sys
import textwrap

import pytest

from torchhook.training.runs import Run

pytestmark = pytest.mark.slow

LIGHTNING = """
    import warnings; warnings.simplefilter("ignore")
    import lightning, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            self.losses = []

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, number):
            loss = (self(batch[0]).squeeze(1) - batch[0].sum(1)).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, number):
            self.log("val", (self(batch[0]).squeeze(1) - batch[0].sum(1)).square().mean())

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), 1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    lightning.seed_everything(0, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(320, 4)), 32)
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", gradient_clip_val=1.0, **quiet)
    model = Regression()
    trainer.fit(model, data, data)
    print(trainer.global_step, *(f"{loss:.6f}" for loss in model.losses))
"""

TRANSFORMERS = """
    import warnings; warnings.simplefilter("ignore")
    import torch
    from torch import nn
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=16)
    data = [{"input_ids": torch.randint(30, (8,)), "labels": torch.tensor(number % 2)} for number in range(64)]
    arguments = TrainingArguments("out", per_device_train_batch_size=8, max_steps=14, learning_rate=1e-3, use_cpu=True,
                                  gradient_accumulation_steps=2, report_to=[], save_strategy="no", disable_tqdm=True)
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data)
    trainer.train()
    print(trainer.state.global_step)
"""

RANKS = """
    import torch
    from torch import distributed, nn

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torch.manual_seed(rank)
    for step in range(12):
        optimizer.zero_grad()
        model(torch.randn(8 * (rank + 1), 4)).square().mean().backward()
        optimizer.step()
    distributed.barrier()
    distributed.destroy_process_group()
"""

APART = RANKS.replace("range(12)", "range(40)").replace(
    "        model(", "        (model if step % 2 else model.module)("
)

OURS = ["torchhook", "run", "--every", "4", "--price", "off"]
TWICE = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
COMMANDS = {
    "fit": (LIGHTNING, ["-m", *OURS, "fit.py"]),
    "trainer": (TRANSFORMERS, ["-m", *OURS, "trainer.py"]),
    "ranks": (RANKS, [*TWICE, *OURS, "ranks.py"]),
    "apart": (APART, [*TWICE, *OURS, "apart.py"]),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """All of them at once, for they take their time to begin: where each ran, and what it said."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    processes = {}
    for name, (script, command) in COMMANDS.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / f"{name}.py").write_text(textwrap.dedent(script))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, **pipes)
        processes[name] = folder, process
    try:
        yield {
            name: (folder, process, *process.communicate(timeout=200)) for name, (folder, process) in processes.items()
        }
    finally:
        for _, process in processes.values():
            process.kill()


def told(done, name):
    """Where it ran, and what it wrote to standard output and standard error, which was all right."""
    folder, process, out, err = done[name]
    assert process.returncode == 0, err
    [run] = [path for path in (folder / "runs").iterdir() if not path.is_symlink()]
    return run, out, err


def measured(run):
    return [window.step for window in run.windows() if window.snapshot]


def test_lightning(done):
    folder, out, err = told(done, "fit")
    steps, *losses = out.split()
    assert steps == "30" and "passed  Regression: " in err and err.count("passed") == 1
    with Run(folder) as run:
        assert (run.model, run.state, run.about["optimizer"]) == ("Regression", "ended", "Adam")
        assert measured(run) == [0, 4, 8, 12, 16, 20, 24, 28]
        assert run.losses == pytest.approx({step: float(losses[step]) for step in range(30)}, abs=1e-5)
        assert run.window(4)["net.0"].count == 32 * 8  # of the training, and not of the validation
        assert run.rates[0] == pytest.approx(0.01) and run.rates[28] == pytest.approx(0.01 * 0.9**2)


def test_the_trainer_of_transformers(done):
    folder, out, err = told(done, "trainer")
    assert out.split()[-1] == "14" and "BertForSequenceClassification: " in err
    with Run(folder) as run:
        assert (run.model, run.state) == ("BertForSequenceClassification", "ended")
        assert measured(run) == [0, 4, 8, 12] and list(run.losses) == list(range(14))
        assert run.window(4)["classifier"].count == 2 * 8 * 2  # of both micro-batches
        assert 0.3 < run.losses[1] < 2  # a mean over them


def test_ranks_that_come_apart(done):
    """Every other forward goes past the wrapper that averages the gradients."""
    _, _, err = told(done, "apart")
    assert err.count("FAILED") == 1 and "error TR102  0 (Linear), step 0" in err
    assert "differs between ranks (not averaged)" in " ".join(err.split())


def test_all_ranks_write_one_run_and_one_of_them_tells(done):
    folder, _, err = told(done, "ranks")
    assert err.count("passed  Sequential: ") == 1 and err.count("→ torchhook dashboard") == 1
    assert not [path for path in folder.iterdir() if path.is_dir()]
    with Run(folder) as run:
        assert (run.state, run.about["rank"], run.about["world_size"]) == ("ended", 0, 2)
        assert measured(run) == [0, 4, 8] and list(run.losses) == list(range(12))
        assert run.window(4)["0"].count == 8 * 8 * (1 + 2)  # the batches of both
        known = run.rank_step(4)
        at = known.places.index(("0", "output"))
        first, second = (float(table[at, 0]) for table in known.tables.values())
        assert run.window(4)["0"].mean == pytest.approx((first + 2 * second) / 3, abs=1e-6)
