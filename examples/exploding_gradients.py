"""Where do the gradients explode, and what helps?

Sixteen layers whose initial weights are twice too large: the gradient grows with every layer on its way back to the
input. Three trainings on handwritten digits: unchanged, with clipped gradients, and with He initialisation.
Needs scikit-learn in addition to '.[all]'.
"""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th

OUTPUT = Path("examples-output")
DEPTH, WIDTH, STEPS = 16, 64, 150


def network(scale: float) -> nn.Sequential:
    """A network with `scale` times the weights that preserve the size of gradients."""
    torch.manual_seed(0)
    hidden = [part for _ in range(DEPTH - 1) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    net = nn.Sequential(*hidden, nn.Linear(WIDTH, 10))
    for layer in hidden[::2]:
        nn.init.kaiming_normal_(layer.weight)
        layer.weight.data *= scale
    return net


def batches() -> list[tuple[Tensor, Tensor]]:
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32) / 16
    return list(zip(pixels.split(64), torch.tensor(labels).split(64), strict=True))


def train(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    """The mean loss of the last epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for step in range(STEPS):
        images, labels = data[step % len(data)]
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-len(data) :]) / len(data)


def growth(net: nn.Module, data: list[tuple[Tensor, Tensor]], name: str) -> float:
    """How many times larger the gradient is after the first layer than after the second to last."""
    with th.measure(net, nn.Linear, grads=True) as stats:
        F.cross_entropy(net(data[0][0]), data[0][1]).backward()
    th.plot.gradient_flow(stats).savefig(OUTPUT / f"gradient_flow_{name}.png")
    return stats["0", "grad_output"].l2 / stats[str(2 * DEPTH - 4), "grad_output"].l2


def main() -> None:
    torch.set_num_threads(1)  # more threads do not help such a small network
    OUTPUT.mkdir(exist_ok=True)
    data, sick, healthy = batches(), network(2.0), network(1.0)
    print(report := th.diagnose(sick, data, F.cross_entropy, parts=["rest", "pass"]))
    th.render.save(report, OUTPUT / "exploding_gradients.html")
    times, usual = (growth(net, data, name) for net, name in ((sick, "sick"), (healthy, "healthy")))
    losses = {"as it is": train(network(2.0), data)}
    with th.clip_gradients(clipped := network(2.0), norm=0.1):
        losses["clipped"] = train(clipped, data)
    losses["with weights of the right scale"] = train(healthy, data)
    ends = ", ".join(f"{loss:.3g} {how}" for how, loss in losses.items())
    print(
        f"Answer: back to the first layer the gradient grows {times:,.0f}-fold (healthy: {usual:.2g}-fold), because"
        f" {report.findings[0].message}; the loss ends at {ends}."
    )


if __name__ == "__main__":
    main()
