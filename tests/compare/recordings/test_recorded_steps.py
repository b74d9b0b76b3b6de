"""Recordings of several training steps: the first step and the first place, forward before backward before update."""

import pytest
import torch
import torch.nn.functional as F
from recorded_pairs import HEALTHY, PAIRS, ids, language
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn

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


def taught(model, to, faulty=(), optimizer=torch.optim.AdamW, keep="all", grads=True):
    """Train a model for two steps, in the second with twice the learning rate for parameters of some names."""
    wrong = [any(name in path for name in faulty) for path, _ in model.named_parameters()]
    groups = [{"params": [one]} for one in model.parameters()]
    steps = optimizer(groups, lr=1e-3)
    with record(model, to=to, grads=grads, optimizer=steps, keep=keep):
        for step in range(2):
            for group, is_wrong in zip(steps.param_groups, wrong, strict=True):
                group["lr"] = 2e-3 if is_wrong and step == 1 else 1e-3
            output = model(ids().roll(step, 1))
            scores = output if isinstance(output, torch.Tensor) else output.logits
            loss = F.cross_entropy(scores.flatten(0, 1), ids().flatten())
            steps.zero_grad()
            loss.backward()
            steps.step()
    return to


@pytest.mark.parametrize("keep", ["all", "sketch"])
@pytest.mark.parametrize(
    ("pair", "faulty", "module"),
    [
        ("gpt2", "", "transformer.wte"),
        ("gpt2", "qkv", "transformer.h.0.attn.c_attn"),
        ("llama-fused", "", "model.embed_tokens"),
        ("llama-fused", "qkv", "model.layers.0.self_attn.q_proj"),
        ("llama-split", "attn.wk", "model.layers.0.self_attn.k_proj"),
    ],
)
def test_updates_of_parameters_with_other_names_or_fused(tmp_path, keep, pair, faulty, module):
    models = PAIRS[pair]
    a = taught(models.a(), tmp_path / "a.th", keep=keep)
    same = diff(a, taught(models.b(HEALTHY), tmp_path / "same.th", keep=keep))
    assert same.same, same.verdict
    assert sum(row.site.port == "param" for row in same.rows) > 20
    # a sketch of a weight that is stored the other way around cannot be turned: then a note says so
    assert any("was not compared" in note for note in same.notes) == (keep == "sketch" and pair == "gpt2")
    found = diff(a, taught(models.b(HEALTHY), tmp_path / "wrong.th", [faulty], keep=keep))
    assert (found.step, found.first.port) == (1, "param"), found.verdict
    assert found.module == module or (keep == "sketch" and pair == "gpt2")


@pytest.mark.parametrize("pair", ["llama-fused", "llama-split"])
def test_a_model_whose_names_are_inside_a_part_of_the_other_is_paired_with_the_whole(tmp_path, pair):
    a, b = taught(PAIRS[pair].a(), tmp_path / "a.th"), taught(PAIRS[pair].b(HEALTHY), tmp_path / "b.th")
    for found in (diff(a, b), diff(b, a)):
        assert found.same, found.verdict
        assert any(row.site == ("", "output") and row.partner == "" for row in found.rows)


def test_gradients_that_are_rounding_errors_say_nothing_about_an_update(tmp_path):
    """The softmax does not see a bias of the keys, of which an Adam makes steps in any direction."""
    models = PAIRS["gpt2"]
    for grads in (True, False):
        files = [
            taught(model, tmp_path / f"{grads}{n}.th", grads=grads)
            for n, model in enumerate((models.a(), models.b(HEALTHY)))
        ]
        for found in (diff(*files), diff(*files[::-1])):
            assert found.same, found.verdict


def sharded(rank, folder, faulty):
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{folder}/{faulty}.meeting", rank=rank, world_size=2)
    model = fully_shard(small())
    stepped(model, f"{folder}/{faulty}.th", faulty)
    distributed.destroy_process_group()


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def stepped(model, to, faulty):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with record(model, to=to, grads=True, optimizer=optimizer):
        for step in range(2):
            optimizer.param_groups[0]["lr"] = 0.2 if faulty and step == 1 else 0.1
            x = torch.linspace(-1, 1, 128).view(8, 16).roll(step, 1)
            loss = F.mse_loss(model(x), x.flip(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_updates_of_sharded_parameters(tmp_path):
    stepped(small(), tmp_path / "one.th", False)
    for faulty in (False, True):
        spawn(sharded, (str(tmp_path), faulty), 2)
        found = diff(tmp_path / "one.th", tmp_path / f"{faulty}.th")
        if faulty:
            assert (found.step, found.module, found.first.port) == (1, "0", "param"), found.verdict
        else:
            assert found.same and any(row.site.port == "param" for row in found.rows), found.verdict
