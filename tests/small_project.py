"""A small project, and the command run in it: fixtures for the tests of the command line."""

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from torchhook.cli import main

PROJECT = {
    "small/__init__.py": "",
    "small/net.py": """
        import sys
        import torch
        from torch import nn

        class Net(nn.Sequential):
            def __init__(self, width=16):
                super().__init__(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

        made = Net()

        def dead():
            net = Net()
            nn.init.constant_(net[0].bias, -100)
            return net

        class Log(nn.Module):
            def forward(self, x):
                return (x * 0).log()

        def infinite():
            return nn.Sequential(*Net(), Log())

        def talking():
            print("building")
            return Net()

        def embedding():
            return nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(32, 2))

        def crashing():
            return 1 / 0  # the line

        def wide(width):
            return Net(width)

        def leaving():
            sys.exit(0)

        number = 3

        def numbers():
            return number

        def unfit():
            return nn.Sequential(nn.Linear(7, 2))
        """,
    "small/data.py": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        def batches():
            x = torch.randn(320, 8)
            return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 32, shuffle=True)

        listed = list(batches())

        def endless():
            while True:
                yield listed[0]

        def none():
            return []

        def scaled():
            return [(x * 100, y) for x, y in listed]
        """,
    "small/training.py": """
        import torch
        import torch.nn.functional as F
        from torch import nn

        def optimizer(model):
            return torch.optim.Adam(model.parameters(), 1e-2)

        def forgetful(model):
            return torch.optim.Adam(model[0].parameters(), 1e-2)

        def loss(output, target):
            return F.cross_entropy(output, target)

        class Loss(nn.CrossEntropyLoss):
            pass

        number = 3
        """,
    "script.py": "import sys; sys.exit(0)\n",
    "careless.py": "import nowhere_to_be_found\n",
    "broken.py": "def make(:\n",
}


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def said(self):
        """What it complained about, without the frame around it and the breaks of lines."""
        return " ".join(self.err.replace("│", " ").split())


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    import textwrap

    folder = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


@pytest.fixture
def project(written, monkeypatch):
    """The folder of the project, where one is."""
    monkeypatch.chdir(written)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "NO_COLOR", "TORCHHOOK_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield written
    torch.set_num_threads(threads)
    (written / "pyproject.toml").unlink(missing_ok=True)


@pytest.fixture
def command(project, monkeypatch, capsys):
    """Run the command in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["torchhook", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def diagnosed(command):
    """Run ``torchhook diagnose`` with data, a few steps, and more if said."""

    def run(model, *arguments, loader="small.data:batches", steps=12):
        return command("diagnose", model, "--loader", loader, "--steps", steps, *arguments)

    return run


@pytest.fixture
def in_python(project):
    """Run some lines in a fresh interpreter."""

    def run(lines):
        done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=120)
        return Done(done.returncode, done.stdout, done.stderr)

    return run
