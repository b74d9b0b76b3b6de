"""What a heat map is, and the steps from it to a picture."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from torchhook.explain.heat import Heat


def heat(maps, target=None, **options):
    options = {"layer": "layer4", "call": 0, "method": "grad_cam", "size": (6, 8), **options}
    return Heat(maps, target or list(range(len(maps))), **options)


def test_each_step_gives_a_new_heat_and_leaves_the_old_one_alone():
    maps = torch.tensor([[[-2.0, 0.0], [1.0, 2.0]], [[3.0, 3.0], [3.0, 3.0]]])
    raw = heat(maps.clone())
    assert raw.positive().maps.tolist() == [[[0, 0], [1, 2]], [[3, 3], [3, 3]]]
    assert raw.normalized().maps.tolist() == [[[0, 0.5], [0.75, 1]], [[0, 0], [0, 0]]]  # no NaN where all is the same
    large = raw.at_input_size()
    assert torch.equal(large.maps, F.interpolate(maps[None], (6, 8), mode="bilinear", align_corners=False)[0])
    assert torch.equal(raw.maps, maps)
    assert (large.target, large.layer, large.call, large.method, large.size) == (
        [0, 1],
        "layer4",
        0,
        "grad_cam",
        (6, 8),
    )


def test_some_samples_keep_their_targets():
    whole = heat(torch.rand(4, 2, 3), [7, 8, 9, 7])
    assert len(whole) == 4 and [one.target for one in whole] == [[7], [8], [9], [7]]
    assert torch.equal(whole[-1].maps, whole.maps[3:]) and whole[1:3].target == [8, 9]
    with pytest.raises(IndexError):
        whole[4]


def test_it_tells_what_it_is():
    maps = torch.zeros(2, 7, 7)
    assert repr(heat(maps, [282, 282])) == "grad_cam of 'layer4': 2×7×7, target 282"
    assert repr(heat(maps, [1, 2], call=1, calls=3)) == "grad_cam of 'layer4' (call 1 of 3): 2×7×7, target 1, 2"
    assert repr(heat(maps, [3, 3], module="ReLU")) == "grad_cam of 'layer4' (ReLU): 2×7×7, target 3"
    assert repr(heat(maps, [None, None], method="eigen_cam", layer="")) == "eigen_cam of 'the model': 2×7×7"
    assert repr(heat(torch.zeros(40, 1, 2))).endswith("target " + ", ".join(map(str, range(16))) + ", …")


def test_a_notebook_shows_it_and_names_are_escaped():
    shown = heat(torch.randn(3, 5, 5), ["<script>"] * 3)
    page = shown._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page and "data:image/png;base64," in page
    assert shown._repr_png_().startswith(b"\x89PNG")
    assert heat(torch.zeros(0, 5, 5), [])._repr_png_() is None


def test_without_matplotlib_it_still_shows_what_it_is(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("matplotlib", "matplotlib.axes", "matplotlib.figure", "torchhook.plot.still"):
        monkeypatch.setitem(sys.modules, name, None)  # those that nobody has imported yet
    shown = heat(torch.randn(1, 5, 5))
    assert (
        shown._repr_png_() is None and "<p>grad_cam of &#x27;layer4&#x27;: 1×5×5, target 0</p>" in shown._repr_html_()
    )
    with pytest.raises(ImportError, match=r"torchhook\[plot\]"):
        shown.overlay(torch.rand(3, 6, 8))


def test_an_overlay_has_each_map_over_its_own_image():
    images = torch.rand(5, 3, 6, 8)
    whole = heat(torch.rand(5, 2, 3), [1, 2, 3, "$mine$", None])
    figure = whole.overlay(images)
    axes = [ax for ax in figure.axes if len(ax.images) == 2]
    assert [ax.get_title() for ax in axes] == ["1", "2", "3", r"\$mine\$", ""]
    for ax, image, maps in zip(axes, images, whole.at_input_size().maps, strict=True):
        picture, warmth = (torch.as_tensor(drawn.get_array()) for drawn in ax.images)
        assert torch.allclose(picture.float(), image.permute(1, 2, 0)) and torch.allclose(warmth.float(), maps)
    for one in (images[0], images[:1], [images[0]], images[0].permute(1, 2, 0).numpy()):
        assert len(whole[0].overlay(one).axes[0].images) == 2
    with pytest.raises(ValueError, match="pass 5 images, one per sample, not 2; heat\\[0\\] is the first sample alone"):
        whole.overlay(images[:2])


def test_what_is_no_heat_is_refused():
    with pytest.raises(ValueError, match="maps must be N×h×w, with N targets, not 2×3 with 2 targets"):
        heat(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="not 2×3×4 with 1 targets"):
        heat(torch.zeros(2, 3, 4), [1])
    with pytest.raises(ValueError, match="was not an image"):
        heat(torch.zeros(1, 3, 4), size=None).at_input_size()


def test_heat_needs_torch_alone():
    code = "import sys, torchhook.explain.heat; print([m for m in ('matplotlib', 'PIL') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
