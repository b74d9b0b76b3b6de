"""Attention that grows, and statistics that could not be measured."""

import pytest
import torch
from torch import nn

from torchhook import Moments, check, measure
from torchhook.core.site import Site
from torchhook.rules.history import History
from torchhook.stats import Attention
from torchhook.stats.reduce import Reduce


def logits_of_size(*sizes):
    history = History()
    for step, size in enumerate(sizes):
        reduce = Reduce(Attention())
        reduce.cell(Site("attn", "attention"), nn.Identity()).update(size * torch.eye(4).expand(1, 2, 4, 4))
        history.add(step, reduce.snapshot())
    return check(history, ["TH803"]).findings


def test_logits_that_grow_tenfold_are_found_before_they_are_huge():
    (finding,) = logits_of_size(3, 3, 50, 80)
    assert finding.site == "attn" and finding.evidence["before"] == 3 and finding.evidence["largest"] == 80


def test_logits_that_are_large_from_the_beginning_or_stay_small_are_not():
    assert not logits_of_size(60, 60, 80, 80)
    assert not logits_of_size(2, 2, 40, 40)


class Raising(Moments):
    def update(self, state, x):
        raise RuntimeError("no")


def test_a_statistic_that_raises_becomes_a_finding_and_the_rules_go_on():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="could not collect"):
        with measure(model, stats=[Raising(), "histogram"]) as stats:
            model(torch.ones(1, 2))
    finding = check(stats).findings[-1]
    assert (finding.code, finding.severity) == ("TH000", "info") and "RuntimeError: no" in finding.message
