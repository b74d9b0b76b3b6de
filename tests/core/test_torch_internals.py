"""The one door to private torch: without any of its names torchhook imports, captures and measures rightly."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchhook.core import torch_internals

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
CHECK = HERE.parents[1] / ".ci" / "private_torch.py"
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
    done = subprocess.run([sys.executable, CHECK], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("private_torch", CHECK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found_in(check, folder, monkeypatch, text):
    """The lines that the check complains about in a file of the package."""
    monkeypatch.setattr(check, "PACKAGE", folder / "src" / "torchhook")
    file = folder / "src" / "torchhook" / "some.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    own = check.own_names([ast.parse(text)])
    return [found.split(": ", 1)[1] for found in check.offences(file, check.known_names(), own)]


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
        "y = t._C",
        'y = import_module("._dynamo", "torch")',
        "y = conv._ConvNd",
        "y = c10d._get_default_store()",
        "y = cuda._lazy_init",
        "y = Variable._execution_engine",
        'y = getattr(torch, "_C")',
        'y = attrgetter("weight._version")',
        'y = getattr(x, "_ver" + "sion")',
        'y = getattr(node, f"_saved_{name}")',
        'y = torch.__dict__["_C"]',
        "y = node._saved_mat1",
        "y = layer._reversed_padding_repeated_twice",
        "y = scheduler._last_lr",
        "y = op._schema",
        "y = sys.modules.get('torch')._C",
        "y = lambda self: self._modules",
        "match x:\n    case Tensor(_version=y): pass",
    ],
)
def test_the_check_knows_every_way_to_name_one(check, tmp_path, line, monkeypatch):
    text = f"""
import sys
import torch as t
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules import conv
cuda = t.cuda
{line}
"""
    assert found_in(check, tmp_path, monkeypatch, text) == [line.split("\n")[-1].strip()]


def test_the_check_lets_the_package_use_its_own_names(check, tmp_path, monkeypatch):
    text = """
import sys
class Own:
    __slots__ = ("_version",)
    def __init__(self, other):
        self._version, self._taken = 0, other._taken
        self._frame, self._row = sys._getframe(), other._asdict()
    def _read(self):
        return self._version, self._asdict(), getattr(self, "_taken"), self._taken._read()
"""
    assert found_in(check, tmp_path, monkeypatch, text) == []
