"""The cost of taps inside torch.compile: a small GPT with and without taps on every block, as ratios in one run.

Compiled with fullgraph=True, on the CPU and on a GPU if there is one. Each way has its own model, is attached once for
all rounds, and must reproduce the values of the eager model; then each round calls every way once. A target is met if
the 95 % interval of the median ratio reaches it.

    python benchmarks/compile.py [--rounds N] [--device cpu|cuda] [--only NAME]

For comparison: the cost of taps without a compiler, and a bare hook that appends to a list, compiled without fullgraph.
The list grows with every call, so torch recompiles until it reaches its limit and then stops compiling.
"""

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from harness import interleaved, machine, markdown, median_interval, passes_for, settle, timed
from torch import Tensor, nn
from torch._dynamo.utils import counters

import torchhook

VOCABULARY, HEAD = 1024, 64
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-2}  # relative to the largest value
FORWARD, STEP = "forward, no_grad", "training step"
COMPILED, EAGER = "compiled, no taps", "eager, no taps"
FIRST = 2  # calls of each kind, after which nothing may be compiled
MORE = 8  # further untimed calls of each kind, which take the bare hook past torch's limit of 8 graphs


@dataclass(frozen=True)
class Size:
    """The model and batch for one kind of device."""

    device: str
    layers: int
    width: int
    batch: int
    length: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.layers} blocks of width {self.width}, batch {self.batch} × {self.length}, {dtype}"


SIZES = {"cpu": Size("cpu", 6, 256, 4, 128, torch.float32), "cuda": Size("cuda", 12, 768, 8, 512, torch.bfloat16)}


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model_of(size: Size) -> GPT:
    """A model with the same weights for every way, but its own class: torch caches graphs by code and ignores hooks."""
    code = GPT.forward.__code__
    forward = FunctionType(code.replace(), GPT.forward.__globals__)
    torch.manual_seed(0)
    return type("GPT", (GPT,), {"forward": forward})(size).to(size.device, size.dtype)


def tokens_of(size: Size, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (size.batch, size.length), generator=generator).to(size.device)


@contextmanager
def appending(model: nn.Module) -> Iterator[list[Tensor]]:
    """Attach the bare hook that one would write by hand."""
    kept: list[Tensor] = []
    blocks = model.get_submodule("_orig_mod.blocks")
    handles = [block.register_forward_hook(lambda module, args, out: kept.append(out.detach())) for block in blocks]
    yield kept
    for handle in handles:
        handle.remove()


@dataclass(frozen=True)
class Way:
    """One row of the table."""

    name: str
    attach: Callable[[nn.Module], AbstractContextManager[Any]] = lambda _: nullcontext()
    base: str = COMPILED  # the row that it is compared with
    compiled: bool = True
    fullgraph: bool = True
    keeps: bool = True  # whether it keeps the outputs of the blocks
    grads: bool = False  # and their gradients
    targets: tuple[float, float] | None = None  # of the forward and of the training step


def capturing(model: nn.Module, **options: Any) -> torchhook.Capture:
    return torchhook.capture(model, "blocks.*", keep=1, **options)


def scaling(model: nn.Module) -> torchhook.Session:
    return torchhook.edit(model, {"blocks.*": torchhook.edits.scale(1.0)})


WAYS = [
    Way(COMPILED, keeps=False),
    Way("the same once more", keeps=False),  # shows the noise
    Way('capture(model, "blocks.*")', capturing, targets=(1.05, 1.05)),
    Way('capture(model, "blocks.*", grads=True)', partial(capturing, grads=True), grads=True, targets=(1.10, 1.05)),
    Way('edit(model, {"blocks.*": scale(1.0)})', scaling, keeps=False, targets=(1.03, 1.03)),
    Way("bare hook that appends, no fullgraph", appending, fullgraph=False),
    Way(EAGER, base=EAGER, compiled=False, keeps=False),
    Way('eager, capture(model, "blocks.*")', capturing, base=EAGER, compiled=False),
]


class Runner:
    """The model of a way with its taps attached, and what the compiler did for it."""

    def __init__(self, way: Way, size: Size, stack: ExitStack) -> None:
        self.way, self.size = way, size
        self.model = model_of(size)
        self.call = torch.compile(self.model, fullgraph=way.fullgraph) if way.compiled else self.model
        self.taps = stack.enter_context(way.attach(self.call))
        self.feed(seed=1)
        self.graphs = self.breaks = 0
        self.seconds_first = timed(partial(self.both, FIRST))
        self.graphs_first = self.graphs

    def feed(self, seed: int) -> None:
        """Use other tokens from now on."""
        self.x, self.y = tokens_of(self.size, seed), tokens_of(self.size, seed + 1)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.call(self.x)

    def step(self) -> None:
        loss_of(self.call, self.x, self.y).backward()
        self.model.zero_grad()

    def both(self, count: int) -> None:
        self.repeat(self.forward, count)
        self.repeat(self.step, count)

    def repeat(self, call: Callable[[], object], count: int) -> None:
        """Call it, wait for the device, and count what was compiled."""
        graphs, breaks = compiled_so_far()
        for _ in range(count):
            call()
        if self.size.device == "cuda":
            torch.cuda.synchronize()
        self.graphs += compiled_so_far()[0] - graphs
        self.breaks += compiled_so_far()[1] - breaks

    def sample(self, call: Callable[[], object]) -> Callable[[], float]:
        count = passes_for(partial(self.repeat, call, 1), aim=0.05)
        longest = len(self.taps) if isinstance(self.taps, list) else 0

        def sample() -> float:
            seconds = timed(partial(self.repeat, call, count)) / count
            if longest:
                del self.taps[longest:]  # so that the list of the bare hook does not fill the memory
            return seconds

        return sample

    def kept(self, port: str) -> list[Tensor]:
        """The values of each block kept by the latest call; empty if this way keeps nothing."""
        if isinstance(self.taps, torchhook.Capture):
            return [getattr(calls, port) for calls in self.taps.values()]
        return self.taps[-self.size.layers :] if isinstance(self.taps, list) and port == "output" else []

    @property
    def recompiles(self) -> int:
        return self.graphs - self.graphs_first


def compiled_so_far() -> tuple[int, int]:
    """The number of compiled graphs and of graph breaks."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


class Truth:
    """The outputs and gradients of the eager model for the same tokens, by plain autograd."""

    def __init__(self, runner: Runner) -> None:
        model, outputs = model_of(runner.size), []
        for block in model.blocks:
            block.register_forward_hook(lambda module, args, out: outputs.append(out))
        loss = loss_of(model, runner.x, runner.y)
        self.grad = torch.autograd.grad(loss, outputs)
        self.output = [output.detach() for output in outputs]
        self.logits = model(runner.x).detach()


def require_right(runner: Runner) -> None:
    """Raise unless the results and all kept values equal those of the eager model, for two different inputs."""
    latest = []
    for seed in (3, 1):
        runner.feed(seed)
        truth = Truth(runner)
        require_close([runner.forward()], [truth.logits], runner, "logits")
        require_kept(runner, "output", truth.output)
        runner.step()
        require_kept(runner, "output", truth.output)
        if runner.way.grads:
            require_kept(runner, "grad", truth.grad)
        latest.append(runner.kept("output")[-1:])
    if any(map(torch.equal, *latest)):
        raise ValueError(f"{runner.way.name}: a different input left the same value")


def require_kept(runner: Runner, port: str, truth: Sequence[Tensor]) -> None:
    if runner.way.keeps:
        require_close(runner.kept(port), truth, runner, port)


def require_close(found: Sequence[Tensor], truth: Sequence[Tensor], runner: Runner, what: str) -> None:
    name, tolerance = runner.way.name, TOLERANCES[runner.size.dtype]
    if len(found) != len(truth):
        raise ValueError(f"{name}: kept {len(found)} of {len(truth)} values of {what}")
    for number, (mine, right) in enumerate(zip(found, truth, strict=True)):
        error = (mine - right).abs().max() / right.abs().max()
        if not error <= tolerance:
            raise ValueError(f"{name}: {what} {number} is off by {error:.1e} of its largest value")


class Results:
    """The samples of all ways on one device."""

    def __init__(self, size: Size, rounds: int) -> None:
        self.size = size
        with ExitStack() as stack:
            self.runners = {way.name: Runner(way, size, stack) for way in WAYS}
            for runner in self.runners.values():
                runner.repeat(partial(require_right, runner), 1)
                runner.both(MORE)
            settle()
            samples = {
                (name, kind): runner.sample(call)
                for name, runner in self.runners.items()
                for kind, call in ((FORWARD, runner.forward), (STEP, runner.step))
            }
            self.seconds = interleaved(samples, rounds)

    def ratio(self, way: Way, kind: str) -> float:
        """The ratio to the row it is compared with, within each round."""
        return median(self.ratios(way, kind))

    def ratios(self, way: Way, kind: str) -> list[float]:
        mine, base = self.seconds[way.name, kind], self.seconds[way.base, kind]
        return [one / other for one, other in zip(mine, base, strict=True)]

    def table(self) -> str:
        header = ["", FORWARD, STEP, "graphs", "breaks", "recompiles", "first calls"]
        return markdown(header, [self.row(way) for way in WAYS])

    def row(self, way: Way) -> list[str]:
        runner = self.runners[way.name]
        compiler = [runner.graphs, runner.breaks, runner.recompiles]
        counts = [str(count) if way.compiled else "—" for count in compiler]
        return [way.name, self.cell(way, FORWARD), self.cell(way, STEP), *counts, f"{runner.seconds_first:.1f} s"]

    def cell(self, way: Way, kind: str) -> str:
        return f"{median(self.seconds[way.name, kind]) * 1e3:,.2f} ms  {self.ratio(way, kind):.2f}×"

    def verdicts(self) -> list[str]:
        lines = []
        for way in (way for way in WAYS if way.targets):
            for kind, target in zip((FORWARD, STEP), way.targets, strict=True):
                least, most = median_interval(self.ratios(way, kind))
                what = f"{way.name}: {self.ratio(way, kind):.3f}× ({least:.3f} to {most:.3f}) in the {kind}"
                lines.append(verdict(what, f"at most {target:.2f}×", least <= target))
            runner = self.runners[way.name]
            what = f"{way.name}: {runner.breaks} graph breaks, {runner.recompiles} recompiles"
            lines.append(verdict(what, "none", not runner.breaks and not runner.recompiles))
        return lines


def verdict(what: str, target: str, met: bool) -> str:
    return f"- {'met' if met else 'MISSED'}: {what}; target: {target}"


def report(size: Size, rounds: int) -> None:
    torch.compiler.reset()
    results = Results(size, rounds)
    place = torch.cuda.get_device_name() if size.device == "cuda" else "CPU, one thread"
    print(f"\n{place}: GPT of {size}; median of {rounds} rounds.\n")
    print(results.table(), end="\n\n")
    print(*results.verdicts(), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", choices=SIZES, action="append", help="default: all devices of this machine")
    parser.add_argument("--only", action="append", help="only rows whose name contains this, and the first")
    options = parser.parse_args()
    if options.only:
        chosen = [way for way in WAYS if way.name == COMPILED or any(part in way.name for part in options.only)]
        names = {way.name for way in chosen}
        WAYS[:] = [way for way in chosen if way.base in names]
    torch.set_num_threads(1)
    torch._logging.set_logs(dynamo=logging.ERROR)  # the bare hook reaches the recompile limit on purpose
    print(f"{machine()}, torch {torch.__version__}, torchhook {torchhook.__version__}.")
    print("×: relative to the model without taps, compiled or eager, within each round. Training step: forward, loss,")
    print(f"backward, zero_grad. recompiles: after the first {FIRST} calls of each kind, which the last column times.")
    for device in options.device or ["cpu", *["cuda"] * torch.cuda.is_available()]:
        report(SIZES[device], options.rounds)


if __name__ == "__main__":
    main()
