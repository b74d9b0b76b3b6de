"""Insertion and deletion: closed forms, a plain loop, and real maps against random ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specimens import hooks_of
from torchhook.explain.cams import grad_cam, hires_cam
from torchhook.explain.erasure import faithfulness
from torchhook.explain.heat import Heat

pytestmark = pytest.mark.usefixtures("one_thread")


class Patch(nn.Module):
    """The mean of a patch of 8×4 of 16×16 pixels: an eighth of them."""

    def forward(self, x):
        return x[:, :, 4:12, 8:12].mean((1, 2, 3))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.drop, self.fc = nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.Linear(8, 5)
        self.sizes = []

    def forward(self, x, shift=None):
        self.sizes.append(len(x))
        out = self.fc(self.drop(self.conv(x).relu().mean((2, 3))))
        return out if shift is None else out + shift[:, None]


def patch_map(samples=1):
    maps = torch.zeros(samples, 16, 16)
    maps[:, 4:12, 8:12] = 1.0
    return maps


def itself(out):
    return out


def test_the_true_map_of_a_linear_score_has_the_closed_form():
    x = torch.ones(2, 3, 16, 16) * torch.tensor([1.0, 3.0]).view(2, 1, 1, 1)
    found = faithfulness(patch_map(2), Patch(), x, itself, steps=64, baseline="zero")
    share, height = 1 / 8, torch.tensor([1.0, 3.0])
    falls = (1 - found.fractions / share).clamp(min=0)
    assert torch.allclose(found.fractions, torch.linspace(0, 1, 65))
    assert torch.allclose(found.deletion, height[:, None] * falls, atol=1e-5)
    assert torch.allclose(found.insertion, height[:, None] * (1 - falls), atol=1e-5)
    assert torch.allclose(found.deletion_area, height * share / 2, atol=1e-5)
    assert torch.allclose(found.insertion_area, height * (1 - share / 2), atol=1e-5)
    assert found.passed and found.verdict.startswith("Faithful:") and len(found) == 2


def test_a_shuffled_map_is_worse_and_the_opposite_one_worst():
    maps, x = patch_map(), torch.ones(1, 1, 16, 16)
    shuffled = maps.flatten()[torch.randperm(256)].view(1, 16, 16)
    areas = [
        faithfulness(one, Patch(), x, itself, baseline="zero").deletion_area.item() for one in (maps, shuffled, -maps)
    ]
    assert areas[0] < areas[1] - 0.2 and areas[1] < areas[2] - 0.2
    wrong = faithfulness(-maps, Patch(), x, itself, baseline="zero")
    assert not wrong.passed and wrong.verdict.startswith("Not faithful")
    assert wrong.deletion_area.item() == pytest.approx(1 - 1 / 16, abs=0.01)


def test_a_map_that_is_the_same_everywhere_is_as_good_as_chance():
    x = torch.ones(4, 1, 16, 16)
    found = faithfulness(torch.zeros(4, 7, 7), Patch(), x, itself, baseline="zero")
    assert found.deletion_area.mean().item() == pytest.approx(0.5, abs=0.05)  # not in the order of the pixels


@pytest.mark.parametrize("baseline", ["blur", "zero", "mean", torch.full((3, 1, 1), 0.25)])
@pytest.mark.parametrize("batch", [1, 7, None])
def test_it_is_the_loop_that_one_would_write(baseline, batch):
    net, x = Classifier().train(), torch.rand(3, 3, 12, 10)
    before = hooks_of(net)
    maps = torch.rand(3, 12, 10)  # of the size of the images, without equals
    found = faithfulness(maps, net, x, steps=6, baseline=baseline, batch=batch, randoms=1)
    assert net.training and net.drop.training and hooks_of(net) == before
    assert max(net.sizes) <= max(batch or 8, 3)
    net.eval()
    base = {"zero": torch.zeros_like(x), "mean": x.mean((2, 3), keepdim=True).expand_as(x)}
    with torch.no_grad():
        classes = net(x).argmax(1)
        for n in range(3):
            order = maps[n].flatten().argsort(descending=True)
            for curve, back in ((found.deletion, False), (found.insertion, True)):
                for step in range(7):
                    if isinstance(baseline, str) and baseline == "blur":
                        continue
                    erased = base[baseline][n] if isinstance(baseline, str) else baseline.expand(3, 12, 10)
                    image, other = (erased, x[n]) if back else (x[n], erased)
                    image = image.clone().flatten(1)
                    first = order[: 120 * step // 6]
                    image[:, first] = other.flatten(1)[:, first]
                    score = net(image.view(1, 3, 12, 10)).softmax(1)[0, classes[n]]
                    assert curve[n, step].item() == pytest.approx(score.item(), abs=1e-5)
        whole = net(x).softmax(1)[torch.arange(3), classes]
    assert torch.allclose(found.deletion[:, 0], whole, atol=1e-5)
    assert torch.allclose(found.insertion[:, -1], whole, atol=1e-5)
    assert torch.allclose(found.insertion[:, 0], found.deletion[:, -1], atol=1e-5)
    area = [sum((row[i] + row[i + 1]).item() / 2 / 6 for i in range(6)) for row in found.insertion]
    assert found.insertion_area.tolist() == pytest.approx(area, abs=1e-6)


def test_the_blur_is_a_gaussian():
    from skimage.filters import gaussian

    from torchhook.explain.erasure import _blurred

    image = torch.rand(60, 40)
    expected = gaussian(image.numpy(), 3.0, mode="nearest", truncate=2.0)
    assert torch.allclose(_blurred(image[None, None])[0, 0], torch.tensor(expected), atol=1e-5)


def test_the_target_of_a_heat_is_its_own():
    net, x = Classifier().eval(), torch.rand(2, 3, 12, 12)
    heat = grad_cam(net, x, target=[3, 1])
    found = faithfulness(heat, net, x, steps=4)
    with torch.no_grad():
        assert found.deletion[:, 0].tolist() == pytest.approx(net(x).softmax(1)[[0, 1], [3, 1]].tolist(), abs=1e-5)
    assert torch.equal(faithfulness(heat.maps, net, x, [3, 1], steps=4).insertion, found.insertion)
    with pytest.raises(ValueError, match="made for the function itself: pass it as target="):
        faithfulness(Heat(heat.maps, ["itself", "itself"], "conv", 0, "grad_cam", (12, 12)), net, x)


def test_other_arguments_follow_their_samples():
    net, x = Classifier().eval(), torch.rand(2, 3, 12, 12)
    given = {"x": x, "shift": torch.tensor([5.0, -5.0])}
    found = faithfulness(torch.rand(2, 4, 4), net, given, lambda out: out[:, 0], steps=2)
    with torch.no_grad():
        assert found.deletion[:, 0].tolist() == pytest.approx(net(**given)[:, 0].tolist(), abs=1e-5)


def test_random_maps_have_a_seed_and_the_random_numbers_of_others_stay():
    net, x, maps = Classifier(), torch.rand(1, 3, 12, 12), torch.rand(1, 3, 3)
    state = torch.get_rng_state()
    first, again, other = (faithfulness(maps, net, x, steps=4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.random_insertion, again.random_insertion)
    assert not torch.equal(first.random_insertion, other.random_insertion)
    assert first.random_insertion.shape == (4, 1, 5)


def test_a_trained_network_and_its_maps():
    """Where a bright square lies is the class. Means of gradients do not know where, each place's own gradient does."""
    torch.manual_seed(3)
    convolutions = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    net = nn.Sequential(
        convolutions[0], nn.ReLU(), nn.MaxPool2d(2), convolutions[1], nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
    )
    y = torch.randint(4, (256,))
    x = 0.3 * torch.randn(256, 1, 16, 16)
    for image, side in zip(x, y.tolist(), strict=True):
        image[0, 8 * (side // 2) :, 8 * (side % 2) :][2:6, 2:6] += 2.0
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    found, means = (
        faithfulness(method(net, x[:16], target=y[:16].tolist(), sites="4"), net, x[:16], steps=16, baseline="zero")
        for method in (hires_cam, grad_cam)
    )
    assert found.passed and not means.passed
    assert "4 of 4" in repr(found) and "<table>" in found._repr_html_()
    assert len(found.figure().axes[0].lines) == 10


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"maps": torch.rand(8, 8)}, "floating-point tensor N×h×w, not 8×8"),
        ({"maps": [1]}, "not a list"),
        ({"maps": torch.full((1, 8, 8), torch.nan)}, "contain NaN or Inf"),
        ({"maps": torch.rand(2, 8, 8)}, "one map per sample"),
        ({"x": torch.rand(1, 12)}, "no images N×C×H×W to erase: it is 1×12"),
        (
            {"x": torch.zeros(1, 3, 12, 12, dtype=torch.uint8)},
            "images in x are torch.uint8, but only floating-point",
        ),
        ({"baseline": "black"}, "baseline must be 'blur', 'zero', 'mean' or a tensor"),
        ({"baseline": torch.rand(2, 7)}, "baseline 2×7 cannot be broadcast to images 1×3×12×12"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"target": 9}, "target 9 is out of range"),
    ],
)
def test_bad_input(change, said):
    given = {"maps": torch.rand(1, 8, 8), "model": Classifier(), "x": torch.rand(1, 3, 12, 12)} | change
    with pytest.raises(ValueError, match=said):
        faithfulness(**given)
