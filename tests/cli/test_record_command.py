"""``torchhook record``, and ``diff`` of what it wrote: scripts run as they are, and end as they would."""

import json
import subprocess
import sys

import pytest

from torchhook import Recording

SCRIPT = """
    import sys, torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, eps):
            super().__init__()
            self.fc1, self.norm, self.fc2 = nn.Linear(8, 16), nn.LayerNorm(16, eps=eps), nn.Linear(16, 2)

        def forward(self, *, x):
            return self.fc2(torch.relu(self.norm(self.fc1(x))))

    torch.manual_seed(0)
    scale = nn.Softplus()(torch.zeros(1))  # has no parameters, and is not the model
    model = Net(float(sys.argv[1]))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(4):
        loss = nn.functional.cross_entropy(model(x=torch.randn(4, 8)), torch.tensor([0, 1, 0, 1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("trained", len(sys.argv), __name__)
    sys.exit(int(sys.argv[2]))
    """


@pytest.fixture
def torchhook(tmp_path):
    (tmp_path / "train.py").write_text("\n".join(line[4:] for line in SCRIPT.splitlines()))

    def run(*arguments):
        command = [sys.executable, "-m", "torchhook", *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return run


def test_a_script_is_recorded_as_it_is_and_ends_as_it_would(torchhook, tmp_path):
    done = torchhook("record", "--to", "a.th", "train.py", "1e-5", "3")
    assert (done.returncode, done.stdout) == (3, "trained 3 __main__\n")
    assert done.stderr == "torchhook: recorded 1 step of Net → torchhook diff a.th …\n"
    recording = Recording(tmp_path / "a.th")
    assert recording.inputs().kwargs["x"].shape == (4, 8)
    assert recording["norm"].shape == (4, 16) and recording.steps == [0]
    assert torchhook("record", "--to", "b.th", "train.py", "1e-2", "0").returncode == 0

    found = torchhook(
        "diff", "a.th", "b.th", "--report", "diff.html", "--report", "diff.th", "--save-match", "map.toml"
    )
    assert found.returncode == 1
    assert found.stdout.splitlines()[-1].startswith("a and b diverge at norm (LayerNorm): its output is off by 0.0")
    assert found.stderr.splitlines() == ["written: diff.html", "written: diff.th", "written: map.toml"]
    assert "diverge at norm" in (tmp_path / "diff.html").read_text()
    same = torchhook("diff", "a.th", "a.th", "--match", "map.toml")
    assert same.returncode == 0 and same.stdout.splitlines()[-1] == "a and b agree: all values are equal"

    data = json.loads(torchhook("diff", "a.th", "b.th", "--json").stdout)
    assert (data["version"], data["same"], data["module"]) == (1, False, "norm")
    assert data["first"] == {"path": "norm", "port": "output"} and data["rows"][1]["diverges"]


def test_steps_with_their_updates(torchhook, tmp_path):
    for name, keep in (("a.th", "all"), ("b.th", "sketch")):
        torchhook("record", "--grads", "--steps", 2, "--keep", keep, "--to", name, "train.py", "1e-5", "0")
    recording = Recording(tmp_path / "a.th")
    assert recording.steps == [0, 1] and (Recording(tmp_path / "b.th").keep, recording.keep) == ("sketch", "all")
    assert not recording.parameters(0)["fc1.weight"].equal(recording.parameters(1)["fc1.weight"])
    done = torchhook("diff", "a.th", "b.th")
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("2 passes: a and b agree")


def test_what_was_not_recorded_is_said(torchhook, tmp_path):
    (tmp_path / "plain.py").write_text("import torch\nprint(torch.ones(1).item())")
    done = torchhook("record", "--to", "c.th", "plain.py")
    assert (done.returncode, done.stdout) == (0, "1.0\n")
    assert done.stderr == "torchhook: nothing was recorded: no module with parameters was called\n"
    done = torchhook("record", "--to", "d.th", "--sites", "fc9", "train.py", "1e-5", "0")
    assert done.returncode == 0 and "trained" in done.stdout
    assert "nothing was recorded: no module matches 'fc9'" in done.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    done = torchhook("record", "--to", "full", "train.py", "1e-5", "0")
    assert done.returncode == 2 and "exists already" in done.stderr and done.stdout == ""
    done = torchhook("record", "--to", "e.th", "missing.py")
    assert done.returncode == 2 and "missing.py" in done.stderr
    done = torchhook("diff", "full", "c.th")
    assert done.returncode == 2 and "no recording 'c.th'" in done.stderr.replace("│\n│ ", "")


def test_a_script_that_fails_is_recorded_up_to_there(torchhook, tmp_path):
    (tmp_path / "fails.py").write_text(
        "import torch\nfrom torch import nn\nmodel = nn.Linear(2, 2)\nmodel(torch.ones(1, 2))\nraise KeyError('late')"
    )
    done = torchhook("record", "--to", "a.th", "fails.py")
    assert done.returncode == 1 and "KeyError: 'late'" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("torchhook: recorded 1 step of Linear")
    assert Recording(tmp_path / "a.th")[""].shape == (1, 2)


def test_a_model_chosen_by_its_class(torchhook, tmp_path):
    (tmp_path / "two.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Head(nn.Linear): pass\n"
        "h = nn.Linear(2, 3)(torch.ones(1, 2))\nHead(3, 4)(h)"
    )
    torchhook("record", "--model", "Head", "--to", "a.th", "two.py")
    assert Recording(tmp_path / "a.th")[""].shape == (1, 4)
