"""The cost of capturing on a GPU: a plain forward, copy-on-write, clones, and one layer copied to the CPU.

python benchmarks/capture_gpu.py
"""

import time
from statistics import median

import torch
from torch import nn

from torchhook import capture

ROUNDS, PASSES = 9, 50


def main() -> None:
    torch.set_grad_enabled(False)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)]).cuda().half()
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.half)
    ways = {
        "capture(model)": {},
        'capture(model, copy="clone")': {"copy": "clone"},
        'capture(model, "23", to="cpu")': {"queries": ("23",), "to": "cpu"},
    }
    plain, times = [], {name: [] for name in ways}
    for _ in range(ROUNDS):
        plain.append(milliseconds(model, x))
        for name, options in ways.items():
            with capture(model, *options.get("queries", ()), **{k: v for k, v in options.items() if k != "queries"}):
                times[name].append(milliseconds(model, x))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; 24 × Linear(1024, 1024), half, batch 4096, no_grad"
    )
    print(f"plain: {median(plain):.3f} ms")
    for name, taken in times.items():
        print(f"{name}: {median(taken) / median(plain):.2f}×")


def milliseconds(model: nn.Module, x: torch.Tensor) -> float:
    model(x)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(PASSES):
        model(x)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / PASSES * 1e3


if __name__ == "__main__":
    main()
