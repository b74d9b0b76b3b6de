"""Whatever takes a place says the same about one that does not exist: a `SelectionError` with the nearest names."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchhook as th
from torchhook import compare, edits, explain, prune

TYPO = "convv1"


def net():
    layers = {"conv1": nn.Conv2d(1, 4, 3), "relu": nn.ReLU(), "conv2": nn.Conv2d(4, 4, 3), "flat": nn.Flatten()}
    return nn.Sequential(OrderedDict({**layers, "head": nn.Linear(64, 3)}))


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.conv1(x, x, x)[0]


X = torch.ones(2, 1, 8, 8)
LOADER = [(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])) for _ in range(2)]
CAMS = ("grad_cam", "grad_cam_pp", "hires_cam", "layer_cam", "x_grad_cam", "eigen_cam", "score_cam", "ablation_cam")

VERBS = {
    "select": lambda model, place: th.select(model, place),
    "capture": lambda model, place: th.capture(model, place).open(),
    "capture(params)": lambda model, place: th.capture(model, place, params=True).open(),
    "measure": lambda model, place: th.measure(model, place).open(),
    "edit": lambda model, place: th.edit(model, {place: edits.zero}).open(),
    "trace": lambda model, place: th.trace(model, place, progress=False).open(),
    "skip": lambda model, place: th.skip(model, place),
    "clip_gradients": lambda model, place: th.clip_gradients(model, place, value=1.0),
    "Session": lambda model, place: th.Session(model, [th.Tap(place, print)]).open(),
    "Session.add": lambda model, place: th.Session(model, []).open().add(th.Tap(place, print)),
    "overhead": lambda model, place: th.overhead(model, X, place, runs=1),
    "sweep": lambda model, place: th.sweep(model, X, [place], edits.zero, torch.sum),
    "FeatureExtractor": lambda model, place: th.FeatureExtractor(model, [place]),
    "ModelDiagnostics": lambda model, place: th.ModelDiagnostics(model, place),
    "HookManager.add": lambda model, place: th.HookManager(model).add(place),
    "HookManager.register_forward_hook": lambda model, place: th.HookManager(model).register_forward_hook(place),
    "HookManager.get": lambda model, place: hooked(model).get(place),
    "HookManager.remove": lambda model, place: hooked(model).remove(place),
    "diff(match)": lambda model, place: th.diff(model, net(), X, match={place: "conv1"}),
    "compare.cka": lambda model, place: compare.cka(model, None, LOADER, place),
    "compare.cka(b)": lambda model, place: compare.cka(model, net(), LOADER, "conv1", sites_b=place),
    "compare.models": lambda model, place: compare.models({"a": model, "b": net()}, X, place),
    "compare.inputs": lambda model, place: compare.inputs(model, X, X, place),
    "compare.datasets": lambda model, place: compare.datasets(model, LOADER, LOADER, place),
    "compare.shift": lambda model, place: compare.shift(model, LOADER, LOADER, place),
    "compare.leakage": lambda model, place: compare.leakage(model, LOADER, LOADER, F.cross_entropy, sites=place),
    "prune.importance": lambda model, place: prune.importance(model, LOADER, "taylor", F.cross_entropy, sites=place),
    "prune.sensitivity": lambda model, place: prune.sensitivity(model, LOADER, F.cross_entropy, sites=place),
    "prune.plan": lambda model, place: prune.plan(
        prune.importance(model, LOADER, "taylor", F.cross_entropy), 0.2, ignore=place
    ),
    "explain.top_examples": lambda model, place: explain.top_examples(model, LOADER, place, 0),
    "explain.attention": lambda model, place: explain.attention(Attentive(), torch.ones(1, 4, 8), sites=place),
    "explain.sanity": lambda model, place: explain.sanity(explain.grad_cam, model, X, sites=place),
    **{f"explain.{name}": lambda model, place, cam=name: getattr(explain, cam)(model, X, None, place) for name in CAMS},
}


def hooked(model):
    manager = th.HookManager(model)
    manager.add("conv1")
    return manager


@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_place_is_named_with_the_nearest_ones(verb):
    with pytest.raises(th.SelectionError, match=rf"{TYPO}.*nearest: .*'conv1'") as raised:
        VERBS[verb](net(), TYPO)
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, KeyError)
    assert not str(raised.value).startswith(("'", '"'))


def test_harvest_names_an_unknown_place(tmp_path):
    pytest.importorskip("safetensors")
    with pytest.raises(th.SelectionError, match=rf"{TYPO}.*nearest: .*'conv1'"):
        th.harvest(net(), X, [TYPO], tmp_path / "out", progress=False)


def test_a_detector_names_an_unknown_place():
    detection = pytest.importorskip("torchvision").models.detection
    detector = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None).eval()
    with pytest.raises(th.SelectionError, match=r"backbonne.*nearest: .*'backbone"):
        explain.pyramid(detector, [torch.ones(3, 64, 64)], sites="backbonne")
