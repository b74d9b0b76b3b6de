"""The cost of `record`: sketches of a Llama, compared with its pass, and full tensors, compared with a plain file.

    python benchmarks/recordings.py
    python benchmarks/recordings.py --layers 22 --tokens 256 --rounds 1    # the size of all sketches, without a GPU

With a GPU the model is a Llama with 1.1 billion parameters in bfloat16, on 4 × 2048 tokens; without one, it has two
layers of the same widths, on 4 × 256 tokens. Writes end with fsync. A ratio is the median over the rounds of one run,
in which the candidates take turns.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median

import torch
from harness import interleaved, machine, markdown
from torch import nn

from torchhook import record

MEGABYTES, RATIO = 5.0, 1.3  # what the sketches of the whole model may take
ROWS, WIDTH = 8192, 4096
NUMBERS = count()


def llama(layers: int, device: str) -> nn.Module:
    """A Llama with the widths of TinyLlama, which has 22 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(vocab_size=32000, num_hidden_layers=layers, **sizes)).bfloat16().eval()


def sketches(folder: Path, layers: int, tokens: int, rounds: int) -> list[list[str]]:
    """Times a pass with and without sketches of all leaves, and measures what they take."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x = llama(layers, device), torch.randint(32000, (4, tokens), device=device)
    leaves = [path for path, module in model.named_modules() if not any(module.children())]

    def recorded() -> None:
        with record(model, to=folder / f"{next(NUMBERS)}.th", sites=leaves, keep="sketch"):
            model(x)

    def synchronized(run: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            start = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        return seconds

    calls = {"plain": synchronized(lambda: model(x)), "recorded": synchronized(recorded)}
    with torch.no_grad():
        recorded()
        times = interleaved(calls, rounds)
    size = sum(file.stat().st_size for file in (folder / "0.th").iterdir())
    ratio = median(b / a for a, b in zip(times["plain"], times["recorded"], strict=True))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = f"Llama, {layers} layers, {parameters / 1e9:.2f}B parameters, 4 × {tokens} tokens, {device}"
    sites = len(leaves) + 1
    return [
        [f"{name}: size", f"{size / 1e6:.2f} MB", f"{size / 1e3 / sites:.1f} kB for each of {sites} sites"],
        [f"{name}: time", f"{ratio:.2f} × the pass", f"{median(times['plain']):.2f} s without"],
    ]


def writing(folder: Path, gb: float, rounds: int) -> list[list[str]]:
    """Times the recording of full tensors by a model that does nothing, and a plain file of as many bytes."""
    x = torch.randn(ROWS, WIDTH)
    passes = max(1, round(gb * 1e9 / x.nbytes))
    batches = [x + number for number in range(2)]

    def plain() -> float:
        start = time.perf_counter()
        with (folder / "raw.bin").open("wb", buffering=0) as file:
            for number in range(passes):
                file.write(memoryview(batches[number % 2].numpy()).cast("B"))
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        (folder / "raw.bin").unlink()
        return seconds

    def recorded() -> float:
        to, model = folder / f"{next(NUMBERS)}.th", nn.Identity()
        start = time.perf_counter()
        with record(model, to=to):
            for number in range(passes):
                model(batches[number % 2].clone())
        for file in to.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        seconds = time.perf_counter() - start
        shutil.rmtree(to)
        return seconds

    times = interleaved({"plain": plain, "recorded": recorded}, rounds)
    ratio = median(a / b for a, b in zip(times["plain"], times["recorded"], strict=True))
    rates = {name: passes * x.nbytes / 1e6 / median(taken) for name, taken in times.items()}
    return [
        ["full tensors: a plain file", f"{rates['plain']:.0f} MB/s", ""],
        ["full tensors: a recording", f"{rates['recorded']:.0f} MB/s", f"{ratio:.2f} of a plain file"],
    ]


def main() -> None:
    """Run all of it."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22 if gpu else 2)
    parser.add_argument("--tokens", type=int, default=2048 if gpu else 256, help="in each of four samples")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--to", type=Path, help="a folder on the disk to measure")
    options = parser.parse_args()
    print(machine())
    print(f"targets: {MEGABYTES:g} MB and {RATIO:g} × the pass for the sketches of 22 layers on a GPU\n")
    with tempfile.TemporaryDirectory(dir=options.to) as folder:
        rows = sketches(Path(folder), options.layers, options.tokens, options.rounds)
        rows += writing(Path(folder), options.gb, options.rounds)
    print(markdown(["what", "", ""], rows))


if __name__ == "__main__":
    main()
