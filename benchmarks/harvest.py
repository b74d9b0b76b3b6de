"""The cost of `harvest`, compared with a plain file, numpy's memory map, and the model by itself.

    python benchmarks/harvest.py
    python benchmarks/harvest.py --gb 2 --rounds 5

Cold reads follow posix_fadvise(DONTNEED); writes end with fsync. The candidates take turns: a ratio is the median over
the rounds of one run, with its 95 % interval, and a target is met if the interval reaches it. With a GPU
the model is GPT-2 with 124 million weights; without one, a small GPT-2 and a ResNet-18 on the CPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from harness import in_fresh_process, interleaved, machine, markdown, median_interval
from torch import nn

from torchhook import Activations, harvest
from torchhook.activations import store_files
from torchhook.activations.collector import Collector, Wanted
from torchhook.activations.writer import HarvestedBatch, Piece, WriterThread

WIDTH, BATCH, CHUNK = 768, 8192, 256 * 1024
WHOLE, IN_ORDER = "a whole harvest, of a model that does nothing", "in order, cold: batches()"
TARGETS = {WHOLE: 0.8, IN_ORDER: 0.95}


class RepeatedBatch:
    """The same batch of rows, `count` times."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows = torch.randn(BATCH, WIDTH).half()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.rows for _ in range(self.count))

    def __len__(self) -> int:
        return self.count


class Nothing(nn.Module):
    """A model that does nothing: timing it times the harvest alone."""

    def __init__(self) -> None:
        super().__init__()
        self.site = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.site(x)


def writing(folder: Path, gb: float, rounds: int) -> list[list[str]]:
    """Times a plain file, the writer of a store, and a whole harvest without a model, for the same bytes."""
    count = round(gb * 1e9 / (BATCH * WIDTH * 2))
    data, size = RepeatedBatch(count), count * BATCH * WIDTH * 2
    view = memoryview(data.rows.numpy()).cast("B")

    def plain() -> float:
        path = folder / "raw.bin"
        away(path)
        start = time.perf_counter()
        with open(path, "wb", buffering=0) as file:  # noqa: PTH123 (unbuffered)
            for _ in range(count):
                for at in range(0, len(view), CHUNK):
                    file.write(view[at : at + CHUNK])
            os.fsync(file.fileno())
        return time.perf_counter() - start

    def store() -> float:
        away(folder / "rows")
        with Collector(Nothing(), Wanted("site")) as collector:
            sent = collector.collect(data.rows, BATCH)
        start = time.perf_counter()
        with WriterThread(folder / "rows", manifest, 2**30, 5.0, lambda *_: None) as writer:
            for number in range(count):
                ids = range(number * BATCH, (number + 1) * BATCH)
                writer.put(HarvestedBatch(number, [Piece(ids, sent)], {}), lambda: 0)
        return time.perf_counter() - start

    def whole() -> float:
        away(folder / "store")
        start = time.perf_counter()
        harvest(Nothing(), data, "site", folder / "store", dtype=None, progress=False)
        return time.perf_counter() - start

    # A virtual machine gets memory from its host on first use: touch it before anything is timed.
    with open(folder / "memory", "wb", buffering=0) as file:  # noqa: PTH123 (unbuffered)
        for _ in range(5 * count):
            file.write(view)
    away(folder / "memory")
    plain(), whole()
    manifest = Activations.open(folder / "store").manifest
    store()
    seconds = interleaved({"a plain file": plain, "rows into a store": store, WHOLE: whole}, rounds)
    return compared(seconds, "a plain file", lambda taken: f"{size / taken / 1e6:,.0f} MB/s")


def reading(folder: Path, rounds: int) -> list[list[str]]:
    """Times reading the last store against numpy's memory map of the plain file."""
    raw = np.memmap(folder / "raw.bin", np.float16, "r").reshape(-1, WIDTH)
    acts = Activations.open(folder / "store")
    rows, size = len(raw), raw.nbytes
    generator = np.random.default_rng(0)

    def cold(call: Callable[[], object]) -> Callable[[], float]:
        def sample() -> float:
            for path in (folder / "raw.bin", *store_files.values_path(folder / "store", "site", 0).parent.iterdir()):
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return taken(call)

        return sample

    def taken(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def through_map() -> None:
        fresh = np.memmap(folder / "raw.bin", np.float16, "r").reshape(-1, WIDTH)
        for at in range(0, rows, BATCH):
            fresh[at : at + BATCH].view(np.int16).sum()

    def through_ours() -> None:
        for batch in Activations.open(folder / "store")["site"].batches(BATCH):
            batch.numpy().view(np.int16).sum()

    lines = []
    for name, wrap in (("warm", lambda call: lambda: taken(call)), ("cold", cold)):
        samples = {"numpy.memmap": wrap(through_map), "batches()": wrap(through_ours)}
        seconds = interleaved(samples, rounds)
        rates = compared(seconds, "numpy.memmap", lambda s: f"{size / s / 1e6:,.0f} MB/s")
        lines += [[f"in order, {name}: {line[0]}", *line[1:]] for line in rates]

    some = generator.choice(rows, min(4096, rows // 4), replace=False)
    part = min(rows, 131072)

    def singles() -> None:
        fresh = np.memmap(folder / "raw.bin", np.float16, "r").reshape(-1, WIDTH)
        for row in some:
            np.array(fresh[row])

    def gathered() -> None:
        Activations.open(folder / "store")["site"][torch.from_numpy(some)]

    def shuffled() -> None:
        seen = 0
        for batch in Activations.open(folder / "store")["site"].batches(BATCH, shuffle=True):
            seen += len(batch)
            if seen >= part:
                return

    del acts
    counts = {"single rows of numpy.memmap": len(some), "[rows]": len(some), "batches(shuffle=True)": part}
    calls = {"single rows of numpy.memmap": singles, "[rows]": gathered, "batches(shuffle=True)": shuffled}
    seconds = interleaved({name: cold(call) for name, call in calls.items()}, rounds)
    rates = {name: counts[name] / median(some) for name, some in seconds.items()}
    base = rates["single rows of numpy.memmap"]
    for name, rate in rates.items():
        lines.append([f"at random, cold: {name}", f"{rate:,.0f} rows/s", f"{rate / base:.2f}", ""])
    return lines


def through_models(folder: Path, rounds: int) -> list[list[str]]:
    """Times a model by itself against the same model harvested."""
    lines = []
    for name, (model, data, site) in models().items():

        def plain(model: nn.Module = model, data: list[torch.Tensor] = data) -> float:
            device = next(model.parameters()).device
            start = time.perf_counter()
            with torch.no_grad():
                for x in data:
                    model(x.to(device, copy=True))
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        def ours(model: nn.Module = model, data: list[torch.Tensor] = data, site: str = site) -> float:
            away(folder / "model")
            times: list[float] = []
            handle = model.register_forward_pre_hook(lambda *_: times.append(time.perf_counter()))
            harvest(model, data, site, folder / "model", progress=False)
            handle.remove()
            return time.perf_counter() - times[2]  # two forward passes of the first batch are for the estimate

        plain(), ours()
        seconds = interleaved({"the model": plain, "harvest": ours}, rounds)
        samples = sum(len(x) for x in data)
        rates = compared(seconds, "the model", lambda s, n=samples: f"{n / s:,.1f} samples/s")
        lines += [[f"{name}: {line[0]}", *line[1:]] for line in rates]
    return lines


def models() -> dict[str, tuple[nn.Module, list[torch.Tensor], str]]:
    """Models with their data and the site to harvest."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    if torch.cuda.is_available():
        gpt = GPT2Model(GPT2Config()).eval().cuda()
        half = GPT2Model(GPT2Config()).eval().cuda().bfloat16()
        texts = [torch.randint(50257, (16, 1024)) for _ in range(240)]
        return {"GPT-2 124M, float32": (gpt, texts[:60], "h.6"), "GPT-2 124M, bfloat16": (half, texts, "h.6")}
    from torchvision.models import resnet18

    small = GPT2Model(GPT2Config(n_layer=4, n_embd=256, n_head=4)).eval()
    return {
        "GPT-2 of 4 layers": (small, [torch.randint(50257, (8, 128)) for _ in range(30)], "h.2"),
        "ResNet-18": (resnet18().eval(), [torch.randn(8, 3, 96, 96) for _ in range(15)], "layer3"),
    }


def peak(folder: str, memory_bytes: int) -> float:
    """By how many MB a process grows while it harvests ten times its budget."""
    model, data = Nothing(), RepeatedBatch(round(10 * memory_bytes / (BATCH * WIDTH * 2)))
    harvest(model, RepeatedBatch(1), "site", Path(folder) / "warm", dtype=None, progress=False)
    before = highest()
    harvest(model, data, "site", Path(folder) / "budget", dtype=None, memory_bytes=memory_bytes, progress=False)
    return highest() - before


def highest() -> float:
    """The peak size of this process in MB; getrusage would include its parent's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1000


def away(path: Path) -> None:
    """Delete `path` and sync the disk, so that what comes next does not pay for it."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    os.sync()


def compared(seconds: dict[str, list[float]], base: str, rate: Callable[[float], str]) -> list[list[str]]:
    """The rate of each, the median over the rounds of its ratio to that of `base`, and the interval of that median."""
    lines = []
    for name, some in seconds.items():
        ratios = [theirs / ours for theirs, ours in zip(seconds[base], some, strict=True)]
        least, most = median_interval(ratios)
        lines.append([name, rate(median(some)), f"{median(ratios):.2f}", f"{least:.2f} to {most:.2f}"])
    return lines


def verdicts(lines: list[list[str]]) -> list[str]:
    """For each row that has a target, whether its interval reaches it."""
    return [
        f"- {'met' if float(interval.split()[-1]) >= TARGETS[name] else 'MISSED'}: {name}: {ratio} ({interval});"
        f" target: at least {TARGETS[name]}"
        for name, _, ratio, interval in lines
        if name in TARGETS
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    print(f"{machine()}; torch {torch.__version__}, numpy {np.__version__}")
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        print(f"\nWriting {options.gb} GB, rows of {WIDTH} float16, batches of {BATCH}\n")
        written = writing(folder, options.gb, options.rounds)
        print(markdown(["", "rate", "of a plain file", "95 %"], written))
        print("\nReading it\n")
        read = reading(folder, options.rounds)
        print(markdown(["", "rate", "of numpy.memmap", "95 %"], read))
        print("\nThe model, with and without harvest\n")
        print(markdown(["", "rate", "of the model", "95 %"], through_models(folder, options.rounds)))
        budget = 64
        grown = in_fresh_process(peak, name, budget * 10**6)
        print(f"\nMemory: {grown:,.0f} MB more for {10 * budget} MB of rows, with a budget of {budget} MB")
        assert grown < budget
        print("", *verdicts(written + read), sep="\n")


if __name__ == "__main__":
    main()
