"""Copies and pickles of a hooked model work, record nothing, and load where torchhook is not."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from torchhook import HookManager, Record, Ring, Session, Tap, capture

PORTS = ("input", "output", "grad_input", "grad_output", "param", "param_grad")


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_copy_of_a_hooked_model_records_nothing(copied):
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    ring = Ring()
    manager = HookManager(model)
    manager.add("0")
    taps = [Tap("*", Record(ring), port=port) for port in PORTS]
    with capture(model, grads=True, on_silent="ignore") as acts, Session(model, taps, on_silent="ignore"):
        twin = copied(model)
        x = torch.ones(2, 3)
        torch.manual_seed(0)
        out = twin(x)
        out.sum().backward()
        assert len(acts) == len(ring) == 0 and manager.get("0") == []
        torch.manual_seed(0)
        assert torch.equal(model(x), out)
        assert len(acts) == 3 and len(ring) > 0 and len(manager.get("0")) == 1
    assert twin.__dict__.get("_compiled_call_impl") is None


def test_a_saved_model_loads_without_torchhook(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.ones(1, 3)
    with capture(model, inputs=True, grads=True, params=True):
        torch.save(model, tmp_path / "model.pt")
        expected = model(x)
    script = (
        "import sys; sys.modules['torchhook'] = None; import torch;"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False);"
        "print(model(torch.ones(1, 3)).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(expected.tolist())


def test_a_state_dict_is_as_ever():
    model = nn.Sequential(nn.Linear(3, 3))
    keys = list(model.state_dict())
    with capture(model, grads=True):
        model(torch.ones(1, 3)).sum().backward()
        assert list(model.state_dict()) == keys


def test_a_shallow_copy_runs_itself():
    model = nn.Sequential(nn.Linear(3, 3))
    with capture(model, on_silent="ignore"):
        twin = copy.copy(model)
        twin._modules = {"0": nn.Linear(3, 7)}
        assert twin(torch.ones(1, 3)).shape == (1, 7)


def test_tensors_that_carry_a_gradient_hook_save_without_warning(recwarn):
    model = nn.Sequential(nn.Linear(3, 3))
    with capture(model, grads=True):
        out = model(torch.ones(1, 3))
        torch.save(out.detach(), io.BytesIO())
        torch.save(out, io.BytesIO())
    assert not [warning for warning in recwarn if "hook" in str(warning.message)]
