"""Trained in one domain, used in another: where does the network see the difference, and does closing the gap help?

The source is handwritten digits on paper; the target is digits on brick, grass and gravel, whose labels are not used.
The second training also aligns the means and covariances of the features of both domains (deep CORAL, Sun et al. 2016).
Needs scikit-learn and scikit-image in addition to '.[all]'.
"""

from __future__ import annotations

from pathlib import Path

import torch
from skimage import data as pictures
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th

OUTPUT = Path("examples-output")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    maps = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*maps, nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10))


def on_walls(images: Tensor) -> Tensor:
    """Blend each digit with its own patch of a photograph."""
    walls = torch.stack([torch.tensor(getattr(pictures, name)()) for name in ("brick", "grass", "gravel")])
    patches = walls.float().unfold(1, 8, 8).unfold(2, 8, 8).reshape(-1, 1, 8, 8) / 255
    return 0.4 * images + 0.6 * patches[torch.randint(len(patches), (len(images),))]


def train(net: nn.Module, source: Tensor, labels: Tensor, target: Tensor, weight: float) -> nn.Module:
    features = th.FeatureExtractor(net, ["7", "8"])  # attached to the graph, so that a loss on them trains the network
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(8):
        for batch in torch.randperm(len(source)).split(64):
            ours, theirs = features(source[batch]), features(target[torch.randint(len(target), (64,))])
            loss = F.cross_entropy(ours["8"], labels[batch]) + weight * apart(ours["7"], theirs["7"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net


def apart(a: Tensor, b: Tensor) -> Tensor:
    return (a.mean(0) - b.mean(0)).square().sum() + (a.T.cov() - b.T.cov()).square().sum()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help such a small network
    OUTPUT.mkdir(exist_ok=True)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    source = images.float().view(-1, 1, 8, 8) / 16
    target = on_walls(source)
    answers = []
    for name, weight in (("plain", 0.0), ("adapted", 0.1)):
        net = train(network(), source[:1300], labels[:1300], target[:1300], weight)
        spreads = th.compare.datasets(net, source[1300:].split(100), target[1300:].split(100))
        shift = th.compare.shift(net, [source[1300:]], [target[1300:]], "7")
        right = (net(target[1300:]).argmax(1) == labels[1300:]).float().mean()
        print(f"--- {name}\n{spreads}\n\n{shift}\n")
        spreads.figure().savefig(OUTPUT / f"domain_adaptation_{name}.png")
        answers.append(
            f"{name}, the network sees the domains furthest apart at {spreads.ranked()[0].path!r}, their MMD at '7' is"
            f" {shift.mmd:.3f} (p = {shift.p_value:.3f}), and {right:.1%} of the target is right"
        )
    print(f"Answer: {'; '.join(answers)}.")


if __name__ == "__main__":
    main()
