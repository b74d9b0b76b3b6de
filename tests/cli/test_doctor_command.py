"""``torchhook doctor``: what it says of this machine, and that it says something of a broken one."""

import os
import platform
import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch

import torchhook
from torchhook.cli import doctor


def told(folder, **environment):
    """What the command says in a process of its own, for somebody called alice."""
    home = folder / "alice"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "torchhook", "doctor"],
        cwd=home,
        env={**os.environ, "HOME": str(home), "USER": "alice", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines, last = done.stdout.splitlines()
    assert (first, last) == ("```text", "```")
    assert "alice" not in done.stdout and str(folder) not in done.stdout
    return dict(re.split(" {2,}", line, maxsplit=1) for line in lines if line)


@pytest.mark.slow
def test_versions_devices_extras_and_what_compiles(tmp_path):
    said = told(tmp_path, OMP_NUM_THREADS="1")
    assert said["torchhook"] == torchhook.__version__
    assert said["torch"] == torch.__version__
    assert said["Python"] == f"CPython {platform.python_version()}" and said["system"] == platform.platform()
    assert re.fullmatch(r".+, \d+ of \d+ cores usable", said["CPU"])
    assert said["torch on the CPU"].endswith(", threads: 1")
    assert re.fullmatch(r"\d+\.\d GiB", said["memory"])
    assert "torch is built " in said["GPU"] and ("none" in said["GPU"]) != torch.accelerator.is_available()
    offered = {f"extra {name}" for name in metadata.metadata("torchhook").get_all("Provides-Extra")}
    inner = {f"extra {name}" for name in ("all", "check", "demo", "docs", "test")}
    assert {name for name in said if name.startswith("extra ")} == offered - inner
    assert said["extra cli"].endswith(f"rich {metadata.version('rich')}, typer {metadata.version('typer')}")
    for device in ["cpu", "cuda:0"] if torch.cuda.is_available() else ["cpu"]:
        assert re.fullmatch(r"works, \d+\.\d s", said[f"torch.compile on {device}"])
        assert re.fullmatch(r"works, \d+\.\d s", said[f"kernel build on {device}"])


def test_a_torch_that_cannot_be_imported_stops_nothing(tmp_path):
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('/home/alice/lib/libtorch.so: cannot open\\nmore')")
    said = told(tmp_path, PYTHONPATH=os.pathsep.join([str(broken.parent), os.environ["PYTHONPATH"]]))
    for name in ("torch", "torch on the CPU", "GPU", "torch.compile on cpu", "kernel build on cpu"):
        assert said[name] == "failed: OSError: …/libtorch.so: cannot open"
    assert said["torchhook"] == torchhook.__version__ and "GiB" in said["memory"]


@pytest.mark.slow
def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = doctor._in_child("builds", "cpu")
    assert said.startswith("failed: ") and "computed by plain torch" in said and "no-such-compiler" in said


def test_what_hangs_or_dies_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "torchhook.py").write_text("import time; time.sleep(60)")
    assert doctor._in_child("compiles", "cpu", patience=1) == "failed: took longer than 1 s"
    (tmp_path / "torchhook.py").write_text("import os; os.abort()")
    assert doctor._in_child("compiles", "cpu") == "failed: the process ended with -6"


LINES = [
    'pytest>=1; extra == "there"',
    "tomli; python_version < '3.2' and extra == 'there'",
    'pytest>=1000; extra == "old"',
    'torchhook[there,old]; extra == "both"',
    'numpy[some]>=1.2; extra == "both"',
]


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("there", "pytest {pytest}"),
        ("old", 'pytest {pytest} is older than 1000: pip install "torchhook[old]"'),
        ("both", "extra there,old, numpy {numpy}"),
    ],
)
def test_an_extra_is_there_missing_or_too_old(name, state):
    versions = {library: metadata.version(library) for library in ("numpy", "pytest")}
    assert doctor.extra(name, LINES) == state.format(**versions)


def test_nobody_is_named(monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice smith")
    said = doctor._anonymous("in /home/alice smith/net: /opt/bob/x/y.so,\nand a/b, 1/2/3")
    assert said == "in ~/net: …/y.so, and a/b, 1/2/3"
