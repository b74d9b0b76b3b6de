"""The cost of watching a training with `Monitor(every=10)`, all rules and a run on disk, as a ratio to plain training.

Three copies of a model are trained in blocks of steps, in random order: one plain, one plain again (its distance from
1× is noise), one watched. A ratio is that of all blocks, with a 95 % interval over them; a target is met if the
interval reaches it. Medians, the 99th percentile and the longest step are of single steps, relative to the median of
plain ones. On a CPU, blocks are measured in processor time, on one thread and with all that the monitor does beside the
training; on a GPU in wall time, until the device is done. Rows that say "later half" leave out the first half of the
steps, and with it what is overdrawn at the beginning.

    python benchmarks/watching.py [--device cuda] [--only NAME ...] [--every 10] [--price 0.02]
    python benchmarks/watching.py --ranks 2 | --tree 2 4 8     several processes: see ranks.py
"""

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from capture import let_torchvision_import
from harness import machine, markdown, settle
from statistics_cpu import Loss, gpt2, resnet
from torch import Tensor, nn

from torchhook import Monitor

COPIES = ("plain", "plain again", "watched")
LONGEST = 1.5  # times the median of plain steps, unless a plain step took longer
RESAMPLED = 2000


@dataclass
class Row:
    """A training to watch, and what that may cost: the mean of all steps, and that of steps without a measurement."""

    name: str
    make: Callable[[], tuple[nn.Module, Loss]]
    mean: float
    idle: float | None = None
    longest: float | None = None
    steps: int = 300  # of each copy
    block: int = 20
    later_half: bool = False
    compiled: bool = False


@dataclass
class Timed:
    """What a copy took: its blocks, and its steps, each with whether it was measured."""

    blocks: list[float] = field(default_factory=list)
    steps: list[tuple[bool, float]] = field(default_factory=list)

    def seconds(self, idle: bool = False) -> list[float]:
        return [seconds for is_measured, seconds in self.steps if not (idle and is_measured)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose name contains one of these")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--price", default=None, help="of the monitor; 'off' for none")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of each row, for a quick look")
    parser.add_argument("--ranks", type=int, help="train on as many ranks instead")
    parser.add_argument("--blocks", type=int, default=40, help="with --ranks, of steps of each copy")
    parser.add_argument("--tree", type=int, nargs="+", metavar="RANKS", help="time windows on their way up instead")
    options = parser.parse_args()
    where = machine() if options.device == "cpu" else torch.cuda.get_device_name()
    watching: dict[str, Any] = {"every": options.every}
    if options.price is not None:
        watching["price"] = None if options.price == "off" else float(options.price)
    print(f"{where}, torch {torch.__version__}, Monitor({', '.join(f'{k}={v}' for k, v in watching.items())})\n")
    let_torchvision_import()
    if options.ranks or options.tree:
        import ranks

        if options.ranks:
            ranks.watched(options.ranks, watching, options.blocks)
        if options.tree:
            ranks.climbed(options.tree)
        return
    if options.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.set_float32_matmul_precision("high")
    lines, verdicts = [], []
    for row in CPU if options.device == "cpu" else GPU:
        if options.only and not any(name in row.name for name in options.only):
            continue
        begun = time.perf_counter()
        copies = trained(row, watching, options.device == "cuda", max(4, round(row.steps * options.share / row.block)))
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()
        lines.append(told(row, copies))
        verdicts += judged(row, copies)
        print(f"{time.perf_counter() - begun:.0f} s:", *lines[-1], flush=True)  # should the rest not be reached
    titles = [
        "training",
        "plain step",
        "plain again",
        "watched",
        "95 %",
        "idle",
        "median",
        "p99",
        "longest",
        "measured",
    ]
    print(f"\n{markdown(titles, lines)}\n")
    print("\n".join(verdicts))


class Copy:
    """A copy of a model that is trained, with or without a monitor."""

    def __init__(self, model: nn.Module, loss: Loss, compiled: bool, watching: dict[str, Any] | None = None) -> None:
        own = deepcopy(model).train()
        self.loss = loss
        self.on_gpu = next(own.parameters()).is_cuda
        self.optimizer = torch.optim.AdamW(own.parameters(), lr=1e-5, fused=self.on_gpu)  # so that nothing diverges
        self.model = torch.compile(own) if compiled else own
        self.monitor = None if watching is None else Monitor(self.model, self.optimizer, **watching)
        self.timed = Timed()

    def step(self) -> None:
        loss = self.loss(self.model)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.step(loss)

    def run(self, steps: int) -> None:
        """A block of steps."""
        measured, marks = [], [self._mark()]
        clock = time.perf_counter if self.on_gpu else time.process_time
        begun = clock()
        for _ in range(steps):
            measured.append(self.monitor is not None and self.monitor.is_measuring)
            self.step()
            marks.append(self._mark())
        if self.on_gpu:
            torch.cuda.synchronize()
        else:
            self.settle()  # what the monitor does beside the training takes the training's processor
        self.timed.blocks.append(clock() - begun)
        self.settle()
        taken = map(_between, marks, marks[1:])
        self.timed.steps += zip(measured, taken, strict=True)

    def settle(self) -> None:
        """Wait until the monitor has done what it has to do, so that no other copy pays for it."""
        if self.monitor is not None:
            self.monitor._worker._windows.join()

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: Any, end: Any) -> float:
    return begin.elapsed_time(end) / 1e3 if isinstance(begin, torch.cuda.Event) else end - begin


def trained(row: Row, watching: dict[str, Any], on_gpu: bool, blocks: int) -> dict[str, Timed]:
    """What each copy took, block by block."""
    torch.manual_seed(0)
    model, loss = row.make()
    with TemporaryDirectory() as folder, without_collection():
        warm = Copy(model, loss, compiled=False)  # fills the caches of the process
        warm.run(3)
        del warm
        watched = {**watching, "to": [folder]}
        copies = {name: Copy(model, loss, row.compiled, watched if name == "watched" else None) for name in COPIES}
        if on_gpu or row.compiled:
            for copy in copies.values():
                copy.run(5)  # compiles graphs and kernels
                copy.timed = Timed()
        for number in range(blocks):
            for name in random.Random(number).sample(COPIES, len(COPIES)):
                copies[name].run(row.block if number else row.block // 2 + 3)  # no block begins with a measured step
        monitor = copies["watched"].monitor
        assert monitor is not None
        monitor.close()
        taken = {name: copy.timed for name, copy in copies.items()}
    if row.later_half:
        for timed in taken.values():
            timed.blocks = timed.blocks[len(timed.blocks) // 2 :]
            timed.steps = timed.steps[len(timed.steps) // 2 :]
    return taken


@contextmanager
def without_collection() -> Iterator[None]:
    """Collections between steps would be noise; what is left behind is collected after the row."""
    settle()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def ratio(one: list[float], other: list[float]) -> tuple[float, float, float]:
    """How much longer the blocks of one copy took than those of another, with the 95 % interval of that."""
    pairs, chance = list(zip(one, other, strict=True)), random.Random(0)
    drawn = sorted(_ratio(chance.choices(pairs, k=len(pairs))) for _ in range(RESAMPLED))
    return _ratio(pairs), drawn[RESAMPLED // 40], drawn[-RESAMPLED // 40]


def _ratio(pairs: list[tuple[float, float]]) -> float:
    return sum(one for one, _ in pairs) / sum(other for _, other in pairs)


def idle(copies: dict[str, Timed]) -> float:
    """The cost of steps without a measurement: medians, since a step may begin with the end of what was before it."""
    return median(copies["watched"].seconds(idle=True)) / median(copies["plain"].seconds())


def told(row: Row, copies: dict[str, Timed]) -> list[str]:
    usual = median(copies["plain"].seconds())
    watched, low, high = ratio(copies["watched"].blocks, copies["plain"].blocks)
    again = ratio(copies["plain again"].blocks, copies["plain"].blocks)[0]
    measured = mean(is_measured for is_measured, _ in copies["watched"].steps)

    def shown(value: Callable[[list[float]], float]) -> str:
        plain, ours = (value(copies[name].seconds()) / usual for name in ("plain", "watched"))
        return f"{ours:.3f}× ({plain:.3f}×)"

    return [
        row.name,
        f"{usual * 1e3:.2f} ms",
        f"{again:.3f}×",
        f"{watched:.3f}×",
        f"{low:.3f}–{high:.3f}",
        f"{idle(copies):.3f}×",
        shown(median),
        shown(lambda seconds: quantiles(seconds, n=100)[-1]),
        shown(max),
        f"1 in {1 / measured:.0f}" if measured else "none",
    ]


def judged(row: Row, copies: dict[str, Timed]) -> list[str]:
    watched, low, high = ratio(copies["watched"].blocks, copies["plain"].blocks)
    lines = [verdict(f"{row.name}: mean {watched:.3f}× ({low:.3f}–{high:.3f})", row.mean, low <= row.mean)]
    if row.idle is not None:
        lines.append(verdict(f"{row.name}: idle steps {idle(copies):.3f}×", row.idle, idle(copies) <= row.idle))
    if row.longest is not None:
        usual = median(copies["plain"].seconds())
        ours, plain = (max(copies[name].seconds()) / usual for name in ("watched", "plain"))
        said = f"{row.name}: longest step {ours:.2f}× (of plain ones {plain:.2f}×)"
        lines.append(verdict(said, row.longest, ours <= max(row.longest, plain)))
    return lines


def verdict(what: str, target: float, met: bool) -> str:
    return f"- {'met' if met else 'MISSED'}: {what}; target: at most {target}×"


def mlp() -> tuple[nn.Module, Loss]:
    x, y = torch.randn(64, 64), torch.randint(10, (64,))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, lambda model: F.cross_entropy(model(x), y)


def cnn(width: int, batch: int) -> tuple[nn.Module, Loss]:
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    channels, parts = (3, width, 2 * width, 4 * width), []
    for before, after in pairwise(channels):
        parts += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(4 * width * 16, 10))
    return model, lambda model: F.cross_entropy(model(x), y)


def large_gpt2() -> tuple[nn.Module, Loss]:
    from statistics_gpu import BATCH, DEVICE, GPT2, LENGTH, VOCABULARY

    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device=DEVICE)

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return GPT2().to(DEVICE), loss


def llama(
    layers: int = 12, width: int = 2048, batch: int = 4, length: int = 2048, checkpointed: bool = False
) -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 128,
        max_position_embeddings=length,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    if checkpointed:
        model.gradient_checkpointing_enable()
    tokens = torch.randint(config.vocab_size, (batch, length), device="cuda")
    return model, lambda model: model(input_ids=tokens, labels=tokens).loss


CPU = [
    Row("MLP", mlp, 1.03, steps=3000, block=100),
    Row("CNN, 5 ms", lambda: cnn(8, 16), 1.03, steps=2000, block=50),
    Row("CNN, 50 ms", lambda: cnn(32, 24), 1.03, steps=300, block=10),
    Row("ResNet-18", resnet, 1.03, steps=150, block=10),
    Row("GPT-2", gpt2, 1.03, steps=120, block=10),
]
GPU = [
    Row("Llama", llama, 1.02, longest=LONGEST, steps=160, later_half=True),
    Row("Llama, checkpointed", lambda: llama(checkpointed=True), 1.02, idle=1.003, steps=160, later_half=True),
    Row("Llama, 1 × 512", lambda: llama(batch=1, length=512), 1.05, idle=1.01, steps=300, later_half=True),
    Row("Llama, compiled", llama, 1.02, longest=LONGEST, steps=80, later_half=True, compiled=True),
    Row("small Llama", lambda: llama(8, 1024, 4, 1024), 1.03, steps=400),
    Row("small Llama, compiled", lambda: llama(8, 1024, 4, 1024), 1.03, steps=400, compiled=True),
    Row("GPT-2 124M", large_gpt2, 1.02, steps=120, later_half=True),
]


if __name__ == "__main__":
    main()
