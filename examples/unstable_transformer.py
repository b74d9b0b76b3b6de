"""Why is the transformer unstable at this learning rate, and what helps: a warm-up, or norms before the layers?

A small language model learns to spell, on the descriptions of scikit-learn's data sets. A monitor watches it, and
`explain.attention` shows how evenly its heads look at the text: 1 is an even look at all of it, 0 one at a letter.
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


def text() -> Tensor:
    """As numbers of letters."""
    words = "".join(getattr(datasets, f"load_{name}")().DESCR for name in ("iris", "wine", "breast_cancer", "digits"))
    letters = sorted(set(words))
    return torch.tensor([letters.index(letter) for letter in words])


def train(net: Speller, letters: Tensor, warm: bool, name: str) -> th.Report:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    with th.Monitor(net, optimizer, every=5, to=[OUTPUT / "runs"], name=name) as monitor:
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
    return monitor.report


def main() -> None:
    torch.set_num_threads(1)  # more gain nothing for so small a network
    warnings.filterwarnings("ignore", "a tap lies inside")  # that torch's fused layers are not used, which is fine
    letters = text()
    share = letters.bincount() / len(letters)
    told = [f"guessing by how frequent letters are costs {-(share * share.log()).sum():.2f}"]
    for name, (norm_first, warm) in TRAININGS.items():
        torch.manual_seed(0)
        net = Speller(len(share), norm_first)
        report = train(net, letters, warm, name)
        seen = th.explain.attention(net.eval(), letters[: 8 * LENGTH].view(8, LENGTH))
        print(f"--- {name}\n{report}\n{seen}\n")
        seen.figure().savefig(OUTPUT / f"attention_{name.replace(' ', '_')}.png")
        loss, entropy = sum(list(report.losses.values())[-20:]) / 20, seen[0].entropy.nanmean()
        told.append(f"{name}, the loss ends at {loss:.2f}, the entropy at {seen[0].path} at {entropy:.2f}")
    print(f"Answer: {'; '.join(told)}.")


if __name__ == "__main__":
    main()
