"""The cost of watching a training with `Monitor(every=10)` and all rules, into a run on disk.

Three copies of a model are trained in turns of ten steps, of which the monitor measures one: one copy is plain, one
plain again (its distance from 1× is noise), one watched. There are three kinds of turns, because the monitor measures
more in some. The price of a training adds up the medians of each kind, as often as they occur in 1,000 steps of a long
training. On a CPU it is processor time, on one thread and including the monitor's own thread; on a GPU it is wall time.
"Second half" has all turns of the later half as they came: it includes the checks, which are too rare for the medians,
and three times as many as belong to one training, since three run at a time.

    python benchmarks/watching.py [--device cuda] [--steps 1000]
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from capture import let_torchvision_import, verdict
from harness import machine, markdown, settle
from statistics_cpu import TASKS, Loss
from torch import Tensor, nn

from torchhook import Monitor

EVERY = 10
SHARES = {"often": 90, "seldom": 9, "rare": 1}  # of a hundred turns
COPIES = ("plain", "plain again", "watched")
TARGETS = {"cpu": 1.03, "cuda": 1.02}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=1000, help="of each copy")
    options = parser.parse_args()
    where = machine() if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, every={EVERY}, {options.steps} steps\n")
    rows, verdicts = [], []
    for name, make in tasks(options.device).items():
        turns = taken(make, options.steps // EVERY)
        watched = price(turns["watched"]) / price(turns["plain"])
        rows.append(row(name, turns, watched))
        target = TARGETS[options.device]
        verdicts.append(verdict(f"{name}: watched {watched:.3f}× plain", f"{target}×", watched <= target))
    shares = [f"{kind}, {share} %" for kind, share in SHARES.items()]
    print(markdown(["model", "plain step", "plain again", *shares, "watched", "second half"], rows))
    print("\n".join(("", *verdicts)))


def tasks(device: str) -> dict[str, Callable[[], tuple[nn.Module, Loss]]]:
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
        return {"GPT-2 124M": large_gpt2}
    torch.set_num_threads(1)
    let_torchvision_import()
    return TASKS


def large_gpt2() -> tuple[nn.Module, Loss]:
    from statistics_gpu import BATCH, DEVICE, GPT2, LENGTH, VOCABULARY

    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device=DEVICE)

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return GPT2().to(DEVICE), loss


class Copy:
    """A copy of a model that is trained, with or without a monitor."""

    def __init__(self, model: nn.Module, loss: Loss, folder: str | None = None) -> None:
        self.model = deepcopy(model).train()
        self.loss = loss
        self.fused = next(model.parameters()).is_cuda
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=self.fused)
        self.monitor = None if folder is None else Monitor(self.model, self.optimizer, EVERY, to=[folder])

    def step(self) -> None:
        loss = self.loss(self.model)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.step(loss)

    def turn(self, steps: int = EVERY) -> float:
        """The seconds of some steps."""
        clock = time.perf_counter if self.fused else time.process_time
        begun = clock()
        for _ in range(steps):
            self.step()
        if self.fused:
            torch.cuda.synchronize()
        return clock() - begun


def taken(make: Callable[[], tuple[nn.Module, Loss]], count: int) -> dict[str, dict[str, list[float]]]:
    """The seconds of each copy's turns, by their kind."""
    torch.manual_seed(0)
    model, loss = make()
    turns: dict[str, dict[str, list[float]]] = {}
    with TemporaryDirectory() as folder:
        copies = {name: Copy(model, loss, folder if name == "watched" else None) for name in COPIES}
        settle()
        for copy in copies.values():
            copy.turn(
                EVERY + EVERY // 2
            )  # fills caches and compiles kernels; the measured step is then in the middle of a turn
        monitor = copies["watched"].monitor
        for number in range(1, count + 1):
            before, is_rare = monitor._instruments.seldom.ended, monitor._instruments.watch.is_thorough
            seconds = {name: copies[name].turn() for name in random.Random(number).sample(COPIES, len(COPIES))}
            kind = "rare" if is_rare else "seldom" if monitor._instruments.seldom.ended > before else "often"
            for name, second in seconds.items():
                turns.setdefault(name, defaultdict(list))[kind].append(second)
        monitor.close()
    return turns


def price(turns: dict[str, list[float]]) -> float:
    """The mean of a hundred turns; a kind that did not occur costs as much as the most expensive one."""
    return sum(share * median(turns.get(kind) or turns["seldom"]) for kind, share in SHARES.items())


def row(name: str, turns: dict[str, dict[str, list[float]]], watched: float) -> list[str]:
    plain = turns["plain"]
    kinds = [f"{median(turns['watched'][kind]) / median(plain[kind]):.3f}×" if plain[kind] else "—" for kind in SHARES]
    step = median(second for seconds in plain.values() for second in seconds) / EVERY
    late = {
        name: sum(second for seconds in turns[name].values() for second in seconds[len(seconds) // 2 :])
        for name in turns
    }
    again = price(turns["plain again"]) / price(plain)
    return [
        name,
        f"{step * 1e3:.1f} ms",
        f"{again:.3f}×",
        *kinds,
        f"{watched:.3f}×",
        f"{late['watched'] / late['plain']:.3f}×",
    ]


if __name__ == "__main__":
    main()
