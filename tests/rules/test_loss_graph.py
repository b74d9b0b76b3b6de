"""What a loss compares, read from its autograd graph."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchhook import diagnose
from torchhook.rules.loss_graph import Extent, LossTerm, loss_terms, merged

X = torch.linspace(-2, 2, 40).reshape(8, 5)
CLASSES = torch.arange(8) % 3
SHARES = torch.linspace(0, 1, 24).reshape(8, 3)


def output():
    return nn.Linear(5, 3)(X)


LOSSES = {
    "cross_entropy": (lambda o: F.cross_entropy(o, CLASSES), "cross-entropy", ""),
    "of a softmax": (lambda o: F.cross_entropy(o.softmax(1), CLASSES), "cross-entropy", "softmax"),
    "of a sigmoid": (lambda o: F.cross_entropy(torch.sigmoid(o), CLASSES), "cross-entropy", "sigmoid"),
    "of a ReLU, reshaped": (
        lambda o: F.cross_entropy(o.relu().view(8, 3, 1).squeeze(2), CLASSES),
        "cross-entropy",
        "relu",
    ),
    "with shares": (lambda o: F.cross_entropy(o, SHARES), "cross-entropy", ""),
    "module": (lambda o: nn.CrossEntropyLoss()(o, CLASSES), "cross-entropy", ""),
    "of log-softmax": (lambda o: F.nll_loss(o.log_softmax(1), CLASSES), "cross-entropy", ""),
    "of pictures": (lambda o: F.cross_entropy(o[..., None, None], CLASSES[:, None, None]), "cross-entropy", ""),
    "nll of raw outputs": (lambda o: F.nll_loss(o, CLASSES), "nll", ""),
    "log by hand": (lambda o: -(SHARES * o.softmax(1).log()).sum(1).mean(), "log", "softmax"),
    "nll of a log by hand": (lambda o: F.nll_loss(o.softmax(1).log(), CLASSES), "log", "softmax"),
    "log of the rest": (lambda o: -torch.log(1 - o.sigmoid()).mean(), "log", "sigmoid"),
    "log with an eps": (lambda o: -torch.log(o.sigmoid() + 1e-6).mean(), "log", ""),
    "binary": (lambda o: F.binary_cross_entropy(o.sigmoid(), SHARES), "binary", "sigmoid"),
    "binary with logits": (lambda o: F.binary_cross_entropy_with_logits(o, SHARES), "binary-logits", ""),
    "squared": (lambda o: F.mse_loss(o.tanh(), SHARES), "squared", "tanh"),
    "squared by hand": (lambda o: ((o - SHARES) ** 2).mean(), "squared", ""),
    "absolute": (lambda o: F.l1_loss(o.relu(), SHARES), "absolute", "relu"),
    "weighted": (lambda o: 0.5 * F.mse_loss(o, SHARES) / 3, "squared", ""),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_compared_and_what_came_before(name):
    make, kind, squash = LOSSES[name]
    [term] = loss_terms(make(output()))
    assert (term.kind, term.squash) == (kind, squash)


def test_a_sum_of_losses_has_several_terms():
    made = output()
    terms = loss_terms(F.cross_entropy(made, CLASSES) + 0.1 * F.mse_loss(made.tanh(), SHARES))
    assert sorted(term.kind for term in terms) == ["cross-entropy", "squared"]


def test_numbers_of_outputs_and_targets():
    made = output().sigmoid()
    [term] = loss_terms(F.binary_cross_entropy(made, SHARES))
    assert term.output.low == pytest.approx(float(made.detach().min())) and term.output.count == 24
    assert (term.target.low, term.target.high, term.target.mean) == pytest.approx((0, 1, 0.5))
    assert term.chance == pytest.approx(math.log(2))


def test_a_softmax_over_one_unit_is_known():
    [term] = loss_terms(F.mse_loss(nn.Linear(5, 1)(X).softmax(-1), torch.ones(8, 1)))
    assert (term.squash, term.units) == ("softmax", 1)


def test_layers_with_nothing_between_are_counted():
    layers = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    assert loss_terms(F.cross_entropy(layers(X), CLASSES))[0].linear == 3
    assert loss_terms(F.cross_entropy(nn.Sequential(*layers[:2], nn.ReLU(), layers[2])(X), CLASSES))[0].linear == 0


@pytest.mark.parametrize(
    "loss",
    [
        lambda o: o.mean().detach(),
        lambda o: o.logsumexp(1).mean(),
        lambda o: torch.compile(F.mse_loss, backend="eager")(o, SHARES),
    ],
    ids=["without a graph", "of no known kind", "compiled"],
)
def test_what_is_not_known_is_left_out(loss):
    assert all(term.kind == "squared" for term in loss_terms(loss(output())))


def test_after_the_backward_only_the_numbers_are_missing():
    loss = F.mse_loss(output().relu(), SHARES)
    loss.backward()
    [term] = loss_terms(loss)
    assert term.kind == "squared" and term.output is None and term.target is None


values = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20)


@given(st.lists(values, min_size=1, max_size=4))
def test_ranges_of_parts_merge_to_the_range_of_all(parts):
    def of(numbers):
        made = torch.tensor(numbers, dtype=torch.float64)
        return Extent(
            float(made.detach().min()), float(made.max()), float(made.mean()), float(made.std(correction=0)), len(made)
        )

    [term] = merged([[LossTerm("squared", target=of(part))] for part in parts])
    whole = of([number for part in parts for number in part])
    assert (term.target.low, term.target.high, term.target.count) == (whole.low, whole.high, whole.count)
    assert term.target.mean == pytest.approx(whole.mean, abs=1e-6) and term.target.std == pytest.approx(
        whole.std, abs=1e-2
    )


class Softmaxed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return F.softmax(self.layer(x), 1)


def test_the_line_of_a_function_is_told_and_none_of_torchhook():
    data, told = [(X, CLASSES)], {}
    for model in (Softmaxed(), nn.Sequential(nn.Linear(5, 3), nn.Softmax(1))):
        found = diagnose(model, data, F.cross_entropy, steps=5, rules=["TH604"], try_repairs=False).findings[0]
        told[found.site] = found.evidence.get("line")
    assert told["1"] is None
    assert told["layer"].startswith(f"{Path(__file__).name}:") and "return F.softmax" in told["layer"]
