"""The examples run as they are, in a folder of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, folder):
    command = [sys.executable, str(EXAMPLES / name)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=240).stdout


def test_the_demo_tells_the_healthy_training_from_the_other(tmp_path):
    told = run("demo.py", tmp_path)
    healthy, slipped = told.split("─ healthy ─")[1].split("─ slipped ─")
    assert "Net: nothing found" in healthy
    assert "after the learning rate" in " ".join(slipped.replace("│", " ").split())
    for name in ("healthy", "slipped"):
        assert (tmp_path / "demo-output" / f"{name}.html").stat().st_size > 10_000
        (samples,) = (tmp_path / "demo-output" / "runs").glob(f"{name}-*/samples")
        assert list(samples.glob("*.png"))


@pytest.mark.parametrize(
    ("name", "said"), [("digits.py", "The classic manager"), ("diagnosis.py", "of the units never fire")]
)
def test_the_others(tmp_path, name, said):
    assert said in run(name, tmp_path)
