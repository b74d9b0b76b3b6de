"""diagnose(): leaves the model, the optimizer, the data and all random states unchanged, for many kinds of models."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import random
import threading
import types
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from specimens import Containers, Returning, hooks_of
from torchhook import Report, diagnose
from torchhook.rules import RULES

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A batch norm, a dropout, an op in place, and a count of its calls."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.act, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.dropout(self.act(self.norm(self.first(x)))))


class Raises(Net):
    """On its third call."""

    def __init__(self, error=ZeroDivisionError):
        super().__init__()
        self.error = error

    def forward(self, x):
        if self.calls == 2:
            raise self.error("oh")
        return super().forward(x)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def batches(count=4, size=16):
    return [(torch.randn(size, 8), torch.randint(3, (size,))) for _ in range(count)]


def bits(value):
    """Everything that a value holds, to compare."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().cpu().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def state_of(model, optimizer=None):
    """Everything that a diagnosis might change."""
    parameters = dict(model.named_parameters())
    return {
        "state": bits(model.state_dict(keep_vars=False)),
        "gradients": {name: None if p.grad is None else bits(p.grad) for name, p in parameters.items()},
        "identities": {name: (id(p), id(p.grad), p.requires_grad, p._version) for name, p in parameters.items()},
        "modes": {path: module.training for path, module in model.named_modules()},
        "hooks": hooks_of(model),
        "calls": getattr(model, "calls", None),
        "optimizer": None if optimizer is None else bits(optimizer.state_dict()),
        "optimizer's": None if optimizer is None else {name: id(value) for name, value in vars(optimizer).items()},
    }


def dice():
    return bits(torch.get_rng_state()), random.getstate(), [*map(bits_of_numpy, numpy.random.get_state())]


def bits_of_numpy(value):
    return value.tobytes() if isinstance(value, numpy.ndarray) else value


def worst(report):
    return [finding for finding in report.findings if finding.severity >= "warning"]


# --- everything is as before


def trained_a_little(kind=Net, **options):
    """A model with gradients, and an optimizer with a state."""
    model = kind(**options)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    F.cross_entropy(Net.forward(model, torch.randn(16, 8)), torch.randint(3, (16,))).backward()
    optimizer.step()
    model.calls = 0
    model.dropout.eval()
    model.head.bias.requires_grad_(False)
    return model, optimizer


@pytest.mark.parametrize("given", ["loss and optimizer", "loss", "nothing"])
def test_the_model_the_optimizer_and_the_dice_are_as_before(given):
    model, optimizer = trained_a_little()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.norm.register_forward_hook(lambda module, args, output: None)
    options = {"loss": F.cross_entropy} if "loss" in given else {}
    options |= {"optimizer": optimizer} if "optimizer" in given else {}
    data = batches() if options else torch.randn(16, 8)
    before, dice_before, schedule = state_of(model, optimizer), dice(), copy.deepcopy(scheduler.state_dict())
    assert diagnose(model, data, steps=10, **options).layers
    assert state_of(model, optimizer) == before
    assert dice() == dice_before
    assert scheduler.state_dict() == schedule


def test_no_die_is_cast():
    class Rolls(Net):
        def forward(self, x):
            random.random()
            numpy.random.rand()
            return super().forward(x) + torch.rand(())

    loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(3, (32,))), batch_size=16, shuffle=True)
    before = dice()
    model = Rolls()
    assert dice() != before  # creating a model draws random numbers
    before = dice()
    assert len(diagnose(model, loader, F.cross_entropy, steps=5).losses) == 5
    assert dice() == before


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_all_is_as_before_when_the_forward_raises(error):
    model, optimizer = trained_a_little(Raises, error=error)
    data = batches()
    before, dice_before = state_of(model, optimizer), dice()
    if error is KeyboardInterrupt:
        with pytest.raises(error, match="oh"):
            diagnose(model, data, F.cross_entropy, optimizer, steps=10)
    else:  # what was seen before it is worth a report
        report = diagnose(model, data, F.cross_entropy, optimizer, steps=10)
        [finding] = [finding for finding in report.findings if finding.code == "TH613"]
        assert "ZeroDivisionError: oh" in finding.message and finding.step == len(report.losses)
    assert state_of(model, optimizer) == before
    assert dice() == dice_before
    assert not torch.overrides._get_current_function_mode_stack()


def test_all_is_as_before_when_the_loss_raises():
    model, optimizer = trained_a_little()
    data = batches()
    before, dice_before = state_of(model, optimizer), dice()
    with pytest.raises(LookupError):
        diagnose(model, data, lambda output, target: {}[1], optimizer)
    assert (state_of(model, optimizer), dice()) == (before, dice_before)


def test_neither_schedules_nor_hooks_of_an_optimizer_lead_from_the_copy_back_to_the_model():
    model, optimizer = trained_a_little()
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    plain = diagnose(model, (data := batches()), F.cross_entropy, optimizer, steps=4)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps the step of the optimizer
    before = state_of(model, optimizer)
    report = diagnose(model, data, F.cross_entropy, optimizer, steps=4)
    assert state_of(model, optimizer) == before
    assert report.losses == plain.losses
    assert not called


def test_a_diagnosis_says_the_same_again():
    model, data = Net(), batches()
    first, second = (diagnose(model, data, F.cross_entropy, steps=12) for _ in range(2))
    assert first.losses == second.losses and first == second


def test_a_model_that_writes_to_its_inputs_does_not_change_the_batches():
    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x, more):
            x.mul_(2)
            more["y"].zero_()
            return self.layer(x + more["y"])

    data = [(torch.randn(16, 8), {"y": torch.randn(16, 8)}, torch.randint(3, (16,))) for _ in range(3)]
    before = bits(data)
    diagnose(Overwrites(), data, F.cross_entropy, steps=5)
    assert bits(data) == before


def test_the_copy_is_trained_by_a_copy_of_the_optimizer_as_that_would_train_the_model():
    model, data = mlp(), batches(1, size=64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data[0][0]), data[0][1])
        loss.backward()
        optimizer.step()
        return float(loss)

    step()  # it has a momentum now
    report = diagnose(model, data, F.cross_entropy, optimizer, steps=5)
    assert [step() for _ in range(5)] == list(report.losses.values())


# --- data of every kind


def loader(**options):
    torch.manual_seed(3)
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(3, (64,))), batch_size=16, **options)


@pytest.mark.parametrize(
    "make",
    [
        loader,
        lambda: loader(shuffle=True),
        batches,
        lambda: tuple(batches()[0]),
        lambda: (batch for batch in batches()),
        lambda: iter(batches()),
        lambda: [[x, y] for x, y in batches()],
    ],
    ids=["loader", "shuffled", "list", "one batch", "generator", "iterator", "lists"],
)
@pytest.mark.parametrize("loss", [F.cross_entropy, None], ids=["loss", "guessed"])
def test_batches_come_in_many_kinds(make, loss):
    report = diagnose(mlp(), make(), loss, steps=10)
    assert len(report.losses) == 10 and all(map(math.isfinite, report.losses.values()))
    assert not worst(report)


def test_every_batch_of_a_generator_is_used():
    model, data = mlp(), batches(10)
    report = diagnose(model, (batch for batch in data), F.cross_entropy, steps=10)
    assert report.losses == diagnose(model, data, F.cross_entropy, steps=10).losses


def test_an_endless_generator_is_not_exhausted():
    def forever():
        while True:
            yield batches(1)[0]

    assert len(diagnose(mlp(), forever(), F.cross_entropy, steps=10).losses) == 10


def test_a_tensor_is_one_batch_without_a_target():
    report = diagnose(mlp(), torch.randn(16, 8))
    assert report.layers and not report.losses


def test_the_loss_is_given_the_batch_where_there_is_no_target():
    x, given = torch.randn(16, 8), []

    def loss(output, target):
        given.append(target)
        return F.mse_loss(output, target[:, :3])

    assert diagnose(mlp(), x, loss, steps=3).losses
    assert all(torch.equal(target, x) for target in given)


def tiny_gpt():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 16}
    ids = torch.randint(40, (4, 12))
    return GPT2LMHeadModel(GPT2Config(**sizes)), {"input_ids": ids, "labels": ids}


def tiny_bert():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=40, max_position_embeddings=16, num_labels=3))
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[0, 7:] = 0
    batch = {"input_ids": torch.randint(40, (4, 12)), "attention_mask": mask, "labels": torch.randint(3, (4,))}
    return model, batch


@pytest.mark.parametrize("make", [tiny_gpt, tiny_bert])
def test_a_dict_is_keywords_and_the_output_brings_its_loss(make):
    model, batch = make()
    before, data_before = state_of(model), bits(batch)
    report = diagnose(model, batch, steps=8)
    assert len(report.losses) == 8 and report.losses[7] < report.losses[0]
    assert not any("the loss is" in note for note in report.notes)
    assert "TH803" in report.checked, report.skipped  # its attention was measured
    assert "TH000" not in [finding.code for finding in report.findings]
    assert (state_of(model), bits(batch)) == (before, data_before)


def test_without_data_it_says_so():
    for loss in (F.cross_entropy, None):
        for data in ([], (batch for batch in ()), DataLoader([])):
            with pytest.raises(ValueError, match="no batches"):
                diagnose(mlp(), data, loss, steps=5)


# --- the loss


WRAPS = {
    "mapping": lambda output, loss: {"logits": output, "loss": loss},
    "attribute": lambda output, loss: SimpleNamespace(logits=output, loss=loss),
    "alone": lambda output, loss: loss,
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_the_loss_may_be_brought_by_any_output(wrap):
    class Brings(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.layer, self.wrap = nn.Linear(8, 3), wrap

        def forward(self, x, y):
            output = self.layer(x)
            return self.wrap(output, F.cross_entropy(output, y))

    (x, y), *_ = batches()
    report = diagnose(Brings(WRAPS[wrap]), {"x": x, "y": y}, steps=5)
    assert len(report.losses) == 5 and report.losses[4] < report.losses[0]


def test_the_loss_is_guessed_by_the_targets_and_that_is_noted():
    x = torch.randn(32, 8)
    classes = diagnose(mlp(), (x, torch.randint(3, (32,))), steps=2)
    numbers = diagnose(mlp(), (x, torch.randn(32, 3)), steps=2)
    assert any("cross entropy" in note for note in classes.notes) and "TH603" in classes.checked
    assert any("mean square" in note for note in numbers.notes)
    assert len(classes.losses) == len(numbers.losses) == 2


def test_without_any_loss_nothing_is_trained_and_rules_of_losses_are_skipped():
    report = diagnose(mlp(), torch.randn(64, 8), steps=20)
    assert not report.losses
    assert {"TH104", "TH601", "TH602"} <= set(report.skipped)
    assert {"TH101", "TH201", "TH401"} <= set(report.checked)
    assert any("no loss" in note for note in report.notes)
    assert not any("AdamW" in note for note in report.notes)


def test_a_loss_by_sample_is_averaged_and_one_that_is_no_tensor_is_refused():
    data = batches()
    model = mlp()

    def by_sample(output, target):
        return F.cross_entropy(output, target, reduction="none")

    expected = diagnose(model, data, F.cross_entropy, steps=2).losses
    assert diagnose(model, data, by_sample, steps=2).losses == pytest.approx(expected)
    with pytest.raises(TypeError, match="loss must return a tensor"):
        diagnose(model, data, lambda output, target: 1.0)


def test_outputs_may_be_containers():
    model = nn.Sequential(Containers(), Returning(lambda x: (x, {"hidden": [x * 2, None]})))
    report = diagnose(model, torch.randn(16, 4), steps=5)
    assert report.layers and "TH000" not in [finding.code for finding in report.findings]


@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 3), lambda: nn.LSTM(8, 3, batch_first=True)])
def test_a_model_may_be_a_single_layer(make):
    report = diagnose(make(), torch.randn(16, 5, 8), steps=5)
    assert report.layers and "TH000" not in [finding.code for finding in report.findings]


# --- the parts


def test_at_rest_the_model_is_not_run():
    class Never(Net):
        def forward(self, x):
            raise AssertionError

    report = diagnose(Never(), [], parts=("rest",))
    assert report.ok and {"TH102", "TH302", "TH702"} <= set(report.checked)
    assert "TH101" in report.skipped and not report.losses and not report.layers


def test_a_pass_does_not_train():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e9)  # a step with it would show
    report = diagnose(model, batches(1), F.cross_entropy, optimizer, parts=("pass",))
    assert len(set(report.losses.values())) == 1
    assert not set(report.checked) & {"TH102", "TH302", "TH503", "TH501"}
    assert {"TH101", "TH201", "TH401"} <= set(report.checked)


def test_without_steps_it_is_a_pass():
    model, data = mlp(), batches(1)
    assert diagnose(model, data, F.cross_entropy, steps=0) == diagnose(
        model, data, F.cross_entropy, parts=("rest", "pass")
    )


def test_all_parts_see_what_each_sees():
    model = mlp()
    model[0].weight.data[0, 0] = math.nan
    for parts in (("rest",), ("rest", "pass"), ("rest", "train"), ("rest", "pass", "train")):
        report = diagnose(model, batches(), F.cross_entropy, steps=4, parts=parts)
        assert (report.findings[0].code, report.findings[0].site) == ("TH102", "0.weight"), parts


@pytest.mark.parametrize("wrong", ["train", ("trains",), ("rest", "all"), (None,)])
def test_an_unknown_part_is_refused(wrong):
    with pytest.raises(ValueError, match="rest.*pass.*train"):
        diagnose(mlp(), batches(), parts=wrong)


def test_what_is_no_model_and_what_is_no_rule_are_refused_before_anything_runs():
    with pytest.raises(TypeError, match="nn.Module"):
        diagnose(lambda x: x, batches())
    with pytest.raises(ValueError, match="no rule"):
        diagnose(Raises(), batches(), rules=["TH2O1"])
    with pytest.raises(ValueError, match="worst"):
        diagnose(mlp(), batches(), steps=1, fail_on="worst")


def test_rules_are_chosen_ignored_and_failed_on_as_in_a_check():
    model = mlp()
    nn.init.constant_(model[0].bias, -100)
    data = [(torch.randn(256, 8), torch.randint(3, (256,))) for _ in range(2)]

    def found(**options):
        report = diagnose(model, data, F.cross_entropy, steps=4, **options)
        return [finding.code for finding in worst(report)], report

    assert found(rules=["TH201"])[0] == ["TH201"]
    codes, report = found(rules=["TH1", "TH201"], ignore=["dead-units"])
    assert not codes and "TH201" not in report.checked
    codes, report = found(rules=["TH201"], per_module={"*": ["TH2"]})
    assert not codes and report.ok
    assert not found(rules=["TH201"], fail_on="error")[1].ok


def test_without_an_optimizer_its_rules_are_skipped_and_that_is_noted():
    report = diagnose(mlp(), batches(), F.cross_entropy, steps=3)
    assert {"TH501", "TH502", "TH503", "TH504"} <= set(report.skipped)
    assert any("AdamW" in note for note in report.notes)
    model = mlp()
    report = diagnose(model, batches(), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.01), steps=3)
    assert {"TH501", "TH502", "TH503", "TH504"} <= set(report.checked)
    assert not any("AdamW" in note for note in report.notes)


def test_progress_is_told():
    told = []
    diagnose(mlp(), batches(), F.cross_entropy, steps=7, progress=lambda *said: told.append(said))
    assert [done for _, done, total in told if total == 7] == [1, 2, 3, 4, 5, 6, 7]
    assert all(isinstance(what, str) and what for what, _, _ in told)


# --- models of every kind


def test_a_model_that_cannot_be_copied_is_refused_and_says_what_can_be_done():
    model = mlp()
    model.lock = threading.Lock()
    with pytest.raises(ValueError, match="cannot be copied.*lock.*parts"):
        diagnose(model, batches(), F.cross_entropy)
    assert diagnose(model, batches(), F.cross_entropy, parts=("rest",)).ok


def frozen():
    return mlp().requires_grad_(False)


def without_parameters():
    return nn.Sequential(nn.Flatten(), nn.Softmax(1))


@pytest.mark.parametrize("make", [frozen, without_parameters])
@pytest.mark.parametrize("loss", [F.cross_entropy, None], ids=["loss", "none"])
@pytest.mark.parametrize("parts", [("rest", "pass"), ("rest", "pass", "train")], ids=len)
def test_a_model_with_nothing_to_train_is_looked_at(make, loss, parts):
    report = diagnose(make(), batches(), loss, steps=4, parts=parts)
    assert "TH101" in report.checked and len(report.layers) >= 2
    assert "TH000" not in [finding.code for finding in report.findings]


def test_a_model_in_eval_mode_stays_in_it():
    modes = []

    class Tells(Net):
        def forward(self, x):
            modes.append(self.training)
            return super().forward(x)

    model = Tells().eval()
    report = diagnose(model, batches(), F.cross_entropy, steps=4)
    assert modes and not any(modes)
    assert "TH704" in report.skipped and "TH702" in [finding.code for finding in report.findings]


def test_a_model_with_autocast_inside():
    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.head(F.gelu(self.first(x))).float()

    report = diagnose(Casts(), batches(), F.cross_entropy, steps=10)
    assert not worst(report) and len(report.losses) == 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_dtypes(dtype):
    data = [(x.to(dtype), y) for x, y in batches()]
    report = diagnose(mlp().to(dtype), data, F.cross_entropy, steps=6)
    assert not worst(report) and len(report.losses) == 6


def test_float16_is_not_broken_by_the_optimizer_that_we_chose():
    data = [(x.half(), y) for x, y in batches()]
    assert not worst(diagnose(mlp().half(), data, F.cross_entropy, steps=6))


def test_a_model_in_data_parallel():
    report = diagnose(nn.DataParallel(mlp()), batches(), F.cross_entropy, steps=5)
    assert not worst(report) and len(report.losses) == 5


def test_a_compiled_model(nothing_compiled):
    model = torch.compile(mlp(), backend="eager")
    before = bits(model.state_dict())
    report = diagnose(model, batches(), F.cross_entropy, steps=5)
    assert bits(model.state_dict()) == before
    assert not worst(report) and len(report.losses) == 5


@pytest.mark.parametrize("loss", [F.cross_entropy, None])
def test_a_lazy_model_has_to_be_run_first(loss):
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(3))
    with pytest.raises(ValueError, match="'0.weight' is not initialised yet: run the model once"):
        diagnose(model, batches(), loss, steps=3)
    assert model[0].has_uninitialized_params()
    model(batches()[0][0])
    assert len(diagnose(model, batches(), loss, steps=3).losses) == 3


@pytest.mark.parametrize("wrong", [-1, 2.5, True, "3"])
def test_steps_are_a_whole_number(wrong):
    with pytest.raises(ValueError, match="steps"):
        diagnose(mlp(), batches(), F.cross_entropy, steps=wrong)


def test_what_is_no_data_and_no_loss_is_refused():
    for wrong in (None, 3):
        with pytest.raises(TypeError, match="data"):
            diagnose(mlp(), wrong, F.cross_entropy)
    with pytest.raises(TypeError, match="loss"):
        diagnose(mlp(), batches(), "cross_entropy")


def test_gradients_are_computed_also_where_they_are_switched_off():
    with torch.no_grad():
        report = diagnose(mlp(), batches(), F.cross_entropy, steps=3)
        assert not torch.is_grad_enabled()
    assert len(report.losses) == 3 and "TH401" in report.checked


def test_sparse_gradients_without_an_optimizer():
    model = nn.Sequential(nn.EmbeddingBag(10, 8, sparse=True), nn.Linear(8, 3))
    data = [(torch.randint(10, (16, 5)), torch.randint(3, (16,))) for _ in range(3)]
    assert len(diagnose(model, data, F.cross_entropy, steps=3).losses) == 3


def test_an_optimizer_that_wants_a_closure():
    model = mlp()
    report = diagnose(model, batches(), F.cross_entropy, torch.optim.LBFGS(model.parameters(), 0.1), steps=3)
    assert len(report.losses) == 3


def test_the_forwards_inside_closures_are_limited():
    calls = []
    model = mlp()

    def loss(output, target):
        calls.append(None)
        return F.cross_entropy(output, target)

    diagnose(model, batches(), loss, torch.optim.LBFGS(model.parameters(), 0.1), steps=20, try_repairs=False)
    assert 100 <= len(calls) <= 300


def by_closure(model):
    original = model.forward
    model.forward = lambda x: 2 * original(x)


def by_a_wrapper(model):
    original = model.forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        return original(*args, **kwargs) * 2

    model.forward = forward


def by_binding(model):
    def forward(self, x):
        return 2 * nn.Sequential.forward(self, x)

    model.forward = types.MethodType(forward, model)


def by_partial(model):
    model.forward = functools.partial(lambda net, x: 2 * net[2](net[1](net[0](x))), model)


def by_a_part(model):
    part, original = model[0], model[0].forward
    part.forward = lambda x: 2 * original(x)


def by_name(model):
    globals()["THE_MODEL"] = model
    model.forward = lambda x: 2 * THE_MODEL[2](THE_MODEL[1](THE_MODEL[0](x)))  # noqa: F821


@pytest.mark.parametrize("change", [by_closure, by_a_wrapper, by_binding, by_partial, by_a_part, by_name])
def test_a_forward_that_was_replaced_uses_the_weights_of_the_copy(change):
    model = mlp()
    change(model)
    forward, before = vars(model).get("forward"), state_of(model, None)
    report = diagnose(model, batches(), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), steps=30)
    assert report.losses[29] < report.losses[0] and not any(finding.code == "TH404" for finding in report.findings)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert state_of(model, None) == before and vars(model).get("forward") is forward


# --- what is broken does not break the diagnosis


def filled(value):
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


NUMBERS = (0.0, 1e-38, 1e37, math.inf, -math.inf, math.nan)
PAIRS = [*((number, None) for number in NUMBERS), *((1.0, number) for number in NUMBERS), (math.inf, 1e37), (0.0, 0.0)]


@pytest.mark.parametrize("inputs, weights", PAIRS)
def test_no_number_makes_a_rule_fail(inputs, weights):
    model = Net() if weights is None else filled(weights)
    data = [(torch.full((size, 8), inputs), torch.randint(3, (size,))) for size in (2, 64)]
    report = diagnose(model, data, F.cross_entropy, steps=6)
    assert "TH000" not in [finding.code for finding in report.findings], report
    assert not [reason for reason in report.skipped.values() if "raised" in reason]
    assert (Report.from_dict(json.loads(json.dumps(report.to_dict())))).headline == report.headline


def test_a_batch_of_no_samples_does_not_make_a_rule_fail():
    report = diagnose(mlp(), [(torch.empty(0, 8), torch.empty(0, dtype=torch.long))], F.cross_entropy, steps=3)
    assert "TH000" not in [finding.code for finding in report.findings], report


class Log(nn.Module):
    def forward(self, x):
        return x.log()  # here


def test_a_nan_that_appears_at_a_step_is_found_with_its_op_and_line():
    model = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), Log(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.copy_(100 * torch.eye(8))
        model[0].bias.zero_()
    data = [(x.abs() + 0.1, y) for x, y in batches(12)]
    data[6] = (-20 * data[6][0], data[6][1])  # softplus of it is 0 in float32, and the log of that -inf
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    report = diagnose(model, data, F.cross_entropy, optimizer, steps=12)
    first = report.findings[0]
    assert (first.code, first.site, first.step) == ("TH101", "2", 6)
    assert "log" in first.evidence["op"]
    lines, start = inspect.getsourcelines(Log)
    (offset,) = [number for number, line in enumerate(lines) if line.rstrip().endswith("# here")]
    assert first.evidence["line"].startswith(f"{Path(__file__).name}:{start + offset}:")
    assert {other.code for other in first.affected} >= {"TH101", "TH104"}
    assert all(math.isfinite(loss) for step, loss in report.losses.items() if step < 6)


def test_a_nan_that_appears_in_the_backward_is_found():
    class Root(nn.Module):
        def forward(self, x):
            return (x - x.detach()).sqrt()

    model = nn.Sequential(nn.Linear(8, 8), Root(), nn.Linear(8, 3))
    report = diagnose(model, batches(), F.cross_entropy, steps=5)
    first = report.findings[0]
    assert (first.code, first.site, first.step) == ("TH103", "1", 0)
    assert "sqrt" in first.evidence["op"].lower()


def test_a_rule_of_ones_own_that_raises_does_not_stop_a_diagnosis():
    class Broken(type(RULES["TH601"])):
        """Nothing."""

        code, name = "MY001", "broken"

        def find(self, history):
            raise RuntimeError("no")

    report = diagnose(mlp(), batches(), F.cross_entropy, steps=3, rules=[Broken(), "TH101"])
    assert [finding.code for finding in report.findings] == ["TH000"] and report.ok
    assert report.checked == ("TH101",)


# --- the report


class Shared(nn.Module):
    """One ReLU for layers of 8, 16 and 24 units."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.third, self.head = nn.Linear(64, 24), nn.Linear(24, 3)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.relu(self.second(self.relu(self.first(x))))
        return self.head(self.relu(self.third(x.flatten(1))))


def images():
    return [(torch.randn(16, 1, 6, 6), torch.randint(3, (16,))) for _ in range(4)]


@pytest.mark.filterwarnings("error")
def test_a_module_that_layers_of_different_width_share_is_no_fault():
    report = diagnose(Shared(), images(), F.cross_entropy, steps=20)
    assert "TH000" not in {finding.code for finding in report.findings}
    [note] = [note for note in report.notes if "not judged" in note]
    assert note.startswith(
        "the units of the output of 'relu' were not judged: there were 8 units, and now there are 16;"
    )
    assert "TH201" in report.checked


def test_units_that_a_shared_module_kills_are_found_where_they_come_from():
    model = Shared()
    with torch.no_grad():
        model.second.bias[:12] = -100
    [found] = diagnose(model, images(), F.cross_entropy, steps=20, rules=["TH201"]).findings
    assert (found.site, found.evidence["units"]) == ("second", 16) and 12 <= found.evidence["dead"] < 16


@pytest.mark.filterwarnings("error")
def test_units_of_which_there_were_other_numbers_before_are_not_judged():
    """The ReLU of a Conv1d is taken for one with its units last; batches of other lengths show that it is not."""
    model = nn.Sequential(nn.Conv1d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].bias.fill_(-100)
    data = [(torch.randn(16, 1, length), torch.randint(3, (16,))) for length in (22, 22, 22, 30)]
    report = diagnose(model, data, F.cross_entropy, steps=20, rules=["TH201", "TH204"])
    assert any("'1' were not judged: there were 20 units, and now there are 28" in note for note in report.notes)
    everything = [part for finding in report.findings for part in (finding, *finding.affected)]
    assert everything and "1" not in {finding.site for finding in everything}


def test_a_report_has_the_losses_by_step_and_the_layers_in_execution_order():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    report = diagnose(model, batches(), F.cross_entropy, optimizer, steps=10)
    assert list(report.losses) == list(range(10))
    assert report.model == "Net"
    modules = [layer for layer in report.layers if layer["kind"] == "module"]
    assert [layer["site"] for layer in modules] == ["first", "norm", "act", "dropout", "head"]
    assert {layer["site"]: layer["module"] for layer in modules}["norm"] == "BatchNorm1d"
    assert all(math.isfinite(layer[name]) for layer in modules for name in ("mean", "std", "grad_norm"))
    parameters = {layer["site"]: layer for layer in report.layers if layer["kind"] == "parameter"}
    assert {"first.weight", "norm.weight", "head.weight", "head.bias"} <= set(parameters)
    assert 0 < parameters["head.weight"]["update_ratio"] < 1
    assert not set(report.checked) & set(report.skipped)
    assert {*report.checked, *report.skipped} == set(RULES)


def test_a_norm_that_comes_first_has_no_moments_of_its_inputs():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4))
    data = [(torch.randn(32, 8), torch.randint(4, (32,))) for _ in range(8)]
    assert "TH303" in diagnose(model, data, steps=5, rules=["TH303", "TH701"]).checked
