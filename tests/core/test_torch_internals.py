"""The one door to private torch: without any of its names torchhook imports, captures and measures rightly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchhook.core import torch_internals

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NAMES = [*torch_internals.NAMES, "all"]


@pytest.fixture(scope="module")
def answers():
    """What happened without each of the names, in forks of one process."""
    command = [sys.executable, HERE / "without_private_names.py", *NAMES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_without_a_private_name_values_are_right_and_doctor_says_what_fell_back(answers, name):
    answer = answers[name]
    assert "error" not in answer, answer["error"]
    missing = torch_internals.NAMES if name == "all" else [name]
    assert all(each in answer["doctor"] for each in missing)
    assert "names missing (tested with torch 2.11 and 2.13)" in answer["doctor"]


def test_this_torch_has_all_of_them():
    assert torch_internals.FALLBACKS == {} and len(torch_internals.NAMES) == len(set(torch_internals.NAMES)) > 40


def test_without_the_store_of_the_ranks_the_refusal_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch_internals, "_HIDDEN", [torch_internals._STORE])
    monkeypatch.setattr(torch_internals, "FALLBACKS", {})
    with pytest.raises(torch_internals.MissingError, match="_get_default_store, which .* lacks; .* 2.11 and 2.13"):
        torch_internals.default_store()
    assert "full=True" in torch_internals.FALLBACKS[torch_internals._STORE]


def test_the_check_finds_names_and_passes_here():
    check = HERE.parents[1] / ".ci" / "private_torch.py"
    done = subprocess.run([sys.executable, check], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "y = torch._lazy_clone(x)",
        "from torch._C import _functions",
        "import torch._dynamo",
        "y = nn.modules.conv._ConvNd",
        "y = x._version",
        "y = module._modules",
        'y = getattr(x, "_base")',
        'y = vars(module)["_parameters"]',
        "y = scaler._scale",
        'y = sys.modules["torch._dynamo"]',
    ],
)
def test_the_check_knows_every_way_to_name_one(tmp_path, line, monkeypatch):
    import importlib.util

    spec = importlib.util.spec_from_file_location("private_torch", HERE.parents[1] / ".ci" / "private_torch.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    monkeypatch.setattr(check, "PACKAGE", tmp_path / "src" / "torchhook")
    file = tmp_path / "src" / "torchhook" / "bad.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"import sys\n\n{line}\n")
    assert [found.split(": ", 1)[1] for found in check.offences(file, check.known_names())] == [line]
