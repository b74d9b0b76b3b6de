"""Experts that rounding chooses: two recordings do not part there, and what else is wrong has its module."""

import pytest
import torch
from torch import nn

from torchhook import diff, record


class Mixture(nn.Module):
    """Sends each token to two of eight experts, as most models do: without a module for the choice."""

    def __init__(self, width=32, experts=8):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(experts)
        )
        self.most, self.sharpness, self.by = 2, 1.0, None

    def forward(self, x):
        scores = self.gate(x).float() * self.sharpness
        scores = scores if self.by is None else scores + self.by
        weights, chosen = scores.softmax(-1).topk(self.most, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                y.index_add_(0, token, expert(x[token]) * weights[token, slot, None].to(x.dtype))
        return y


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(32), Mixture()

    def forward(self, x):
        return x + self.moe(self.norm(x))


def model(seed, fault=None):
    torch.manual_seed(seed)
    layers = nn.Sequential(*(Layer() for _ in range(3)), nn.Linear(32, 8)).eval()
    middle = layers[1].moe
    with torch.no_grad():
        if fault == "fewer":
            middle.most = 1
        elif fault == "scores":
            middle.sharpness = 3.0
        elif fault == "bias":
            middle.by = torch.tensor([2.0] + [0.0] * 7)
        elif fault == "gate":
            middle.gate.weight.copy_(middle.gate.weight.roll(1, 0))
        elif fault == "expert":
            middle.experts[0][2].weight.mul_(1.5)
        elif fault == "eps":
            layers[2].norm.eps = 0.3
    return layers


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
FAULTS = {
    "fewer": ["1.moe"],
    "scores": ["1.moe"],
    "bias": ["1.moe"],
    "gate": ["1.moe.gate"],
    "expert": ["1.moe.experts.0.2"],
    "eps": ["2.norm"],
}


@pytest.mark.parametrize("keep", ["all", "sketch"])
def test_experts_that_rounding_chooses_are_no_difference(tmp_path, keep):
    notes = []
    for seed in range(6):
        paths = [tmp_path / f"{seed}-{name}.th" for name in "ab"]
        for path, made in zip(paths, (model(seed), model(seed).bfloat16()), strict=True):
            record(made, X, to=path, keep=keep, noise=False)
        found = diff(*paths)
        assert found.same, (seed, found.verdict)
        notes += found.notes
    assert any("moe (Mixture): what depends on them was not judged" in note for note in notes)


@pytest.mark.parametrize("keep", ["all", "sketch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mistakes_where_experts_are_chosen_are_found(tmp_path, dtype, keep):
    record(model(0), X, to=tmp_path / "a.th", keep=keep, noise=False)
    for fault, where in FAULTS.items():
        record(model(0, fault).to(dtype), X, to=tmp_path / f"{fault}.th", keep=keep, noise=False)
        found = diff(tmp_path / "a.th", tmp_path / f"{fault}.th")
        assert found.module in where, (fault, found.verdict)
