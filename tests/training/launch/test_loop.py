"""What `torchhook run` says about the loop of a script: what it does, or forgets, between two steps."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from torchhook.core.findings import Severity
from torchhook.training.launch.discovery import Discovery

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = [(x, x[:, :2] - x[:, 2:]) for x in torch.randn(40, 32, 4, generator=torch.Generator().manual_seed(0))]


def small(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), *between, nn.Linear(16, 2))


@pytest.fixture
def said(tmp_path):
    """Run a script, which is a function; the codes of warning or above that it gets, and the findings themselves."""

    def run(script, *arguments, **options):
        with Discovery(every=5, to=tmp_path, **options) as found:
            script(*arguments)
        tops = [finding for monitor in found.watched for finding in monitor.report.findings]
        return [finding.code for finding in tops if finding.severity >= Severity.WARNING], tops

    return run


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr)


# ------------------------------------------------------------ zero_grad


def forgets_zero_grad(model, zero=lambda optimizer: None, data=DATA):
    optimizer = sgd(model, 0.02)
    for x, y in data:
        zero(optimizer)
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def test_zero_grad_is_never_called(said):
    codes, [first, *_] = said(forgets_zero_grad, small())
    assert codes == ["TH511"] and first.evidence["cause"] == "loop"


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_is_called(said, set_to_none):
    codes, _ = said(forgets_zero_grad, small(), lambda optimizer: optimizer.zero_grad(set_to_none))
    assert not codes


def test_gradients_that_add_up_within_a_step(said):
    def accumulate():
        model = small()
        optimizer = sgd(model)
        for number, (x, y) in enumerate(DATA):
            (F.mse_loss(model(x), y) / 4).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

    assert said(accumulate)[0] == []


def test_gradients_that_another_training_leaves_behind(said):
    """The generator's backward goes through the critic, which clears its gradients before its own."""

    def adversarial():
        maker, critic = small(), nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
        makes, judges = sgd(maker, 0.01), sgd(critic, 0.01)
        for x, real in DATA:
            judges.zero_grad(set_to_none=False)
            loss = F.softplus(-critic(real)).mean()
            loss.backward()
            F.softplus(critic(maker(x).detach())).mean().backward()
            judges.step()
            makes.zero_grad(set_to_none=False)
            F.softplus(-critic(maker(x))).mean().backward()
            makes.step()

    assert said(adversarial)[0] == []


def test_a_script_without_an_optimizer_forgets_it_too(said):
    def by_hand(zero):
        weight = torch.zeros(4, 2, requires_grad=True)
        for x, y in DATA:
            F.mse_loss(x @ weight, y).backward()
            with torch.no_grad():
                weight -= 0.01 * weight.grad
                if zero:
                    weight.grad.zero_()

    assert "TH511" in said(by_hand, False)[0] and "TH511" not in said(by_hand, True)[0]


# ------------------------------------------------------------ what the optimizer has


def trains(model, optimizer, data=DATA):
    for x, y in data:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def test_a_model_that_was_copied_after_its_optimizer_was_made(said):
    def copied():
        old = small()
        optimizer = sgd(old)
        trains(copy.deepcopy(old), optimizer)

    codes, [first, *_] = said(copied)
    assert codes[0] == "TH503" and first.evidence["cause"] == "loop" and first.evidence["strangers"] == 4


def test_a_model_whose_parameters_were_replaced_after_its_first_call(said):
    """As FSDP replaces them."""

    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            out = self.layer(x)
            self.layer.weight = nn.Parameter(self.layer.weight.detach().clone())
            self.layer.bias = nn.Parameter(self.layer.bias.detach().clone())
            return self.layer(x) + 0 * out.detach()

    def replaced():
        model = Replacing()
        trains(model, sgd(model))

    codes, [first, *_] = said(replaced)
    assert codes[0] == "TH503" and "no longer those of the model" in first.message


def test_each_part_has_its_own_optimizer(said):
    def parts():
        model = small()
        one, other = sgd(model[0]), sgd(model[2])
        for x, y in DATA:
            one.zero_grad()
            other.zero_grad()
            F.mse_loss(model(x), y).backward()
            one.step()
            other.step()

    assert said(parts)[0] == []


# ------------------------------------------------------------ modes


def evaluates(model, data=DATA[:5]):
    with torch.no_grad():
        for x, _ in data:
            model(x)


@pytest.mark.parametrize("part", [nn.Dropout(0.1), nn.BatchNorm1d(16)])
def test_a_model_that_is_trained_in_eval_mode(said, part):
    model = small(part)

    def forgets_to_return():
        trains(model.eval(), sgd(model))

    codes, [first, *_] = said(forgets_to_return)
    assert codes == ["TH705"] and first.evidence["cause"] == "mode" and "trained in eval mode" in first.message


def test_a_model_that_is_evaluated_in_train_mode(said):
    model = small(nn.Dropout(0.1))

    def never_switches():
        optimizer = sgd(model)
        for _ in range(2):
            trains(model, optimizer)
            evaluates(model)

    codes, [first, *_] = said(never_switches)
    assert codes == ["TH705"] and "evaluated in train mode, 10 times" in first.message


@pytest.mark.parametrize("how", ["switches", "has no modes", "freezes its norms", "looks at its batch", "warms up"])
def test_modes_as_they_should_be(said, how):
    model = small() if how == "has no modes" else small(nn.BatchNorm1d(16))
    for x, _ in DATA:
        model(x)  # as if it were pretrained

    def script():
        optimizer = sgd(model)
        if how == "warms up":
            evaluates(model)
        if how == "freezes its norms":
            model[2].eval()
        for x, y in DATA:
            trains(model, optimizer, [(x, y)])
            if how == "looks at its batch":
                evaluates(model, [(x, y)])
        if how in ("switches", "has no modes"):
            evaluates(model.eval() if how == "switches" else model)
            trains(model.train(), optimizer, DATA[:10])

    assert said(script)[0] == []


# ------------------------------------------------------------ accumulation, schedules and clipping


@pytest.mark.parametrize(
    "number, divide, optimizer, expected",
    [
        (2, 1, torch.optim.SGD, ["TH512"]),
        (2, 2, torch.optim.SGD, []),
        (2, 1, torch.optim.Adam, []),
        (1, 1, torch.optim.SGD, []),
    ],
)
def test_losses_that_add_up(said, number, divide, optimizer, expected):
    def accumulate():
        model = small()
        stepped = optimizer(model.parameters(), 0.01)
        for count, (x, y) in enumerate(loader(4)):
            (F.mse_loss(model(x), y) / divide if divide > 1 else F.mse_loss(model(x), y)).backward()
            if count % number == number - 1:
                stepped.step()
                stepped.zero_grad()

    codes, tops = said(accumulate)
    assert [code for code in codes if code == "TH512"] == expected
    assert ("TH512" in [finding.code for finding in tops]) == (number > divide)


@pytest.mark.parametrize("how", ["never", "early", "by step", "by epoch", "in a sequence", "on a plateau"])
def test_schedules(said, how):
    def scheduled():
        model = small()
        optimizer = sgd(model)
        steady = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        if how == "in a sequence":
            steady = torch.optim.lr_scheduler.SequentialLR(
                optimizer, [steady, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)], [1000]
            )
        if how == "on a plateau":
            steady = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1000)
        for _ in range(3):
            for x, y in DATA:
                if how == "early":
                    steady.step()
                trains(model, optimizer, [(x, y)])
                if how == "by step":
                    steady.step()
            if how in ("by epoch", "in a sequence", "on a plateau"):
                steady.step(*([0.5] if how == "on a plateau" else []))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch itself warns of an early step
        assert said(scheduled)[0] == (["TH513"] if how in ("never", "early") else [])


@pytest.mark.parametrize("limit, expected", [(1e-5, ["TH514"]), (1.0, [])])
def test_gradients_that_are_clipped(said, limit, expected):
    def clips():
        model = small()
        optimizer = sgd(model)
        for x, y in DATA:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()

    assert said(clips)[0] == expected


# ------------------------------------------------------------ loaders


def loader(size=32, **options):
    x = torch.cat([x for x, _ in DATA])
    y = torch.cat([y for _, y in DATA])
    return DataLoader(TensorDataset(x, y), size, **options)


class Stream(IterableDataset):
    """Gives the same samples in each worker, or its share of them."""

    def __init__(self, split):
        self.split = split

    def __iter__(self):
        info = get_worker_info()
        step = info.num_workers if self.split else 1
        for x, y in DATA[info.id if self.split else 0 :: step]:
            yield from zip(x, y, strict=True)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_new_iterator_in_each_step(said, shuffle):
    """If it is shuffled, its first batch is another one each time."""

    def anew():
        model, batches = small(), loader(shuffle=shuffle)
        optimizer = sgd(model)
        for _ in range(30):
            trains(model, optimizer, [next(iter(batches))])

    assert ("TH515" in said(anew)[0]) is not shuffle


def test_batches_as_they_should_be(said):
    """All of the data at once, one batch over and over, and the first batch of what only validates."""

    def script(how):
        model = small()
        optimizer = sgd(model)
        whole, parts, one = loader(2000), loader(), next(iter(loader()))
        for _ in range(20):
            trains(model, optimizer, [next(iter(whole))] if how == "whole" else [one] if how == "one" else parts)
            with torch.no_grad():
                model(next(iter(parts))[0])

    for how in ("whole", "one", "parts"):
        assert not {"TH515", "TH516"} & set(said(script, how)[0])


@pytest.mark.parametrize("split", [False, True])
def test_samples_that_every_worker_repeats(said, split):
    def script():
        model = small()
        trains(model, sgd(model), DataLoader(Stream(split), 32, num_workers=2))

    assert said(script)[0] == ([] if split else ["TH515"])


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("anew", [False, True])
def test_an_iterator_that_is_used_up(said, anew, persistent):
    def script():
        model = small()
        optimizer, batches = sgd(model), loader(num_workers=persistent, persistent_workers=persistent)
        once = iter(batches)
        for _ in range(3):
            trains(model, optimizer, batches if anew else once)

    assert said(script)[0] == ([] if anew else ["TH516"])


def test_losses_of_models_that_are_trained_in_turn_need_not_fall(said):
    def script(number):
        models = [small() for _ in range(number)]
        optimizers = [sgd(model, 1e-7) for model in models]
        for x, y in 2 * DATA:
            for model, optimizer in zip(models, optimizers, strict=True):
                trains(model, optimizer, [(x, y)])

    severities = []
    for number in (1, 2):
        _, tops = said(script, number, rules=["TH601"])
        severities.append({finding.severity for finding in tops})
    assert severities == [{Severity.WARNING}, {Severity.INFO}]
