"""Time and memory of CKA between 50 × 50 layers, for torchhook and other libraries.

Debiased linear CKA of the whole layer outputs of two ResNet-34: the first 50 convolutions and batch norms in the blocks
of each. Every method runs in its own process, in turn. "Direct" is the formula on all data: it keeps the features of
all images and computes their Gram matrices. The distance of a method from that, in any pair of layers, is the cost of
its estimate (or a mistake). A peer that is missing or fails is left out by name. Ours also runs on a quarter of the
images, to show how memory depends on their number. Ratios are medians of those of the rounds, with a 95 % interval; a
target is met if the interval reaches it. On a CPU they are ratios of processor time, on a GPU of time.

    python benchmarks/compare.py [--images 2000] [--pixels 32] [--batch 100] [--rounds 5] [--device cuda] [--no-peers]
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import NamedTuple

import torch
from capture import let_torchvision_import, verdict
from harness import in_fresh_process, machine, markdown, median_interval
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LAYERS = 50
TARGET = 1.0  # times the direct computation on a GPU, and times pytorch-cka on a CPU
FLAT = 16  # MiB more for four times the images
Method = Callable[[nn.Module, nn.Module, DataLoader, list[str], str], "Tensor | None"]


class Setting(NamedTuple):
    """The setting of all methods."""

    images: int
    pixels: int
    batch: int
    device: str


class Timing(NamedTuple):
    """One run of a method: seconds, those of the processor, peak MiB beyond models and data, and the matrix."""

    seconds: float
    processor: float
    memory: float
    matrix: Tensor | None


def forwards(a: nn.Module, b: nn.Module, loader: DataLoader, layers: list[str], device: str) -> None:
    with torch.no_grad():
        for x, _ in loader:
            x = x.to(device)
            a(x)
            b(x)


def torchhook(a: nn.Module, b: nn.Module, loader: DataLoader, layers: list[str], device: str) -> Tensor:
    from torchhook.compare.likeness import cka

    return cka(a, b, loader, layers).matrix


def direct(a: nn.Module, b: nn.Module, loader: DataLoader, layers: list[str], device: str) -> Tensor:
    from torchhook import capture
    from torchhook.compare.measures import u_centred

    products = []
    for model in (a, b):
        kept: dict[str, list[Tensor]] = {name: [] for name in layers}
        with torch.no_grad():
            for x, _ in loader:
                with capture(model, *layers) as seen:
                    model(x.to(device))
                for name in layers:
                    kept[name].append(seen[name].output.flatten(1))
        grams = []
        for name in layers:
            features = torch.cat(kept.pop(name))
            features -= features.mean(0)
            grams.append(u_centred(features @ features.T).float().flatten())
        products.append(torch.stack(grams))
    x, y = products
    return ((x @ y.T) / torch.outer(x.norm(dim=1), y.norm(dim=1))).cpu()


def pytorch_cka(a: nn.Module, b: nn.Module, loader: DataLoader, layers: list[str], device: str) -> Tensor:
    from cka import compute_cka

    return compute_cka(a, b, loader, layers=layers, device=device, progress=False)[0].cpu()


def cka_pytorch(a: nn.Module, b: nn.Module, loader: DataLoader, layers: list[str], device: str) -> Tensor:
    from cka_pytorch.cka import CKACalculator

    calculator = CKACalculator(a, b, layers, layers, verbose=False)
    return calculator.calculate_cka_matrix(loader, num_epochs=1).cpu()


def torch_cka(a: nn.Module, b: nn.Module, loader: DataLoader, layers: list[str], device: str) -> Tensor:
    from torch_cka import CKA

    calculator = CKA(a, b, "a", "b", layers, layers, device=device)
    with torch.no_grad():  # it does not disable autograd itself
        calculator.compare(loader)
    return calculator.hsic_matrix


def ckatorch(a: nn.Module, b: nn.Module, loader: DataLoader, layers: list[str], device: str) -> Tensor:
    from ckatorch import CKA

    named = DataLoader([{"x": image} for image, _ in loader.dataset], loader.batch_size)
    return CKA(a, b, layers, layers, "a", "b", torch.device(device))(named, epochs=1).cpu()


PEERS: dict[str, Method] = {
    "pytorch-cka": pytorch_cka,
    "cka-pytorch": cka_pytorch,
    "torch-cka": torch_cka,
    "ckatorch": ckatorch,
}
OURS, BARE, DIRECT = "torchhook", "both forwards alone", "direct, all data at once"
IMPORTED = {  # before the clock starts
    BARE: "torch",
    OURS: "torchhook.compare.likeness",
    DIRECT: "torchhook.captures",
    "pytorch-cka": "cka",
    "cka-pytorch": "cka_pytorch.cka",
    "torch-cka": "torch_cka",
    "ckatorch": "ckatorch",
}
METHODS: dict[str, Method] = {BARE: forwards, OURS: torchhook, DIRECT: direct, **PEERS}


def measured(name: str, setting: Setting) -> Timing | str:
    """One run of a method, or why it failed."""
    torch.set_num_threads(torch.get_num_threads() if setting.device == "cuda" else 1)
    warnings.simplefilter("ignore")
    let_torchvision_import()
    from torchvision.models import resnet34

    torch.manual_seed(0)
    a, b = (resnet34().to(setting.device).eval() for _ in range(2))
    x = torch.randn(setting.images, 3, setting.pixels, setting.pixels)
    loader = DataLoader(TensorDataset(x, torch.zeros(len(x))), setting.batch)
    layers = [path for path, module in a.named_modules() if path.count(".") > 1 and not isinstance(module, nn.ReLU)]
    layers = [path for path in layers if not path.endswith("downsample")][:LAYERS]
    warm = DataLoader(TensorDataset(x[: setting.batch], torch.zeros(setting.batch)), setting.batch)
    try:
        import_module(IMPORTED[name])
        forwards(a, b, warm, layers, setting.device)
        before = occupied(setting.device)
        start, busy = time.perf_counter(), time.process_time()
        matrix = METHODS[name](a, b, loader, layers, setting.device)
        if setting.device == "cuda":
            torch.cuda.synchronize()
        seconds, processor = time.perf_counter() - start, time.process_time() - busy
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if matrix is not None and matrix.shape != (LAYERS, LAYERS):
        return f"its result has shape {tuple(matrix.shape)}"
    return Timing(seconds, processor, occupied(setting.device) - before, matrix)


def occupied(device: str) -> float:
    """Peak memory so far, in MiB."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def titled(name: str) -> str:
    try:
        return f"{name} {version(name)}" if name in PEERS else name
    except PackageNotFoundError:
        return name


def report(setting: Setting, rounds: int, with_peers: bool) -> None:
    names = [name for name in METHODS if with_peers or name not in PEERS]
    runs: dict[str, list[Timing]] = {name: [] for name in names}
    left_out: dict[str, str] = {}
    for _ in range(rounds):
        for name in names:
            run = name not in left_out and in_fresh_process(measured, name, setting)
            if isinstance(run, Timing):
                runs[name].append(run)
            elif run:
                left_out[name] = run
    quarter = in_fresh_process(measured, OURS, setting._replace(images=setting.images // 4))
    device = torch.cuda.get_device_name() if setting.device == "cuda" else f"{machine()}, one thread"
    print(f"{device}, torch {version('torch')}; {setting.images:,} images of {setting.pixels} px, batches of", end=" ")
    print(f"{setting.batch}; medians of {rounds} rounds\n")
    seconds = {name: median(run.seconds for run in taken) for name, taken in runs.items() if taken}
    header = ["50 × 50 layers", "seconds", "processor", "× ours", "memory", "from direct"]
    print(markdown(header, rows(runs, seconds)))
    print("\n" + "\n".join(f"- left out: {name}: {why}" for name, why in left_out.items()))
    print(*verdicts(runs, setting.device, quarter), sep="\n")


def rows(runs: dict[str, list[Timing]], seconds: dict[str, float]) -> list[list[str]]:
    truth = runs[DIRECT][0].matrix
    lines = []
    for name, taken in seconds.items():
        matrix = runs[name][0].matrix
        off = "—" if matrix is None or truth is None else f"{float((matrix - truth).abs().max()):.1g}"
        memory = f"{max(run.memory for run in runs[name]):.0f} MiB"
        processor = f"{median(run.processor for run in runs[name]):.2f}"
        lines.append([titled(name), f"{taken:.2f}", processor, f"{taken / seconds[OURS]:.2f}", memory, off])
    return lines


def against(runs: dict[str, list[Timing]], name: str, other: str, *, device: str, judged: bool) -> str:
    """The median ratio of two methods over the rounds, with its interval.

    On a CPU every method has one thread, so the time of the processor says the same as the clock, and other programs on
    the machine do not disturb it.
    """
    pairs = list(zip(runs[name], runs[other], strict=True))
    if device == "cuda":
        what, ratios = "time", [ours.seconds / theirs.seconds for ours, theirs in pairs]
    else:
        what, ratios = "processor time", [ours.processor / theirs.processor for ours, theirs in pairs]
    low, high = median_interval(ratios)
    text = f"{name}: {median(ratios):.2f}× the {what} of {other} ({low:.2f} to {high:.2f})"
    return verdict(text, f"{TARGET}×", low <= TARGET) if judged else f"- {text}"


def verdicts(runs: dict[str, list[Timing]], device: str, quarter: Timing | str) -> list[str]:
    rival = DIRECT if device == "cuda" else "pytorch-cka"
    lines = [
        against(runs, OURS, other, device=device, judged=other == rival)
        for other in (DIRECT, *PEERS)
        if runs.get(other)
    ]
    if runs.get(rival):
        lines.append(against(runs, BARE, rival, device=device, judged=False) + ", a lower bound for every method")
    if isinstance(quarter, Timing):
        more = max(run.memory for run in runs[OURS]) - quarter.memory
        lines.append(
            verdict(f"memory: {more:.0f} MiB more than for a quarter of the images", f"{FLAT} MiB", more <= FLAT)
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--pixels", type=int, default=32)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device found")
    setting = Setting(options.images, options.pixels, options.batch, options.device)
    report(setting, options.rounds, with_peers=not options.no_peers)


if __name__ == "__main__":
    main()
