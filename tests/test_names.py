"""Words mean one thing: a public class name in the whole package, every other class name within its room."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import torchhook
from test_public_names import NAMES, PACKAGES

PACKAGE = Path(torchhook.__file__).parent
SHARED = {"TorchhookCallback"}  # Lightning's and Hugging Face's: users import each from the file of its tool


@pytest.fixture(scope="module")
def rooms_of():
    """The rooms in which each class name is defined, once for every definition."""
    found = defaultdict(list)
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in SHARED:
                found[node.name].append(room)
    return found


def test_a_public_class_name_means_one_thing_in_the_package(rooms_of):
    public = {name for names in (NAMES, *PACKAGES.values()) for name in names.split() if name[0].isupper()}
    assert len(public) > 60
    assert {name: rooms_of[name] for name in public if len(rooms_of[name]) > 1} == {}


def test_a_class_name_means_one_thing_in_its_room(rooms_of):
    assert {name: rooms for name, rooms in rooms_of.items() if len(rooms) != len(set(rooms))} == {}
