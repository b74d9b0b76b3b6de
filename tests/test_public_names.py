"""The public surface, and what importing it costs."""

import subprocess
import sys

import torchhook


def test_exported_names_are_sorted_and_there():
    assert torchhook.__all__ == sorted(torchhook.__all__)
    assert all(hasattr(torchhook, name) for name in torchhook.__all__)
    public = {name for name, thing in vars(torchhook).items() if not name.startswith("_") and not _is_module(thing)}
    public -= {"Any", "TYPE_CHECKING", "import_module"}
    assert public == set(torchhook.__all__)


def test_every_public_name_says_what_it_is():
    for name in torchhook.__all__:
        assert getattr(torchhook, name).__doc__, name


def test_importing_needs_torch_alone():
    script = (
        "import sys, torch; before = set(sys.modules);"
        "import torchhook; print(*{name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torchhook"]


def _is_module(thing):
    return isinstance(thing, type(sys))
