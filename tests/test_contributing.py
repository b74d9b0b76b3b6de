"""The page for those who work on torchhook: its code runs, its tests pass, what it names is there."""

import inspect
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
THINGS = re.findall(r"^## Add an? (\w+)$", PAGE, re.M)


def namespace():
    """What all code of the page defines, run from top to bottom, with the section that each name is of."""
    names, sections = {}, {}
    for section in re.split(r"^## ", PAGE, flags=re.M):
        for code in re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S):
            before = set(names)
            exec(compile(code, "CONTRIBUTING.md", "exec"), names)
            sections |= dict.fromkeys(set(names) - before, section.splitlines()[0].split()[-1])
    return names, sections


NAMES, SECTIONS = namespace()
TESTS = {SECTIONS[name]: NAMES[name] for name in SECTIONS if name.startswith("test_")}


def test_each_thing_to_add_has_a_test():
    assert THINGS == ["statistic", "rule", "edit", "integration"]
    assert set(TESTS) == set(THINGS)


@pytest.mark.parametrize("thing", THINGS)
def test_the_test_of_the_page_passes(thing, tmp_path, one_thread):
    test = TESTS[thing]
    torch.manual_seed(0)
    test(**({"tmp_path": tmp_path} if inspect.signature(test).parameters else {}))


def test_every_folder_is_on_the_map():
    folders = {path.parent.name for path in (ROOT / "src" / "torchhook").glob("*/__init__.py")}
    told = set(re.findall(r"`(\w+)/`", PAGE))
    assert folders - told == set()
    assert told - folders == {"kernels", "src", "tests"}  # folders elsewhere


def test_paths_and_commands_are_there():
    for path in re.findall(r"`((?:src|tests|benchmarks|docs|integrations)/[\w./]*)`|\]\(([\w./]+)\)", PAGE):
        name = "".join(path)
        assert (ROOT / name).exists() or (ROOT / "src" / "torchhook" / name).exists(), name
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"\bmake (\w+)", PAGE)) <= set(targets)
