"""Train a small network on handwritten digits, and look inside while it learns.

Takes some seconds, needs no GPU and downloads no data.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th

SHADES = " ·:-=+*#%@"


class Net(nn.Module):
    """Two convolutions and a classifier, with in-place ReLUs as everybody writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        x = self.pool(self.relu(self.conv2(x)))
        return self.head(x.flatten(1))


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    net = Net()
    train(net, images[:1500], labels[:1500])
    accuracy = (net(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"accuracy on {len(images) - 1500} digits it has not seen: {accuracy:.1%}\n")
    look_inside(net, images[1500:1532], labels[1500:1532])


def train(net: nn.Module, images: Tensor, labels: Tensor, epochs: int = 6) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    windows = []
    with th.measure(net, updates=True, optimizer=optimizer) as stats:
        for epoch in range(1, epochs + 1):
            for batch in torch.randperm(len(images)).split(50):
                loss = F.cross_entropy(net(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}/{epochs}  loss {loss.item():.3f}")
            windows.append(stats.snapshot())
            stats.reset()
    print("\nHow far a step moved each layer (the update's norm over the weight's), epoch by epoch:\n")
    for layer in ("conv1", "conv2", "head"):
        ratios = [window[f"{layer}.weight", "update_ratio"].mean for window in windows]
        print(f"  {layer:<6} {'  '.join(f'{ratio:.2%}' for ratio in ratios)}")
    print(
        f"\nZeros after the ReLU, in the first epoch and in the last: {windows[0]['relu'].zero_fraction:.0%},", end=" "
    )
    print(f"{windows[-1]['relu'].zero_fraction:.0%}\n")


def look_inside(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    with th.capture(net, grads=True) as acts:
        F.cross_entropy(net(images), labels).backward()

    print("What flowed through the network, in execution order:\n")
    print(acts)

    before, after = acts["conv1"].output[0], acts["relu"].outputs[0][0]
    print(f"\nA {labels[0]} and two of the features that conv1 finds in it. The ReLU overwrites conv1's output in")
    print(f"place; it was recorded as it flowed: the lowest value is {before.min():.2f}, later {after.min():.2f}.\n")
    strongest = before.flatten(1).std(1).topk(2).indices
    print(side_by_side(images[0, 0], *before[strongest]))

    print("\nHow strongly each layer's output still moves the loss (mean |gradient|):\n")
    for path in acts:
        for call, gradient in enumerate(acts[path].grads):
            size = gradient.abs().mean().item()
            print(f"  {path + (f' (call {call})' if call else ''):<16} {size:.1e}  {'█' * round(size * 2e4)}")

    print("\nWhat the accuracy on these digits loses without one channel of conv2:\n")
    with torch.no_grad():
        whole = (net(images).argmax(1) == labels).float().mean().item()
        for channel in range(0, 16, 3):
            with th.edit(net, {"conv2": th.edits.ablate(channels=channel, with_="mean")}):
                lost = whole - (net(images).argmax(1) == labels).float().mean().item()
            print(f"  channel {channel:<8} {lost:+.1%}  {'█' * round(max(lost, 0) * 200)}")

    print("\nThe classic manager, on the same network:\n")
    manager = th.HookManager(net, max_size=1)
    for layer in ("conv1", "conv2", "head"):
        manager.add(layer)
    with torch.no_grad():
        net(images)
    manager.summary()
    manager.clear_hooks()


def side_by_side(*pictures: Tensor) -> str:
    return "\n".join("   ".join(rows) for rows in zip(*map(drawn, pictures), strict=True))


def drawn(picture: Tensor) -> list[str]:
    """A picture in characters, two for each pixel, from the darkest to the brightest."""
    scaled = (picture - picture.min()) / (picture.max() - picture.min())
    return ["".join(SHADES[min(int(pixel * len(SHADES)), 9)] * 2 for pixel in row) for row in scaled]


if __name__ == "__main__":
    main()
