"""The cost of a heat map, here and in other libraries, against what it takes by hand.

By hand, a gradient method is a forward and a backward to the layer; eigen_cam is a forward without a graph and
`torch.linalg.eigh` of the smaller Gram matrix of the channels, in the model's own precision.

ResNet-50, `layer4`, 224 px. The gradient methods and eigen_cam run on a batch of 16. The two methods that run the model
once per channel get one image, and on a CPU ResNet-18, since a whole batch would take an hour. Each round times every
candidate once, in another order; the table shows the median over rounds, and a target is met if the 95 % interval of
the median ratio reaches it. On a CPU, the time is that of the processor, with one thread. Each candidate has its own
copy of the model, since some leave hooks on it. A library that is missing or fails is left out, by name.

    python benchmarks/explain.py [--device cuda] [--rounds N] [--methods grad_cam eigen_cam]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from copy import deepcopy
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from statistics import median
from typing import Any

import torch
from capture import let_torchvision_import, verdict
from harness import interleaved, machine, markdown, median_interval, settle
from torch import Tensor, nn

import torchhook

LAYER = "layer4"
BATCH, SIZE = 16, 224
TARGETS = {"grad_cam": 1.0, "eigen_cam": 1.1}  # times the hand-written version
TARGET = 1.05  # of the others
FEWER = 2.0  # times as fast as each peer, for methods that run the model once per channel
PEERS = {
    "grad_cam": "GradCAM",
    "grad_cam_pp": "GradCAMPlusPlus",
    "hires_cam": "HiResCAM",
    "layer_cam": "LayerCAM",
    "x_grad_cam": "XGradCAM",
    "eigen_cam": "EigenCAM",
    "score_cam": "ScoreCAM",
    "ablation_cam": "AblationCAM",
}
SLOW, SLOW_ROUNDS = ("score_cam", "ablation_cam"), 3
MODULES = {"grad-cam": "pytorch_grad_cam", "captum": "captum"}
OURS, GRAD_CAM, CAPTUM = "torchhook", "pytorch-grad-cam", "Captum"
BY_HAND, LEANEST = "by hand", "no graph before the layer"

Call = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--methods", nargs="+", choices=PEERS, default=list(PEERS))
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "processor time of one thread"
    print(f"{machine()}, {where}, torch {torch.__version__}{versions('grad-cam', 'captum')}\n")
    let_torchvision_import()
    from torchvision.models import resnet18, resnet50

    torch.manual_seed(0)
    model, x = resnet50().eval().to(device), torch.rand(BATCH, 3, SIZE, SIZE, device=device)
    verdicts: list[str] = []
    if fast := {method: calls(method, model, x) for method in options.methods if method not in SLOW}:
        rows, verdicts = measured(fast, options.rounds, device)
        print(f"{table(f'ResNet-50, batch {BATCH}', rows)}\n")
    if device.type == "cpu":
        model = resnet18().eval()
    if slow := {method: calls(method, model, x[:1]) for method in options.methods if method in SLOW}:
        rows, more = measured(slow, SLOW_ROUNDS, device)
        print(f"{table('ResNet-18, 1 image' if device.type == 'cpu' else 'ResNet-50, 1 image', rows)}\n")
        verdicts += more
    print("\n".join(verdicts))


def versions(*packages: str) -> str:
    return "".join(f", {package} {version(package)}" for package in packages if find_spec(MODULES[package]))


def calls(method: str, model: nn.Module, x: Tensor) -> dict[str, Call]:
    """One call per candidate that has the method, on the predicted classes."""
    with torch.no_grad():
        classes = model(x).argmax(1)
    mine, own = getattr(torchhook.explain, method), deepcopy(model)
    found: dict[str, Call] = {OURS: lambda: mine(own, x, classes, LAYER)}
    bare = deepcopy(model)
    if method == "eigen_cam":
        found[BY_HAND] = lambda: components_by_hand(bare, x)
    elif method not in SLOW:
        found[BY_HAND] = lambda: by_hand(bare, x, classes)
        found[LEANEST] = lambda: leanest(bare, x, classes)
    try:
        found[GRAD_CAM] = of_grad_cam(PEERS[method], deepcopy(model), x, classes)
        if method == "grad_cam":
            found[CAPTUM] = of_captum(deepcopy(model), x, classes)
    except ImportError as error:
        print(f"left out of {method}: {error}", file=sys.stderr)
    return found


def by_hand(model: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
    """The gradient at the layer, written by hand."""
    seen: list[Tensor] = []
    handle = model.get_submodule(LAYER).register_forward_hook(lambda module, args, output: seen.append(output))
    score = model(x).gather(1, classes[:, None]).sum()
    handle.remove()
    (gradient,) = torch.autograd.grad(score, seen)
    return gradient


def components_by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """The first principal component of the layer's channels, written by hand."""
    seen: list[Tensor] = []
    handle = model.get_submodule(LAYER).register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        model(x)
        handle.remove()
        values = seen[0].flatten(2)
        centred = values - values.mean(2, keepdim=True)
        squares, vectors = torch.linalg.eigh(centred.mT @ centred)  # positions × positions: there are more channels
        return vectors[..., -1] * squares[:, -1:].sqrt()


def leanest(model: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
    """The same without a graph before the layer."""
    leaves: list[Tensor] = []

    def begin(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        torch.set_grad_enabled(True)
        return leaves[0].clone()

    handle = model.get_submodule(LAYER).register_forward_hook(begin)
    with torch.no_grad():
        score = model(x).gather(1, classes[:, None]).sum()
    handle.remove()
    (gradient,) = torch.autograd.grad(score, leaves)
    return gradient


def of_grad_cam(name: str, model: nn.Module, x: Tensor, classes: Tensor) -> Call:
    import pytorch_grad_cam
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    cam = getattr(pytorch_grad_cam, name)(model, [model.get_submodule(LAYER)])
    targets = [ClassifierOutputTarget(one) for one in classes.tolist()]

    def call() -> object:
        with redirect_stderr(StringIO()):  # its progress bar
            return cam(input_tensor=x, targets=targets)

    return call


def of_captum(model: nn.Module, x: Tensor, classes: Tensor) -> Call:
    from captum.attr import LayerGradCam

    cam = LayerGradCam(model, model.get_submodule(LAYER))
    return lambda: cam.attribute(x, classes)


def measured(methods: dict[str, dict[str, Call]], rounds: int, device: torch.device) -> tuple[list[Any], list[str]]:
    """Rows of seconds and ratios, and whether the targets are met."""
    settle()

    def sample(call: Call) -> float:
        clock = time.process_time if device.type == "cpu" else time.perf_counter
        start = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    samples = {(method, name): call for method, found in methods.items() for name, call in found.items()}
    for call in samples.values():  # the first call fills caches
        sample(call)
    seconds = interleaved({key: lambda call=call: sample(call) for key, call in samples.items()}, rounds)
    rows, verdicts = [], []
    for method, found in methods.items():
        took = {name: seconds[method, name] for name in found}
        ratio = {name: median(a / b for a, b in zip(took[name], took[OURS], strict=True)) for name in found}
        rows.append((method, {name: median(values) for name, values in took.items()}, ratio))
        if BY_HAND in found:
            shares = [a / b for a, b in zip(took[OURS], took[BY_HAND], strict=True)]
            target = TARGETS.get(method, TARGET)
            least, most = median_interval(shares)
            what = f"{method}: {median(shares):.3f} ({least:.3f} to {most:.3f})× by hand"
            verdicts.append(verdict(what, f"{target}×", least <= target))
        for peer in {GRAD_CAM, CAPTUM} & set(found):
            least = FEWER if method in SLOW else 1.0
            share = 1 / ratio[peer]
            what = f"{method}: {share:.3f}× the time of {peer}"
            verdicts.append(verdict(what, f"{1 / least}×", share <= 1 / least))
    return rows, verdicts


def table(title: str, rows: list[Any]) -> str:
    names = [
        name for name in (OURS, BY_HAND, LEANEST, GRAD_CAM, CAPTUM) if any(name in seconds for _, seconds, _ in rows)
    ]
    header = [title, *names]
    lines = [
        [method, *(f"{seconds[name] * 1e3:,.1f} ms ({ratio[name]:.2f}×)" if name in seconds else "" for name in names)]
        for method, seconds, ratio in rows
    ]
    return markdown(header, lines)


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    main()
