"""Repairs that `diagnose` tries: what they change, what it says then, and what that does to a finding."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchhook import Finding, Report, Trial, diagnose
from torchhook.render import json as as_json
from torchhook.rules.repairs import repairs_for
from torchhook.rules.trials import Trials, _Outcome

pytestmark = pytest.mark.usefixtures("one_thread")


def mlp(*between, inputs=8, outputs=2):
    return nn.Sequential(nn.Linear(inputs, 32), *(between or (nn.ReLU(),)), nn.Linear(32, outputs))


def classes(scale=1.0, shift=0.0, count=20):
    """Two classes, told apart by the sign of a sum; the inputs scaled and shifted by feature."""
    scales = scale ** torch.linspace(0, 1, 8)
    return [(x * scales + shift, (x.sum(1) > 0).long()) for x in torch.randn(count, 32, 8)]


def first(report, code):
    return next(finding for finding in report.findings if finding.code == code)


def test_inputs_out_of_scale_are_standardised_and_the_loss_is_told():
    model = mlp()
    report = diagnose(model, classes(1e4, 500.0), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    finding = report.findings[0]
    assert finding.code == "TH303" and finding.severity >= "warning"
    assert finding.tried.change == "inputs standardised" and finding.tried.helped
    assert finding.tried.repaired < 0.5 and not finding.tried.without < 2 * finding.tried.repaired
    assert "tried: inputs standardised → loss" in str(report)


@pytest.mark.parametrize(
    ("losses", "helped"),
    [
        ([0.2, 0.3, 0.2, 0.3], True),  # half of it is gone
        ([0.45, 0.45, 0.45, 0.45], False),  # a tenth
        ([0.0, 0.8, 0.0, 0.6], False),  # as much as the batches differ by
        ([0.2, 0.2, 0.2, math.nan], False),
    ],
)
def test_a_repair_helps_if_the_loss_is_clearly_lower_with_it(losses, helped):
    trials = Trials(lambda: None, [], None, steps=64, seconds=1.0, chance=0.7)
    trials._plain = _Outcome({0: [0.7] * 4, 32: [0.6] * 4, 64: [0.5] * 4}, seconds=0.1)
    assert trials._helps(_Outcome({0: [0.7] * 4, 32: [0.6] * 4, 64: losses}, seconds=0.1), 64, 0.0) == helped


@pytest.mark.parametrize(
    ("last", "repaired", "helped", "teaches"),
    [
        (1.1, 0.1, True, True),  # from guessing to a model
        (0.97, 0.55, True, True),
        (1.1, 0.8, True, False),  # it guesses still
        (1.1, 0.1, False, False),
        (0.5, 0.1, True, False),  # it has learnt without the repair
    ],
)
def test_a_repair_teaches_a_training_that_only_guesses(last, repaired, helped, teaches):
    trials = Trials(lambda: None, [], None, steps=64, seconds=1.0, chance=1.1)
    trials._plain = _Outcome({0: [1.3] * 4, 64: [last] * 4}, seconds=0.1)
    assert trials._teaches(Trial("inputs standardised", last, repaired, 64, helped)) == teaches


class Normed(nn.Module):
    """Undoes the scale of its inputs by a function, which only a trial can tell."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32, bias=False), nn.Linear(32, 2)

    def forward(self, x):
        return self.last(F.layer_norm(self.first(x), (32,)).relu())


def test_a_scale_that_does_no_harm_is_an_info():
    model, data = Normed(), [(30 * x, y) for x, y in classes()]
    report = diagnose(model, data, F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-2))
    assert first(report, "TH303").severity == "info" and not first(report, "TH303").tried.helped
    untried = diagnose(model, data, F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-2), try_repairs=False)
    assert first(untried, "TH303").tried is None


def test_a_rate_that_is_too_low_is_told_from_a_training_that_is_slow():
    stuck, slow = mlp(), mlp()
    report = diagnose(stuck, classes(), F.cross_entropy, torch.optim.SGD(stuck.parameters(), 1e-6))
    finding = report.findings[0]
    assert (
        finding.evidence["cause"] == "rate"
        and finding.tried.helped
        and "times the learning rate" in finding.tried.change
    )
    report = diagnose(slow, classes(), F.cross_entropy, torch.optim.SGD(slow.parameters(), 3e-3))
    assert not any(finding.severity >= "warning" for finding in report.findings)


def test_labels_in_another_order_are_told_from_a_rate_that_is_too_low():
    data, model = classes(), mlp()
    mixed = [(x, y[torch.randperm(len(y))]) for x, y in data]
    report = diagnose(model, mixed, F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))
    finding = report.findings[0]
    assert finding.code == "TH601" and finding.evidence["cause"] == "labels"
    assert "by heart" in finding.tried.change and finding.tried.repaired < 0.3 < finding.tried.without


def test_missing_activations_explain_a_loss_that_does_not_fall():
    circles = [(x, (x.square().sum(1) > 1.4).long()) for x in torch.randn(20, 64, 2)]
    model = nn.Sequential(nn.Linear(2, 16), nn.Linear(16, 16), nn.Linear(16, 2))
    report = diagnose(model, circles, F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-2))
    assert report.findings[0].code == "TH612" and report.findings[0].tried.helped
    assert "TH601" in [finding.code for finding in report.findings[0].affected]


def test_a_rate_that_is_too_high_explains_the_dead_units_that_come_of_it():
    x = torch.randn(20, 32, 4)
    data = [(one, 50 + 100 * one.sum(1, keepdim=True)) for one in x]
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    report = diagnose(model, data, F.mse_loss, torch.optim.SGD(model.parameters(), 0.03))
    assert report.findings[0].evidence["cause"] in ("rate", "divergence", "target-scale")
    assert not any(finding.code == "TH201" for finding in report.findings)  # but among the affected, if at all


def test_targets_are_standardised_and_judged_in_their_own_units():
    data = [(x, 1e5 * (3 + x.sum(1, keepdim=True))) for x in torch.randn(20, 32, 8)]
    model = mlp(outputs=1)
    report = diagnose(model, data, F.mse_loss, torch.optim.Adam(model.parameters(), 1e-2))
    finding = first(report, "TH609")
    assert finding.tried.change == "targets standardised" and finding.tried.helped
    assert (
        finding.tried.repaired < 0.5 * finding.tried.without and finding.tried.repaired > 1
    )  # not of standardised ones


def test_the_last_activation_is_left_out():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1), nn.ReLU())
    data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(20, 32, 8)]
    finding = diagnose(model, data, F.mse_loss, torch.optim.Adam(model.parameters(), 1e-2)).findings[0]
    assert (
        (finding.code, finding.site) == ("TH607", "3")
        and finding.tried.change == "without '3'"
        and finding.tried.helped
    )


def test_the_model_its_data_and_the_dice_are_left_alone():
    model = mlp()
    data = classes(1e4, 500.0)
    before = [value.clone() for value in (*model.parameters(), *(one for batch in data for one in batch))]
    dice = torch.get_rng_state()
    diagnose(model, data, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    after = [*model.parameters(), *(one for batch in data for one in batch)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(dice, torch.get_rng_state()) and all(parameter.grad is None for parameter in model.parameters())


def test_it_keeps_to_its_time():
    model = mlp()
    report = diagnose(model, classes(1e4, 500.0), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), seconds=0)
    assert all(finding.tried is None for finding in report.findings)
    assert any("raise seconds=" in note for note in report.notes)


def test_repairs_that_do_not_fit_are_passed_over():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 2))

        def forward(self, x):
            return (x @ self.weight).softmax(1)

    model = Alone()
    report = diagnose(model, classes(), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    assert report.findings[0].code == "TH604" and report.findings[0].tried is None


def test_a_report_keeps_what_was_tried():
    trial = Trial("inputs standardised", math.inf, 0.5, 100)
    report = Report((Finding("TH303", "warning", "out of scale", tried=trial),))
    assert Report.from_dict(report.to_dict()) == report and "Infinity" in as_json(report)


def test_every_repair_has_words():
    for code in ("TH201", "TH203", "TH301", "TH303", "TH501", "TH502", "TH503", "TH601", "TH604", "TH609", "TH612"):
        for repair in repairs_for(Finding(code, "error", "", site="0")):
            assert repair.change and callable(repair.apply)
    assert repairs_for(Finding("TH101", "error", "")) == []


def test_a_higher_rate_is_not_tried_where_the_others_learn():
    alone = Finding("TH502", "warning", "each step changes it by 0%", "fc.weight", evidence={"cause": "no-gradient"})
    assert not repairs_for(alone)
    assert repairs_for(Finding("TH502", "warning", "each step changes the weights by 0%", evidence={"cause": "rate"}))


def test_a_loss_without_a_lower_end_explains_the_steps_that_grow():
    model = mlp()
    report = diagnose(model, classes(), F.nll_loss, torch.optim.SGD(model.parameters(), 0.5, momentum=0.9))
    assert report.findings[0].code == "TH604"
    assert {finding.code for finding in report.findings[0].affected} & {"TH501", "TH606"}
    assert not {finding.code for finding in report.findings} & {"TH402", "TH501", "TH606"}
