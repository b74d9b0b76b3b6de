"""Why is the transformer unstable at this learning rate, and what helps: a warm-up, or norms before the layers?

A small model learns to spell. A monitored run shows how far the first step goes, a capture how much of the output
varies by letter, `explain.attention` how evenly heads attend (1: to all). Needs scikit-learn in addition to '.[all]'.
"""

import warnings
from pathlib import Path

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th

OUTPUT = Path("examples-output")
STEPS, WARMUP, LENGTH, WIDTH = 150, 50, 32, 64
TRAININGS = {"as it is": (False, False), "with a warm-up": (False, True), "with norms first": (True, False)}
REASON = "So the first steps are too large: after them, blocks that end with a norm output the same for all letters."


class Speller(nn.Module):
    def __init__(self, letters: int, norm_first: bool) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 128, **options) for _ in range(3))
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.letter(x) + self.place.weight
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def train(net: Speller, letters: Tensor, warm: bool, name: str) -> th.Monitor:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    with th.Monitor(net, optimizer, every=5, to=OUTPUT / "runs", name=name) as monitor:
        for step in range(STEPS):
            up, down = (step + 1) / WARMUP, (STEPS - step) / (STEPS - WARMUP)
            optimizer.param_groups[0]["lr"] = 0.02 * (min(up, down) if warm else 1)
            starts = torch.randint(len(letters) - LENGTH, (16,))
            rows = letters[starts[:, None] + torch.arange(LENGTH + 1)]
            loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
    return monitor


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "a tap is inside")  # fused layers are not used, which is fine
    words = "".join(getattr(datasets, f"load_{name}")().DESCR for name in ("iris", "wine", "breast_cancer", "digits"))
    letters = torch.tensor(list(map(ord, words))).unique(return_inverse=True)[1]
    share, some = letters.bincount() / len(letters), letters[: 8 * LENGTH].view(8, LENGTH)
    parts, shown = [f"guessing by how frequent letters are costs {-(share * share.log()).sum():.2f}"], {}
    for name, (norm_first, warm) in TRAININGS.items():
        torch.manual_seed(0)
        net = Speller(len(share), norm_first)
        monitor = train(net, letters, warm, name)
        with th.capture(net.eval(), "blocks.2") as acts:
            net(some)
        seen, given = th.explain.attention(net, some), acts["blocks.2"].output
        print(f"--- {name}\n{monitor.report}\n{seen}\n")
        moved = th.Run(monitor.run).series("mean", "update_ratio").values[:, 0].nanmedian()
        differs = shown[name] = (given - given.mean((0, 1))).norm() / given.norm()
        loss, entropy = sum(list(monitor.report.losses.values())[-20:]) / 20, seen[-1].entropy.nanmean()
        parts.append(f"{name}, the first step moves the weights by {moved:.1%}, in the end {differs:.0%} of the output")
        parts[-1] += f" differs by letter, the entropy is {entropy:.2f}, the loss {loss:.2f}"
    sick, *mended = shown.values()
    print(f"Answer: {'; '.join(parts)}. {REASON if sick < 0.1 < min(mended) else 'These numbers do not show why.'}")


if __name__ == "__main__":
    main()
