"""Recordings of several training steps: the first step and the first place, forward before backward before update."""

import pytest
import torch
import torch.nn.functional as F
from recorded_pairs import ids, language

from torchhook import diff, record


def train(to, fault=None, at=1, dtype=torch.float32, optimizer=torch.optim.AdamW, keep="all", **options):
    """Train a small Llama for three steps, with one mistake in one of them."""
    torch.manual_seed(0)
    model = language("healthy", llama=True).to(dtype).train()
    taught = optimizer(model.parameters(), **{"lr": 1e-3, **options})
    with record(model, to=to, grads=True, optimizer=taught, keep=keep):
        for step in range(3):
            wrong = fault if step == at else None
            if wrong == "lr":
                taught.param_groups[0]["lr"] *= 1.5
            x = ids().roll(step, 1)
            output = model(x) if wrong != "mask" else model(x.roll(1, 0)).roll(1, 0) * 1.2
            loss = F.cross_entropy(output[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())
            if wrong != "zero_grad":
                taught.zero_grad()
            loss.backward()
            if wrong == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            if wrong == "weight":
                with torch.no_grad():
                    model.blocks[1].mlp.down.weight.mul_(1.01)
            taught.step()


@pytest.fixture(scope="module", params=["all", "sketch"])
def reference(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    train(folder / "a.th", keep=request.param)
    return folder / "a.th", request.param


@pytest.mark.parametrize(
    ("fault", "port", "module"),
    [
        ("lr", "param", "tok"),  # of all that were updated wrongly, the first
        ("clip", "param", "tok"),
        ("weight", "param", "blocks.1.mlp.down"),
        ("zero_grad", "param_grad", None),
    ],
)
def test_the_first_step_and_the_first_place(reference, tmp_path, fault, port, module):
    file, keep = reference
    train(tmp_path / "b.th", fault, keep=keep)
    found = diff(file, tmp_path / "b.th")
    assert (found.step, found.first.port) == (1, port) and found.verdict.startswith("step 1: ")
    assert module is None or found.module == module


def test_rounding_that_grows_from_step_to_step_is_no_difference(reference, tmp_path):
    file, keep = reference
    for name, dtype in (("b", torch.bfloat16), ("c", torch.float64)):
        train(tmp_path / f"{name}.th", dtype=dtype, keep=keep)
        found = diff(file, tmp_path / f"{name}.th")
        assert found.same and found.step is None, found.verdict
        assert found.verdict.startswith("3 passes: a and b agree")


def test_other_inputs_in_a_later_step_are_told(reference, tmp_path):
    file, keep = reference
    train(tmp_path / "b.th", "mask", keep=keep)
    found = diff(file, tmp_path / "b.th")
    assert found.step == 1 and found.verdict.startswith("step 1: the inputs differ:")


def test_weight_decay_that_was_forgotten(tmp_path):
    for name, decay in (("a", 0.0), ("b", 0.5)):
        train(tmp_path / f"{name}.th", weight_decay=decay)
    found = diff(tmp_path / "a.th", tmp_path / "b.th")
    assert (found.step, found.first.port) == (0, "param") and "the update diverges" in found.verdict


def test_fewer_steps_are_a_note(reference, tmp_path):
    file, keep = reference
    torch.manual_seed(0)
    model = language("healthy", llama=True).train()
    with record(model, to=tmp_path / "b.th", keep=keep):
        model(ids())
    found = diff(file, tmp_path / "b.th")
    assert found.same and "a has 3 passes, and b 1" in found.notes
