"""What the header of a report says about the process."""

import sys

import pytest

from torchhook.training.process import described, header


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/env/site-packages/torchhook/__main__.py", "why", "a b"], "torchhook why 'a b'"),
        (["/opt/env/bin/torchhook", "diagnose", "net:model"], "torchhook diagnose net:model"),
        (["train.py", "--fast"], "train.py --fast"),
        (["/srv/torchhook/train.py"], "/srv/torchhook/train.py"),
        (["-c"], "-c"),
    ],
)
def test_the_command_is_as_it_is_typed(monkeypatch, argv, said):
    monkeypatch.setattr(sys, "argv", argv)
    assert header(described())["command"] == said


@pytest.mark.parametrize(
    ("typed", "argv", "said"),
    [
        (["python", "-m", "torchhook", "run", "bad.py"], ["bad.py"], "torchhook run bad.py"),
        (
            ["python", "/env/bin/torchhook", "run", "--every", "5", "-m", "net.train", "--lr", "1"],
            ["/net/train.py", "--lr", "1"],
            "torchhook run --every 5 -m net.train --lr 1",
        ),
        (["python", "bad.py", "torchhook", "run"], ["bad.py", "torchhook", "run"], "bad.py torchhook run"),
    ],
)
def test_a_script_of_torchhook_run_is_said_with_it(monkeypatch, typed, argv, said):
    monkeypatch.setattr(sys, "orig_argv", typed)
    monkeypatch.setattr(sys, "argv", argv)
    assert header(described())["command"] == said
