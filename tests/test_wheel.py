"""What is built is what others install: all of its files, and with torch alone the quick start runs."""

import os
import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "torchhook"

QUICK_START = """
import sys
import torch, torch.nn.functional as F
from torch import nn
import torchhook as th

assert th.__file__.startswith(sys.prefix), th.__file__
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 2))
x = torch.randn(32, 8)

with th.capture(model, "0", nn.ReLU, grads=True) as acts:
    model(x).sum().backward()
assert (acts["0"].output < 0).any() and acts["1"].grad.shape == (32, 16)
print(acts)

with th.edit(model, {"1": th.edits.ablate(channels=[4, 7])}):
    model(x)
with th.measure(model, grads=True) as stats:
    model(x).sum().backward()
print(stats)

nn.init.constant_(model[0].bias, -100)
batches = [(torch.randn(32, 8), torch.randint(2, (32,))) for _ in range(8)]
report = th.diagnose(model, batches, F.cross_entropy, steps=40)
th.render.save(report, "report.json")
print(report)
print("others:", *sorted({"numpy", "rich", "typer", "plotly", "matplotlib", "safetensors"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, built in a copy of it, for building leaves files."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder / "dist", folder)
    (file,) = (folder / "dist").glob("torchhook-*.whl")
    return file


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """An environment with the wheel, torch, and what torch needs."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    (there,) = folder.glob("lib/python*/site-packages")
    for name in needed_by("torch"):
        for top in tops(metadata.distribution(name)):
            if not (there / top.name).exists():
                (there / top.name).symlink_to(top)
    pip("--python", folder / "bin" / "python", "install", "--no-deps", wheel)
    return folder / "bin"


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    subprocess.run([*command, *map(str, arguments)], check=True, env={**os.environ, "PIP_NO_INDEX": "1"})


def needed_by(name, known=None):
    """A distribution and all that it needs, without extras."""
    known = {} if known is None else known
    if name not in known:
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another system
            return known
        known[name] = None
        for line in lines:
            if "extra ==" not in line:
                needed_by(re.match(r"[\w.-]+", line)[0], known)
    return known


def tops(distribution):
    """The folders and files of a distribution that lie in site-packages itself."""
    names = {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}
    return [Path(distribution.locate_file(name)) for name in names]


def in_bare(bare, folder, *command):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [bare / command[0], *command[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel):
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert packed == {file.relative_to(PACKAGE.parent).as_posix() for file in files}
    for suffix in (".css", ".js", ".json", ".cpp", ".cu", ".h", "py.typed"):
        assert any(name.endswith(suffix) for name in packed), suffix


def test_the_quick_start_needs_torch_alone(bare, tmp_path):
    (tmp_path / "quick_start.py").write_text(QUICK_START)
    done = in_bare(bare, tmp_path, "python", "quick_start.py")
    assert done.returncode == 0, done.stderr
    assert "plain torch, which is slower" not in done.stderr, "the kernels were not built from the sources in the wheel"
    assert "Capture of Sequential: 2 sites" in done.stdout and "Stats of Sequential" in done.stdout
    assert "TH201 error: 1" in done.stdout and "TH201" in (tmp_path / "report.json").read_text()
    assert done.stdout.splitlines()[-1] == "others:"


def test_the_command_says_what_it_needs(bare, tmp_path):
    done = in_bare(bare, tmp_path, "torchhook", "rules")
    assert done.returncode == 2
    assert re.fullmatch(r'torchhook: the command line needs \w+: pip install "torchhook\[cli\]"\n', done.stderr)
