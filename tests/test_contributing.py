"""The page for those who work on torchhook: followed to the letter in a copy, it works; what it names is there."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
THINGS = re.findall(r"^## Add an? (\w+)$", PAGE, re.M)
CODE = dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', PAGE, re.M | re.S))

# What the page says in words is to be told elsewhere: in which file, before what, what.
STATS, EDITS, NAMES = "src/torchhook/stats/__init__.py", "src/torchhook/edits/__init__.py", "tests/test_public_names.py"
TOLD = [
    (STATS, "from torchhook.stats.stat ", "from torchhook.stats.negative import Negative\n"),
    (STATS, '    "Quantiles",\n', '    "Negative",\n'),
    (STATS, "Quantiles, Channels, ", "Negative, "),
    (EDITS, "\n__all__", "from torchhook.edits.signs import Sign\n"),
    (EDITS, '"ablate", ', '"Sign", '),
    (NAMES, "Quantiles Saturation", "Negative "),
    (NAMES, "ablate add apply", "Sign "),
    (NAMES, '    "mlflow": ', '    "lines": "Lines",\n'),
]


def insert(file, before, text):
    """Put text into a file before something that is there once."""
    old = file.read_text()
    assert old.count(before) == 1, (file, before)
    file.write_text(old.replace(before, text + before))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package and its tests, with all that the page adds."""
    root = tmp_path_factory.mktemp("copy")
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for name, code in CODE.items():
        file = root / name
        if name.startswith("src") and file.exists():
            file.write_text(f"{file.read_text()}\n\n{code}")
        elif file.exists():
            insert(file, "# --- TH9", f"{code}\n\n")
        else:
            file.write_text(code)
    for name, before, text in TOLD:
        insert(root / name, before, text)
    return root


def run(root, *command):
    env = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *command]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_thing_to_add_has_code_and_a_test():
    assert THINGS == ["statistic", "rule", "edit", "integration"]
    rooms = ["stats", "stats", "rules", "rules", "edits", "edits", "integrations", "integrations"]
    assert [name.removeprefix("src/torchhook/").removeprefix("tests/").split("/")[0] for name in CODE] == rooms
    assert len(re.findall("^```python", PAGE, re.M)) == len(CODE)


def test_followed_to_the_letter_it_works(copy):
    assert str(copy) in run(copy, "-c", "import torchhook; print(torchhook.__file__)")
    files = [*(name for name in CODE if "families/rep" not in name), NAMES]
    options = ["-q", "-p", "no:cacheprovider", "-k", "TH804 or each_rule and TH201 or not each_rule"]
    said = run(copy, "-m", "pytest", *options, *files)
    assert int(re.search(r"(\d+) passed", said)[1]) > 20


def test_the_map_has_every_room_in_the_order_of_the_layers():
    rooms = re.findall(r"^\| `(\w+)/` \|", PAGE, re.M)
    package = ROOT / "src" / "torchhook"
    assert sorted(rooms) == sorted(path.parent.name for path in package.glob("*/__init__.py"))
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [re.findall(r"torchhook\.(\w+)", layer) for layer in reversed(contract["layers"])]
    depth = {room: number for number, layer in enumerate(layers) for room in layer}
    assert [depth[room] for room in rooms] == sorted(depth[room] for room in rooms) and len(layers) <= 8
    assert len(list(package.glob("*.py"))) <= 8


def test_every_room_says_what_lives_there():
    for file in (ROOT / "src" / "torchhook").rglob("__init__.py"):
        said = ast.get_docstring(ast.parse(file.read_text()))
        assert said and len(said.split()) > 3, file


def test_paths_and_commands_are_there():
    paths = re.findall(r"`([\w.]+/[\w./]*)`|\]\(([\w./]+)\)", PAGE)
    assert len(paths) > 40
    for path in paths:
        name = "".join(path)
        assert (ROOT / name).exists() or (ROOT / "src" / "torchhook" / name).exists(), name
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", PAGE, re.M)) <= set(targets)
