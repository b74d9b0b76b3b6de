"""The cost of statistics on a GPU: the kernels alone, every leaf of GPT-2 124M in every training step, and memory.

python benchmarks/statistics_gpu.py [--rounds 7] [--only kernels|training|memory]
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median

import torch
from harness import interleaved, markdown, settle
from torch import Tensor, nn
from torch.nn import functional as F

from torchhook import measure
from torchhook.stats.kernels import kernels
from torchhook.stats.kernels.plain import BINS, Plain, empty_moments

DEVICE = torch.device("cuda", 0)
BATCH, LENGTH, WIDTH, HEADS, LAYERS, VOCABULARY = 16, 1024, 768, 12, 12, 50304
PEAK = 1.05  # times the memory of a step without statistics
STEPS = 10  # in a sample; the first after attaching is not timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("kernels", "training", "memory"))
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if options.only in (None, "kernels"):
        alone()
    if options.only in (None, "training"):
        training(options.rounds)
    if options.only in (None, "memory"):
        memory()


def alone() -> None:
    """The speed of the kernels on one tensor, relative to torch's own sum and copy."""
    fast, plain, rows = kernels(DEVICE), Plain(), []
    for dtype in (torch.bfloat16, torch.float32):
        for size, half_zero in ((16, False), (64, False), (256, False), (1024, False), (1024, True)):
            x = torch.randn(size * 2**20 // dtype.itemsize, device=DEVICE).to(dtype)
            x = x.relu_() if half_zero else x
            other, state, bins = torch.empty_like(x), empty_moments(DEVICE, fast.rows), torch.zeros(BINS).double()
            bins, single = bins.to(DEVICE), empty_moments(DEVICE)
            ways: dict[str, Callable[[], object]] = {
                "sum": x.sum,
                "copy": lambda other=other, x=x: other.copy_(x),
                "moments": lambda state=state, x=x: fast.moments(state, x),
                "histogram": lambda bins=bins, x=x: fast.histogram(bins, x),
                "together": lambda state=state, bins=bins, x=x: fast.moments_and_histogram(state, bins, x),
                "four items": lambda x=x: [x.mean().item(), x.std().item(), x.min().item(), x.max().item()],
                "eager": lambda x=x: eager(x),
                "plain": lambda single=single, x=x: plain.moments(single, x),
            }
            speed = {name: x.nbytes / seconds(way, 4000 // size + 5) / 1e9 for name, way in ways.items()}
            speed["copy"] *= 2  # it reads and writes
            rows.append(
                [f"{str(dtype)[6:]}, {size} MiB{', half zero' * half_zero}", *(f"{speed[name]:.0f}" for name in ways)]
                + [f"{speed[name] / speed['sum']:.2f}" for name in ("moments", "histogram", "together")]
                + [f"{speed['moments'] / speed['copy']:.2f}", f"{speed['together'] / speed['moments']:.2f}"]
            )
    shares = ["moments / sum", "histogram / sum", "together / sum", "moments / copy", "together / moments"]
    print(markdown(["GB/s", *ways, *shares], rows), "\n")


def seconds(call: Callable[[], object], times: int) -> float:
    """The seconds of one call, by the clock of the device."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken = []
    for _ in range(5):
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / times / 1e3)
    return min(taken)


def eager(x: Tensor) -> Tensor:
    """The same statistics as one would write them by hand, without waiting for the device."""
    std, mean = torch.std_mean(x)
    low, high = x.aminmax()
    numbers = [mean, std, low, high, x.norm(), x.abs().mean(), (x == 0).sum(), x.isnan().sum(), x.isinf().sum()]
    return torch.stack([number.float() for number in numbers])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.attn_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.gelu, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(attended.transpose(1, 2).flatten(2))
        return x + self.c_proj(self.gelu(self.c_fc(self.ln_2(x))))


class GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.ln_f = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def training(rounds: int) -> None:
    """Steps of GPT-2 with and without statistics, side by side."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = GPT2().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device=DEVICE)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    both = ("moments", "histogram")
    ways: dict[str, tuple[Callable[[], AbstractContextManager[object]], int, str]] = {
        "nothing": (nullcontext, STEPS, ""),
        "nothing, again": (nullcontext, STEPS, ""),
        "empty hooks": (lambda: hooked(model, lambda x: None), STEPS, ""),
        "measure: outputs": (lambda: measure(model), STEPS, "1.05"),
        "measure: outputs, every=10": (lambda: measure(model, every=10), STEPS, "1.01"),
        "measure: outputs and gradients": (lambda: measure(model, grads=True), STEPS, "1.10"),
        "measure: both, every=10": (lambda: measure(model, grads=True, every=10), STEPS, "1.01"),
        "measure: outputs, histogram too": (lambda: measure(model, stats=both), STEPS, ""),
        "measure: both, histogram too": (lambda: measure(model, grads=True, stats=both), STEPS, "1.10"),
        "hooks: eager torch, outputs": (lambda: hooked(model, eager), STEPS, ""),
        "hooks: four items, outputs": (lambda: hooked(model, four_items), STEPS, ""),
    }
    settle()
    samples = {name: (lambda way=way, n=n: timed(step, way, n)) for name, (way, n, _) in ways.items()}
    taken = interleaved(samples, rounds)
    base = taken["nothing"]
    rows, verdicts = [], []
    for name, (_, _, target) in ways.items():
        ratio = median(mine / plain for mine, plain in zip(taken[name], base, strict=True))
        rows.append([name, f"{median(taken[name]) * 1e3:.2f}", f"{ratio:.3f}", target])
        if target:
            met = "met" if ratio <= float(target) else "MISSED"
            verdicts.append(f"- {met}: {name}: {ratio:.3f}×; target: at most {target}×")
    print(f"GPT-2 124M, bf16 autocast, batch {BATCH} × {LENGTH}, fused AdamW; {rounds} rounds")
    print(markdown(["every step", "ms", "ratio", "at most"], rows), "\n")
    print("\n".join(verdicts))


def memory() -> None:
    """The peak of memory in a step of a compiled Llama, with and without statistics of outputs and gradients."""
    plain, measured = peak(nullcontext), peak(lambda run: measure(run, grads=True))
    verdict = "met" if measured <= PEAK * plain else "MISSED"
    print(f"compiled Llama, 6 layers of width 2048, 4 × 2048: peak {plain:.2f} GiB, measured {measured:.2f} GiB")
    print(f"- {verdict}: {measured / plain:.3f}×; target: at most {PEAK}×")


def peak(way: Callable[[nn.Module], AbstractContextManager[object]]) -> float:
    """GiB in use at most, in the steps after those that compile."""
    from watching import llama

    torch.compiler.reset()
    gc.collect()
    model, loss = llama(6, 2048, 4, 2048)
    optimizer, run = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), torch.compile(model)
    with way(run):
        for number in range(5):
            if number == 3:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            loss(run).backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() / 2**30


def timed(step: Callable[[], None], way: Callable[[], AbstractContextManager[object]], steps: int) -> float:
    """Seconds per step, without the first one."""
    with way():
        step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps


@contextmanager
def hooked(model: nn.Module, look: Callable[[Tensor], object]) -> Iterator[None]:
    """Plain hooks on every leaf."""
    leaves = [module for module in model.modules() if not list(module.children())]

    def hook(module: nn.Module, args: tuple[object, ...], output: Tensor) -> None:
        look(output.detach())

    handles = [leaf.register_forward_hook(hook) for leaf in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def four_items(x: Tensor) -> list[float]:
    return [x.mean().item(), x.std().item(), x.min().item(), x.max().item()]


if __name__ == "__main__":
    main()
