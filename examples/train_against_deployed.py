"""Good on the test set, bad in production: is it the model or the data?

`diff` compares each deployed version of a network with the trained one and tells rounding from a mistake;
`compare.datasets` compares production data with training data, layer by layer.
Needs scikit-learn in addition to '.[all]'.
"""

import copy
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th

OUTPUT = Path("examples-output")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.head = nn.Linear(32 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm1(self.conv1(x)).relu(), 2)
        return self.head(self.norm2(self.conv2(x)).relu().flatten(1))


def trained(images: Tensor, labels: Tensor) -> Net:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(4):
        for batch in torch.randperm(len(images)).split(64):
            loss = F.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval()


def ported(net: Net) -> Net:
    """A port to another framework, whose batch norm has a different default epsilon."""
    copied = copy.deepcopy(net)
    copied.norm2.eps = 1e-3
    return copied


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help such a small network
    OUTPUT.mkdir(exist_ok=True)
    data, target = load_digits(return_X_y=True)
    images, labels = torch.tensor(data, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(target)
    net = trained(images[:1400], labels[:1400])
    forms = {"bfloat16": copy.deepcopy(net).bfloat16(), "compiled": torch.compile(net, backend="aot_eager")}
    forms |= {"exported": torch.export.export(net, (images[:2],)).module(), "ported": ported(net)}
    found = {name: th.diff(net, form, images[1400:1402]) for name, form in forms.items()}
    for name, difference in found.items():
        print(f"{name}: {difference.verdict}")
    fed = images[1400:] * 16 / 255  # production divides by 255, as is usual for images; these pixels go up to 16
    spreads = th.compare.datasets(net, images[:1400].split(100), fed.split(100))
    print(spreads)
    spreads.figure().savefig(OUTPUT / "train_against_deployed.png")
    parted = ", ".join(f"{name} at {one.module}" for name, one in found.items() if not one.same)
    rights = [(net(some).argmax(1) == labels[1400:]).float().mean() for some in (images[1400:], fed)]
    furthest = spreads.ranked()[0]
    print(
        f"Answer: of {len(forms)} deployed versions these differ from the trained one: {parted}. But the trained one"
        f" itself is right on {rights[0]:.1%} of the test set and on {rights[1]:.1%} of the production data, which is"
        f" furthest off at {furthest.path!r}, by {furthest.distance:.2g} standard deviations."
    )


if __name__ == "__main__":
    main()
