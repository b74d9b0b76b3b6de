"""``torchhook replay``: reruns a call that catch_nonfinite saved."""

import sys

import pytest
import torch

import torchhook


@pytest.fixture
def saved(project, tmp_path):
    sys.path.insert(0, str(project))
    from small.net import infinite

    model = infinite()
    with torchhook.catch_nonfinite(model, save=tmp_path, on_found="warn") as caught, pytest.warns(match="aten.log"):
        model(torch.randn(4, 8))
    return caught.file


def test_shows_it_again_and_ends_with_1(command, saved):
    done = command("replay", saved, "--model", "small.net:infinite")
    assert (done.code, done.err) == (1, "")
    assert "-Inf in the forward of pass 0: produced by aten.log in '3' (Log)" in done.out
    assert "net.py:19: return (x * 0).log()" in done.out
    assert len(done.out.splitlines()) == 4  # what, where, of what, and what to do


def test_ends_with_0_once_it_is_mended(command, saved, monkeypatch):
    from small import net

    monkeypatch.setattr(net.Log, "forward", lambda _, x: (x * 0).exp())
    done = command("replay", saved, "--model", "small.net:infinite")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("All values are finite this time. The saved call was:\n-Inf in the forward of pass 0")


def test_what_cannot_be_replayed_ends_with_2(command, saved, project):
    other = command("replay", saved, "--model", "small.net:Net")
    assert other.code == 2 and "a Log; this Net neither is nor contains it" in other.err
    foreign = command("replay", project / "script.py", "--model", "small.net:Net")
    assert foreign.code == 2 and "is not a call saved by torchhook" in foreign.err
    missing = command("replay", "nowhere.safetensors", "--model", "small.net:Net")
    assert missing.code == 2 and "'nowhere.safetensors' does not exist" in missing.said
    assert "Missing option '--model'" in command("replay", saved).said
    assert "--model: small.net has no 'Nte'" in command("replay", saved, "--model", "small.net:Nte").said
