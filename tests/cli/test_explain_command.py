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
    assert f"{method} of '0' (Identity): 1×64×64" in done.out
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
    assert (done.code, done.err) == (0, "") and "grad_cam of '1' (ReLU): 1×6×6" in done.out


def test_what_all_channels_have_in_common_needs_no_class(command, folder):
    done = run(command, "looking:segments", "cat.jpg", "--size", "8", "--method", "eigen_cam")
    assert (done.code, done.err) == (0, "") and "eigen_cam of '1' (ReLU): 1×6×6" in done.out


def test_a_call_of_several(command, folder):
    done = run(command, "looking:Bright", "cat.jpg", "--layer", "see", "--call", "1", "--size", "8", "--target", "1")
    assert done.code == 0 and "of 'see' (Identity) (call 1 of 2)" in done.out and (folder / "cam.png").exists()


# --- weights from a file


TRAINED = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(64, 5))

def dark():
    model = net()
    nn.init.zeros_(model[5].weight)
    return model
"""


@pytest.fixture
def trained(folder, monkeypatch):
    """The state of a model that has learned something."""
    (folder / "trained.py").write_text(TRAINED)
    monkeypatch.syspath_prepend(folder)
    from trained import net

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        x = torch.randn(8, 3, 16, 16)
        loss = torch.nn.functional.cross_entropy(model(x), torch.randint(5, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


def drawn(command, *args):
    return run(command, "trained:net", "cat.jpg", "--size", "32", "--target", "1", *args)


def test_untrained_weights_are_said_in_one_line(command, trained):
    done = drawn(command)
    assert done.code == 0 and done.err.count("\n") == 1 and done.err.startswith("torchhook: warning: the weights of")
    assert "look untrained" in done.err and "--weights FILE" in done.err


@pytest.mark.parametrize("kind", ["safetensors", "plain", "checkpoint", "model", "parallel", "compiled in lightning"])
def test_weights_of_a_file_are_used(command, folder, trained, kind):
    from safetensors.torch import save_file

    if kind == "safetensors":
        save_file(trained, file := folder / "net.safetensors")
    else:
        inside = {
            "plain": trained,
            "checkpoint": {"epoch": 3, "state_dict": trained, "optimizer": {"lr": 0.1}},
            "model": {"model": trained, "args": [1, 2]},
            "parallel": {f"module.{key}": value for key, value in trained.items()},
            "compiled in lightning": {"state_dict": {f"model._orig_mod.{k}": v for k, v in trained.items()}},
        }[kind]
        torch.save(inside, file := folder / "net.pt")
    done = drawn(command, "--weights", str(file))
    assert (done.code, done.err) == (0, "")


def test_the_map_is_that_of_the_loaded_model(command, folder, trained, monkeypatch):
    torch.save(trained, folder / "net.pt")
    made = []
    monkeypatch.setattr("torchhook.explain.grad_cam", lambda net, *rest, **options: made.append(net))
    drawn(command, "--weights", "net.pt")
    assert all(made[0].state_dict()[key].equal(value) for key, value in trained.items())


def test_what_does_not_fit_is_said_in_one_line(command, folder, trained):
    odd = {key: value for key, value in trained.items() if key != "0.bias"} | {"head.weight": torch.ones(3)}
    odd["5.weight"] = torch.ones(7, 64)
    torch.save(odd, folder / "odd.pt")
    done = drawn(command, "--weights", "odd.pt")
    assert done.code == 0 and done.err == (
        "torchhook: --weights: 7 of 9 tensors loaded; 1 missing (0.bias), 1 of another shape (5.weight), 1 unexpected"
        " (head.weight)\n"
    )


class Hostile:
    def __reduce__(self):
        return open, ("was_here", "w")


@pytest.mark.parametrize(
    ("name", "write", "why"),
    [
        ("evil.pt", lambda file: torch.save({"state_dict": Hostile()}, file), "could run code"),
        ("old.pt", lambda file: torch.save(Hostile(), file, _use_new_zipfile_serialization=False), "could run code"),
        ("raw.pkl", lambda file: file.write_bytes(__import__("pickle").dumps(Hostile())), "is refused"),
        ("whole.pt", lambda file: torch.save(torch.nn.Linear(2, 2), file), "save model.state_dict()"),
        ("short.safetensors", lambda file: file.write_bytes(b"\xff" * 9), "cannot read"),
        ("empty.pt", lambda file: file.write_bytes(b""), "cannot read"),
        ("number.pt", lambda file: torch.save({"epoch": 3}, file), "has no state dict"),
        ("other.pt", lambda file: torch.save({"a": torch.ones(2)}, file), "none of the 1 tensors"),
        ("nowhere.pt", lambda file: None, "there is no file"),
        ("endless.pt", lambda file: torch.save(endless(), file), "has no state dict"),
        ("meta.pt", lambda file: torch.save({"0.weight": torch.ones(2, device="meta")}, file), "has no state dict"),
        ("sparse.pt", lambda file: torch.save({"0.weight": torch.eye(2).to_sparse()}, file), "has no state dict"),
    ],
)
def test_a_hostile_or_broken_file_of_weights_is_refused(command, folder, trained, name, write, why):
    write(folder / name)
    done = drawn(command, "--weights", name)
    assert done.code == 2 and why in done.said and "Traceback" not in done.err
    assert not (folder / "was_here").exists() and not (folder / "cam.png").exists()


def endless():
    """A checkpoint that has itself inside."""
    first, second = {"epoch": torch.ones(1)}, {}
    first["state_dict"], second["model"] = second, first
    return first


def test_keys_of_weights_are_text_however_long_and_odd(command, folder, trained):
    torch.save({"module." * 2000 + key: value for key, value in trained.items()}, folder / "deep.pt")
    assert drawn(command, "--weights", "deep.pt")[::2] == (0, "")
    torch.save({**trained, "\x1b]0;title\x07" + 999 * "x": torch.ones(1)}, folder / "odd.pt")
    done = drawn(command, "--weights", "odd.pt")
    assert done.code == 0 and len(done.err) < 300 and "1 unexpected (]0;titlexxx" in done.err


def test_weights_that_are_not_finite_are_said_and_not_drawn(command, folder, trained):
    torch.save({**trained, "0.weight": trained["0.weight"] * torch.nan}, folder / "nan.pt")
    done = drawn(command, "--weights", "nan.pt")
    assert done.code == 2 and "the map has NaN or Inf" in done.err and not (folder / "cam.png").exists()


@pytest.mark.parametrize("method", ["grad_cam", "ablation_cam"])
def test_an_empty_map_is_a_warning_and_no_picture(command, folder, trained, method):
    done = run(command, "trained:dark", "cat.jpg", "--size", "32", "--target", "1", "--method", method)
    assert done.code == 2 and "torchhook: warning: " in done.err and "there is nothing on its map" in done.err
    assert "no image was written" in done.err and not (folder / "cam.png").exists()
