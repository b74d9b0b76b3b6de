"""What `torchhook run` says about the loop of a script: what it does, or forgets, between two steps."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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

    assert not {"TH511", "TH512"} & set(said(adversarial)[0])


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
