"""Do networks of different kinds learn the same thing?

A perceptron, a convolutional network and a transformer learn the same digits. One interface looks into all of them:
`capture` shows the outputs of their layers, and `compare.cka` how similarly two layers represent the data.
Needs scikit-learn in addition to '.[all]'.
"""

import copy
import warnings
from itertools import combinations
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th

OUTPUT = Path("examples-output")


class RowTransformer(nn.Module):
    """A transformer whose tokens are the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, 48), nn.Parameter(torch.randn(8, 48) / 10)
        self.block = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
        self.pool, self.head = nn.Flatten(), nn.Linear(8 * 48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.block(self.embed(x.squeeze(1)) + self.place)))


def networks() -> dict[str, nn.Module]:
    layers = [nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    maps = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    convolutional = nn.Sequential(*maps, nn.Flatten(), nn.Linear(16 * 4 * 4, 10))
    return {"perceptron": nn.Sequential(*layers), "convolutional": convolutional, "transformer": RowTransformer()}


def train(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(6):
        for batch in torch.randperm(len(images)).split(64):
            loss = F.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help such a small network
    warnings.filterwarnings("ignore", "a tap is inside")  # fused layers are not used, which is fine
    OUTPUT.mkdir(exist_ok=True)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    pixels = images.float().view(-1, 1, 8, 8) / 16
    nets = networks()
    untrained = copy.deepcopy(nets)
    for name, net in nets.items():
        train(net, pixels[:1300], labels[:1300])
        with th.capture(net) as acts, torch.no_grad():
            right = (net(pixels[1300:]).argmax(1) == labels[1300:]).float().mean()
        print(f"--- {name}: {right:.1%} right\n{acts}\n")

    unseen, answers = list(pixels[1300:].split(100)), []
    for a, b in combinations(nets, 2):
        likeness = th.compare.cka(nets[a], nets[b], unseen)
        before = th.compare.cka(untrained[a], untrained[b], unseen)
        likeness.figure().savefig(OUTPUT / f"{a}_{b}.png")
        ends = likeness.matrix[-1, -1], before.matrix[-1, -1]
        answers.append(f"{ends[0]:.2f} for {a} and {b} (untrained {ends[1]:.2f})")
    print(f"Answer: the similarity of the last layers (1 is identical) is {', '.join(answers)}.")


if __name__ == "__main__":
    main()
