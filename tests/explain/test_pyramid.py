"""Feature pyramids: known answers, the detectors of torchvision, boxes that follow what is resized and padded."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specimens import hooks_of
from torchhook import SelectionError
from torchhook.explain.pyramids import pyramid

pytestmark = pytest.mark.usefixtures("one_thread")


class Levels(nn.Module):
    """Averages of the image, at strides of 4, 8 and so on."""

    def __init__(self, strides=(4, 8, 16), scales=(1.0, 1.0, 1.0), kind=dict):
        super().__init__()
        self.strides, self.scales, self.kind = strides, scales, kind

    def forward(self, x):
        maps = {f"p{s}": F.avg_pool2d(x, s) * k for s, k in zip(self.strides, self.scales, strict=True)}
        return maps if self.kind is dict else self.kind(maps.values())


class Detector(nn.Module):
    """A body that gives a pyramid too, and a head after the real one."""

    def __init__(self):
        super().__init__()
        self.head, self.neck, self.body = nn.Conv2d(3, 2, 1), Levels(), Levels((2, 4), (1.0, 1.0), list)

    def forward(self, x):
        self.body(x)
        return self.head(self.neck(x)["p4"])


def resizing(detector):
    """The transform of `detector` without its normalisation, and the image itself as the first of its levels."""
    detector.transform.image_mean, detector.transform.image_std = [0.0] * 3, [1.0] * 3
    detector.backbone = nn.Sequential(Levels((8, 16), (1.0, 1.0)))
    return detector


def retinanet(**options):
    from torchvision.models.detection import retinanet_resnet50_fpn

    return retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3, **options)


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_maps_that_are_one_inside_the_box(kind):
    x = torch.zeros(2, 3, 128, 128)
    x[0, :, 16:32, 48:64] = 1.0
    boxes = [torch.tensor([[48, 16, 64, 32]]), torch.empty(0, 4)]
    found = pyramid(Levels(kind=kind), x, boxes)
    assert [level.name for level in found] == (["p4", "p8", "p16"] if kind is dict else ["0", "1", "2"])
    for level, stride in zip(found, (4, 8, 16), strict=True):
        assert level.size == (128 // stride, 128 // stride) and level.stride == (stride, stride)
        assert level.small == pytest.approx(1.0) and level.background == pytest.approx(0.0, abs=1e-7)
        assert level.strength == pytest.approx(256 / (2 * 128 * 128))
        assert level.rms == pytest.approx((256 / (2 * 128 * 128)) ** 0.5)
        assert level.medium is None and level.large is None and level.dead == 0.0
    assert found.objects == {"small": 1, "medium": 0, "large": 0} and not found.weak


def test_a_cell_that_is_covered_in_part_counts_in_part():
    x = torch.zeros(1, 1, 64, 64)
    x[..., 0:16, 0:16] = 1.0  # one cell of the coarsest
    found = pyramid(Levels(), x, [[[8.0, 0.0, 24.0, 16.0]]])  # half of that cell, and half of the next
    assert [level.small for level in found] == pytest.approx([0.5, 0.5, 0.5])


def test_sizes_are_those_of_coco():
    x = torch.zeros(1, 1, 256, 256)
    x[..., :, :128] = torch.linspace(0, 1, 256)[:, None]
    boxes = torch.tensor([[0.0, 0, 31, 32], [0, 0, 32, 32], [0, 0, 96, 95], [0, 0, 96, 96]])
    found = pyramid(Levels((1, 2), (1.0, 1.0)), x, [boxes])
    assert found.objects == {"small": 1, "medium": 2, "large": 1}
    ramp = torch.linspace(0, 1, 256)
    assert found[0].small == pytest.approx(ramp[:32].mean().item(), rel=1e-4)
    assert found[0].medium == pytest.approx((ramp[:32].mean() + ramp[:95].mean()).item() / 2, rel=1e-4)
    assert found[0].large == pytest.approx(ramp[:96].mean().item(), rel=1e-4)


def test_the_last_pyramid_in_execution_order_is_taken_and_any_other_by_name():
    model, x = Detector().train(), torch.rand(2, 3, 64, 64)
    before = hooks_of(model)
    assert pyramid(model, x).layer == "neck"
    assert pyramid(model, list(x), sites="body").layer == "body"
    assert hooks_of(model) == before and model.training
    assert "dead" in repr(pyramid(model, x)) and "background" not in repr(pyramid(model, x))


def test_dead_channels():
    x = torch.rand(1, 4, 64, 64)
    x[:, 2] = 3.0
    assert pyramid(Levels(), x)[0].dead == 0.25
    assert pyramid(Levels((32, 64), (1.0, 1.0)), x)[1].dead is None  # one place


@pytest.mark.parametrize("size", [(100, 140), (140, 100)])
def test_boxes_follow_what_a_detector_does_to_an_image(size):
    height, width = size
    detector = resizing(retinanet(min_size=192, max_size=1000))
    image, other = torch.zeros(3, height, width), torch.zeros(3, 60, 60)
    image[:, 50:90, 30:70] = 1.0
    boxes = [torch.tensor([[30.0, 50.0, 70.0, 90.0]]), torch.empty(0, 4)]
    found = pyramid(detector, [image, other], boxes)
    assert found.layer == "backbone" and detector.training
    fine = found[0]
    assert fine.medium > 0.9 and fine.background < 0.01  # only the edges are blurred
    moved = pyramid(detector, [image, other], [torch.tensor([[50.0, 30.0, 90.0, 70.0]]), torch.empty(0, 4)])
    assert moved[0].medium < 0.5  # x and y are told apart


def test_padding_is_no_part_of_the_images():
    detector = resizing(retinanet(min_size=64, max_size=256))
    ones = [torch.ones(3, 64, 64), torch.ones(3, 64, 250)]  # the first is padded to the size of the second
    found = pyramid(detector, ones, [torch.tensor([[0.0, 0.0, 32.0, 32.0]]), torch.empty(0, 4)])
    # the network sees 64×256, of which the second has 250 columns: its last cells are part padding
    assert found[0].strength == pytest.approx(1.0, abs=0.01) and found[0].background == pytest.approx(1.0, abs=0.01)


def test_a_weak_level_is_named():
    detector = retinanet(min_size=128, max_size=128).eval()
    images = [torch.rand(3, 128, 128), torch.rand(3, 96, 128)]
    assert pyramid(detector, images).weak == []
    with torch.no_grad():
        for parameter in detector.backbone.fpn.layer_blocks[1].parameters():
            parameter.mul_(0.01)
    found = pyramid(detector, images)
    assert [level.name for level in found] == ["0", "1", "2", "p6", "p7"]
    assert [level.name for level in found.weak] == ["1"]
    assert "Weak levels: '1' has 0.0" in repr(found)


def test_of_two_levels_one_is_weak():
    assert [level.name for level in pyramid(Levels((2, 4), (0.01, 1.0)), torch.rand(1, 1, 8, 8)).weak] == ["p2"]


def test_a_level_that_is_not_a_number_is_weak():
    found = pyramid(Levels(scales=(1.0, float("nan"), 1.0)), torch.rand(1, 1, 64, 64))
    assert [level.name for level in found.weak] == ["p8"]


def test_objects_are_clearest_where_they_stand_out_of_the_noise_and_not_where_there_is_next_to_none():
    torch.manual_seed(0)
    x = torch.zeros(1, 2, 64, 64)
    x[:, 0], x[:, 1, 0, 0] = 0.1 * torch.rand(64, 64), 1e-2  # the second has one faint cell, and else nothing
    x[:, 0, 16:32, 16:32], x[:, 1, 16:32, 16:32] = 1.0, 3e-4

    class Two(nn.Module):
        def forward(self, x):
            return {"fine": x[:, :1], "coarse": F.avg_pool2d(x[:, 1:], 2), "dead": 0 * F.avg_pool2d(x[:, :1], 4)}

    found = pyramid(Two(), x, [torch.tensor([[16.0, 16.0, 32.0, 32.0]])])
    fine, coarse, dead = found
    assert coarse.small / coarse.background > 4 * fine.small / fine.background > 4  # by a ratio it would win
    noise = x[0, 0].flatten()[(x[0, 0] != 1.0).flatten()].double()
    assert fine.spread == pytest.approx(noise.std(correction=0).item(), rel=1e-3)
    assert fine.contrast("small") == pytest.approx((1 - noise.mean().item()) / fine.spread, rel=1e-3)
    assert fine.contrast("small") > 10 > coarse.contrast("small") > 0 == dead.contrast("small")
    assert "1 small object: clearest at 'fine'" in found.verdict and "0 (0.0 σ)" in repr(found)


def test_a_level_that_is_not_a_number_hides_no_other():
    x = torch.zeros(1, 1, 64, 64)
    x[..., 16:32, 16:32] = 1.0
    found = pyramid(Levels(scales=(float("nan"), 1.0, 0.0)), x, [[[16.0, 16.0, 32.0, 32.0]]])
    assert "1 small object: clearest at 'p8'" in found.verdict


def test_objects_that_stand_out_nowhere_are_told():
    found = pyramid(Levels(scales=(0.0, float("nan"), 0.0)), torch.rand(1, 1, 64, 64), [[[0.0, 0.0, 16.0, 16.0]]])
    assert "1 small object: nowhere clearly above background" in found.verdict
    everywhere = pyramid(Levels(), torch.rand(1, 1, 64, 64), [[[0.0, 0.0, 64.0, 64.0]]])
    assert "1 medium object: there is no background to compare with." in everywhere.verdict


@pytest.mark.parametrize("name", ["fcos_resnet50_fpn", "fasterrcnn_mobilenet_v3_large_320_fpn"])
def test_detectors_whose_later_ops_are_not_needed(name):
    from torchvision.models import detection

    detector = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64)
    detector.head = detector.roi_heads = None  # nothing after the pyramid is run
    before = hooks_of(detector)
    found = pyramid(detector, torch.rand(1, 3, 64, 64), [torch.tensor([[0.0, 0, 20, 20]])])
    assert found.layer == "backbone" and len(found) >= 3 and hooks_of(detector) == before
    assert all(level.small is not None for level in found)


def test_a_backbone_by_itself():
    detector = retinanet(min_size=64)
    assert pyramid(detector.backbone, torch.rand(1, 3, 64, 64)).layer == ""
    assert pyramid(detector, torch.rand(1, 3, 64, 64), sites="backbone.body").layer == "backbone.body"


def test_names_are_escaped():
    class Odd(nn.Module):
        def forward(self, x):
            return {"<b>": x, "&": F.avg_pool2d(x, 2)}

    shown = pyramid(Odd(), torch.rand(1, 1, 8, 8))._repr_html_()
    assert "&lt;b&gt;" in shown and "<b>" not in shown


@pytest.mark.parametrize(
    ("images", "boxes", "options", "said"),
    [
        (torch.rand(3, 8, 8), None, {}, r"pass a single image as images\[None\]"),
        ([torch.rand(3, 8, 8), torch.rand(3, 8, 9)], None, {}, "images of one size"),
        (torch.rand(1, 3, 64, 64), [], {}, "one tensor .k, 4. for each of the 1 images"),
        (torch.rand(1, 3, 64, 64), [torch.rand(2, 3)], {}, r"image 0 must have shape \[k, 4\]"),
        (torch.rand(1, 3, 64, 64), [torch.tensor([[70.0, 0, 80, 10]])], {}, "no area inside image 0"),
        (torch.rand(1, 3, 64, 64), [torch.tensor([[9.0, 0, 8, 10]])], {}, "x0, y0, x1, y1"),
        (torch.rand(1, 3, 64, 64), None, {"sites": "head"}, "'head' returned 1×2×16×16, which is not a pyramid"),
        (torch.rand(1, 3, 64, 64), None, {"sites": "nick"}, "nearest: 'neck'"),
    ],
)
def test_bad_input(images, boxes, options, said):
    with pytest.raises(ValueError, match=said):
        pyramid(Detector(), images, boxes, **options)


def test_a_model_without_a_pyramid():
    with pytest.raises(SelectionError, match="no module of this Sequential returned"):
        pyramid(nn.Sequential(nn.ReLU()), torch.rand(1, 3, 8, 8))
