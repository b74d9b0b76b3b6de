"""``torchhook explain``: a picture of where a model looks, from a command line."""

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data

NET = """
import torch
from torch import nn

class Bright(nn.Module):
    # Whatever is bright speaks for class 1.
    def __init__(self):
        super().__init__()
        self.see, self.calm = nn.Identity(), nn.Identity()

    def forward(self, x):
        x = self.calm(self.calm(x))
        return torch.stack([-self.see(x).mean((1, 2, 3)), self.see(x).mean((1, 2, 3))], 1)

def flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4))

def brights():
    return nn.Sequential(nn.Identity(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def classes(channels=3, **options):
    return nn.Sequential(nn.Conv2d(channels, 4, 3, **options), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

class Keeping(nn.Sequential):
    def forward(self, x):
        torch.save(x, "given.pt")
        return super().forward(x)

def keeping():
    return Keeping(*brights())

def half():
    return classes(dtype=torch.bfloat16)

def grey():
    return classes(1)

def segments():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
"""


@pytest.fixture
def folder(project, tmp_path, monkeypatch):
    """A model and pictures, where one is."""
    (tmp_path / "looking.py").write_text(NET)
    Image.fromarray(data.chelsea()).save(tmp_path / "cat.jpg")
    spot = torch.zeros(64, 96, 3, dtype=torch.uint8)
    spot[8:24, 60:76] = 255
    Image.fromarray(spot.numpy()).save(tmp_path / "spot.png")
    (tmp_path / "text.png").write_text("no picture")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command, *args):
    return command("explain", *args)


@pytest.mark.parametrize("method", ["grad_cam", "layer_cam", "eigen_cam", "score_cam", "ablation_cam"])
def test_a_picture_is_written(command, folder, method):
    done = run(command, "looking:brights", "cat.jpg", "--method", method, "--size", "64", "--out", "seen.png")
    assert (done.code, done.err) == (0, "") and "written: seen.png" in done.out
    assert f"{method} of '0': 1×64×64" in done.out
    assert Image.open(folder / "seen.png").size[0] > 300


def test_the_middle_is_seen_in_the_right_colours(command, folder):
    plain = ["--mean", "0,0,0", "--std", "1,1,1", "--size", "64", "--target", "0"]
    done = run(command, "looking:brights", "spot.png", "--method", "hires_cam", *plain, "--out", "spot_cam.png")
    assert done.code == 0
    drawn = torch.frombuffer(bytearray(Image.open("spot_cam.png").convert("RGB").tobytes()), dtype=torch.uint8).view(
        -1, 3
    )
    assert ((drawn.int() - torch.tensor([253, 231, 37])).abs().sum(1) < 120).any()  # yellow, where the spot is


def test_a_model_is_given_colours_less_the_mean_in_units_of_the_deviation(command, folder):
    picture = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(picture).save(folder / "noise.png")
    colours = ["--mean", "0.5,0.4,0.3", "--std", "0.2,0.25,0.3"]
    assert run(command, "looking:keeping", "noise.png", "--size", "32", "--target", "0", *colours).code == 0
    wanted = (picture / 255 - [0.5, 0.4, 0.3]) / [0.2, 0.25, 0.3]
    np.testing.assert_allclose(torch.load("given.pt")[0].numpy(), wanted.transpose(2, 0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["looking:brights", "nowhere.png"], "there is no file 'nowhere.png'"),
        (["looking:brights", "text.png"], "cannot read 'text.png' as an image"),
        (["looking:brights", "cat.jpg", "--out", "cam.txt"], "'cam.txt' must end in .jpg"),
        (["looking:brights", "cat.jpg", "--out", "no/cam.png"], "there is no folder 'no'"),
        (["looking:brights", "cat.jpg", "--mean", "1,2"], "--mean: pass three numbers separated by commas"),
        (["looking:brights", "cat.jpg", "--std", "1,0,1"], "--std: colours are divided by it"),
        (["looking:brights", "cat.jpg", "--target", "3"], "target 3 is out of range: the model has 3 classes, 0 to 2"),
        (["looking:brights", "cat.jpg", "--layer", "9"], "'9'"),
        (["looking:flat", "cat.jpg", "--size", "32"], "no layer of the model has a spatial extent"),
        (["looking:Bright", "cat.jpg", "--layer", "see", "--size", "8"], "is called 2 times in a pass"),
        (["looking:nothing", "cat.jpg"], "looking has no 'nothing'"),
        (
            ["looking:grey", "cat.jpg", "--size", "8"],
            "torchhook: cannot run the model on an image of 1×3×8×8: Given groups=1, weight of size [4, 1, 3, 3],"
            " expected input[1, 3, 8, 8] to have 1 channels, but got 3 channels instead; set its height and width with"
            " --size; for a model with other inputs, use torchhook.explain from Python",
        ),
        (
            ["looking:segments", "cat.jpg", "--size", "8", "--target", "1"],
            "torchhook: the model returned 1×4×6×6, not one number per class; to choose what to explain, use"
            " torchhook.explain.grad_cam from Python with target=",
        ),
    ],
)
def test_what_is_wrong_is_told(command, folder, args, why):
    done = run(command, *args)
    assert done.code == 2 and why in done.said
    assert not list(folder.glob("cam*"))


def test_what_is_wrong_with_a_model_is_one_line(command, folder):
    for model in ("looking:grey", "looking:segments"):
        assert run(command, model, "cat.jpg", "--size", "8").err.count("\n") == 1


def test_a_model_in_half_precision(command, folder):
    done = run(command, "looking:half", "cat.jpg", "--size", "8")
    assert (done.code, done.err) == (0, "") and "grad_cam of '1': 1×6×6" in done.out


def test_what_all_channels_have_in_common_needs_no_class(command, folder):
    done = run(command, "looking:segments", "cat.jpg", "--size", "8", "--method", "eigen_cam")
    assert (done.code, done.err) == (0, "") and "eigen_cam of '1': 1×6×6" in done.out


def test_a_call_of_several(command, folder):
    done = run(command, "looking:Bright", "cat.jpg", "--layer", "see", "--call", "1", "--size", "8")
    assert done.code == 0 and "of 'see' (call 1 of 2)" in done.out and (folder / "cam.png").exists()
