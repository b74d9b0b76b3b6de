"""The cost of statistics in every training step, of torchhook and of others, as ratios to no hooks.

Each way trains its own copy of one model, on one thread and the same batch. Each round times some steps of every way,
the slow ones in rounds of their own; the tables show medians over rounds. A peer that is missing or fails is left out,
by name. Then: the cost per site as models grow, and the cost per step as steps go by.

    python benchmarks/statistics_cpu.py [--rounds N] [--no-peers]
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from capture import let_torchvision_import, verdict
from harness import in_fresh_process, interleaved, machine, markdown, passes_for, settle, timed
from torch import Tensor, nn

import torchhook
from torchhook.stats import histogram, moments
from torchhook.stats.kernels.plain import Plain

PROCESSES = 3  # memory layout is worth some percent, and is the same for all rounds of a process
EVERY = 10
TARGETS = {"full moments": 1.15, "min, max and L2, which they include": 1.05}
SIZES = (10, 100, 400)  # leaf modules
GROWTH_TARGET = 1.5  # times the cost
STEPS = 10_000
WINDOWS = {"first thousand": 1_000, "middle thousand": 5_500, "last thousand": STEPS}  # the step that each ends with
DRIFT_TARGET, MEMORY_TARGET = 1.1, 1.0  # times as slow, MiB more

Loss = Callable[[nn.Module], Tensor]


def resnet() -> tuple[nn.Module, Loss]:
    """ResNet-18, batch 8, 64 px"""
    from torchvision.models import resnet18

    x, y = torch.randn(8, 3, 64, 64), torch.randint(1000, (8,))
    return resnet18(), lambda model: F.cross_entropy(model(x), y)


def gpt2() -> tuple[nn.Module, Loss]:
    """GPT-2 with 4 layers of width 256 and 2,000 tokens, batch 8 × 64"""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"vocab_size": 2000, "n_positions": 64, "n_layer": 4, "n_embd": 256, "n_head": 4}
    config = GPT2Config(**size, bos_token_id=None, eos_token_id=None, use_cache=False)
    text = torch.randint(config.vocab_size, (8, 65))
    x, y = text[:, :-1].contiguous(), text[:, 1:].flatten()
    return GPT2LMHeadModel(config), lambda model: F.cross_entropy(model(x).logits.flatten(0, 1), y)


def mlp(layers: int = 4) -> tuple[nn.Module, Loss]:
    """Layers so small that nearly all the time is overhead."""
    x = torch.randn(8, 32)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers))), lambda model: model(x).square().mean()


TASKS = {"ResNet-18": resnet, "GPT-2": gpt2}


class Training:
    """A model that is trained, without hooks."""

    steps = 2  # in a sample

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model = deepcopy(model).train()
        self.loss = loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)  # so small that nothing diverges

    def backward(self) -> None:
        self.loss(self.model).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sample(self) -> float:
        """Seconds per step, after a step that refills the caches."""
        self.step()
        return timed(self.step, self.steps)

    def finish(self) -> None:
        pass


class Measured(Training):
    def __init__(self, model: nn.Module, loss: Loss, **options: Any) -> None:
        super().__init__(model, loss)
        self.steps = options.get("every", self.steps)  # one of them is measured
        self.stats = torchhook.measure(self.model, **options, on_silent="ignore").open()

    def finish(self) -> None:
        self.stats.close()


class Uncompiled(Measured):
    steps = 1

    def sample(self) -> float:
        with plain_kernels():
            return super().sample()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Kernels in plain torch, as without a compiler."""
    plain = Plain()
    with (
        patch.object(moments, "kernels", lambda device: plain),
        patch.object(histogram, "kernels", lambda device: plain),
    ):
        yield


class Peer(Training):
    steps = 1  # they are slow, so noise matters less


class WandB(Peer):
    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        self.folder = TemporaryDirectory()
        os.environ.update({f"WANDB_{kind}_DIR": self.folder.name for kind in ("CACHE", "CONFIG", "DATA")})
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        self.run = wandb.init(mode="offline", dir=self.folder.name, settings=settings)
        self.run.watch(self.model, log="all", log_freq=1)

    def step(self) -> None:
        super().step()
        self.run.log({})

    def finish(self) -> None:
        self.run.finish()
        self.folder.cleanup()


class TensorBoard(Peer):
    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        from torch.utils.tensorboard import SummaryWriter

        self.folder = TemporaryDirectory()
        self.writer = SummaryWriter(self.folder.name)
        self.number = 0

    def backward(self) -> None:
        super().backward()
        self.number += 1
        for name, parameter in self.model.named_parameters():
            self.writer.add_histogram(name, parameter.grad, self.number)

    def sample(self) -> float:
        seconds = super().sample()
        self.writer.flush()  # so that its thread does not write while others are timed
        return seconds

    def finish(self) -> None:
        self.writer.close()
        self.folder.cleanup()


class HuggingFace(Peer):
    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        from transformers.debug_utils import DebugUnderflowOverflow

        self.debug = DebugUnderflowOverflow(self.model)


class Way(NamedTuple):
    """A row of the table."""

    name: str
    how: str
    make: Callable[[nn.Module, Loss], Training]
    target: str = "—"
    package: str = ""

    @property
    def title(self) -> str:
        try:
            return f"{self.name} {version(self.package)}" if self.package else self.name
        except PackageNotFoundError:  # then it is left out
            return self.name


PLAIN, AGAIN, GOAL = "no hooks", "no hooks, again", "torchhook, outputs + param_grads"
CORE = (
    Way(PLAIN, "only the training step", Training),
    Way(AGAIN, "a second copy of it; its distance from 1× is noise", Training, "1×"),
    Way("torchhook, outputs", "`measure(model)`: full moments of all leaf outputs", Measured),
    Way(
        GOAL,
        "`measure(model, param_grads=True)`: also of all parameter gradients",
        partial(Measured, param_grads=True),
        " and ".join(f"≤ {target}×" for target in TARGETS.values()),
    ),
    Way(
        "torchhook, + grads",
        "`measure(model, param_grads=True, grads=True)`: also of the gradients of all leaf outputs",
        partial(Measured, param_grads=True, grads=True),
    ),
    Way(
        "torchhook, + histogram",
        '`measure(model, param_grads=True, stats=("moments", "histogram"))`',
        partial(Measured, param_grads=True, stats=("moments", "histogram")),
    ),
    Way(
        f"torchhook, every={EVERY}",
        f"`measure(model, param_grads=True, every={EVERY})`, over {EVERY} steps",
        partial(Measured, param_grads=True, every=EVERY),
    ),
    Way(
        "torchhook, no compiler",
        "`measure(model, param_grads=True)`, computed by plain torch",
        partial(Uncompiled, param_grads=True),
    ),
)
PEERS = (
    Way(
        "W&B",
        '`watch(model, log="all", log_freq=1)`, offline, and `log({})`: histograms of parameters and their gradients',
        WandB,
        package="wandb",
    ),
    Way("TensorBoard", "`add_histogram` of each parameter's gradient", TensorBoard, package="tensorboard"),
    Way(
        "DebugUnderflowOverflow, transformers",
        "absolute extremes, NaN and Inf of all inputs, outputs and parameters, of all modules",
        HuggingFace,
        package="transformers",
    ),
)


def require_right(measured: Measured) -> None:
    """Raise unless its numbers for one backward equal those of bare hooks, at every leaf and every parameter."""
    seen: dict[tuple[str, str], list[Tensor]] = defaultdict(list)

    def see(path: str, module: nn.Module, args: tuple, out: Tensor) -> None:
        seen[path, "output"].append(out.detach().clone())

    leaves = [(path, module) for path, module in measured.model.named_modules() if not [*module.children()]]
    handles = [module.register_forward_hook(partial(see, path)) for path, module in leaves]
    measured.stats.reset()
    measured.backward()
    for handle in handles:
        handle.remove()
    seen |= {(name, "param_grad"): [p.grad] for name, p in measured.model.named_parameters()}
    readings = measured.stats.snapshot()
    if set(readings) != set(seen):
        raise ValueError(f"it measured other places: {set(readings) ^ set(seen)}")
    for place, parts in seen.items():
        x = torch.cat([part.flatten() for part in parts]).double()
        right = torch.stack([x.mean(), x.std(), x.min(), x.max(), x.norm()])
        reading = readings[place]
        shown = torch.tensor([reading.mean, reading.std, reading.min, reading.max, reading.l2], dtype=torch.float64)
        if reading.count != len(x) or not torch.allclose(shown, right, rtol=1e-5, atol=1e-5 * x.std().item()):
            raise ValueError(f"{place}: it shows {shown.tolist()}, not {right.tolist()}")
    measured.optimizer.zero_grad()


def attempted(way: Way, model: nn.Module, loss: Loss) -> Training | str:
    """A training that has made its first steps, or the reason why it could not."""
    try:
        training = way.make(model, loss)
        training.sample()
    except Exception as error:  # a peer may raise anything
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return training


class Run(NamedTuple):
    """What one process measured, by name of the way."""

    pairs: dict[str, list[tuple[float, float]]]  # seconds of a step, and of one without hooks in the same round
    left_out: dict[str, str]
    places: int


def trained(task: str, rounds: int, with_peers: bool) -> Run:
    """The samples of all ways, taken in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    let_torchvision_import()  # transformers imports it too
    model, loss = TASKS[task]()
    entered = {way.name: way.make(model, loss) for way in CORE}
    require_right(entered[GOAL])
    tried = {way.name: attempted(way, model, loss) for way in PEERS if with_peers}
    left_out = {name: why for name, why in tried.items() if isinstance(why, str)}
    entered |= {name: training for name, training in tried.items() if isinstance(training, Training)}
    for training in entered.values():
        training.sample()  # the first steps pay for caches
    settle()
    # The slow ones separately, so that the others are compared close in time.
    slow = {name for name, training in entered.items() if training.steps != Training.steps}
    pairs = paired({name: entered[name] for name in (PLAIN, *slow)}, max(2, rounds // 3))
    pairs |= paired({name: entered[name] for name in entered.keys() - slow}, rounds)
    places = len(entered[GOAL].stats)
    for training in entered.values():
        training.finish()
    return Run(pairs, left_out, places)


def paired(trainings: dict[str, Training], rounds: int) -> dict[str, list[tuple[float, float]]]:
    seconds = interleaved({name: training.sample for name, training in sorted(trainings.items())}, rounds)
    return {name: list(zip(taken, seconds[PLAIN], strict=True)) for name, taken in seconds.items()}


class Results:
    """The results of some runs of one task."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.left_out = {name: why for run in runs for name, why in run.left_out.items()}

    def pairs(self, name: str) -> list[tuple[float, float]]:
        return [pair for run in self.runs for pair in run.pairs[name]]

    def ratio(self, name: str) -> float:
        """The ratio to no hooks in the same round."""
        return median(mine / plain for mine, plain in self.pairs(name))

    def spread(self, name: str) -> str:
        low, _, high = quantiles((mine / plain for mine, plain in self.pairs(name)), n=4)
        mine, plain = map(min, zip(*self.pairs(name), strict=True))
        return f"{low:.3f}–{high:.3f}×, the fastest samples {mine / plain:.3f}×"

    def cell(self, name: str) -> str:
        if name in self.left_out:
            return "—"
        return f"{1000 * median(mine for mine, _ in self.pairs(name)):,.1f} ms  {self.ratio(name):.3f}×"


def grown(rounds: int) -> dict[int, float]:
    """Seconds per site that measuring adds to a forward, by number of sites."""
    torch.set_num_threads(1)
    ways = {size: (mlp(size)[0], mlp(size)[0]) for size in SIZES}
    sessions = [torchhook.measure(measured).open() for _, measured in ways.values()]
    x = torch.randn(8, 32)
    with torch.no_grad():
        samples = {
            (size, model): partial(timed, partial(model, x), passes_for(partial(model, x)))
            for size, models in ways.items()
            for model in models
        }
        settle()
        seconds = interleaved(samples, rounds)
    for session in sessions:
        session.close()
    return {
        size: median(
            mine - without for mine, without in zip(seconds[size, measured], seconds[size, plain], strict=True)
        )
        / size
        for size, (plain, measured) in ways.items()
    }


class Window(NamedTuple):
    """A thousand steps of the long run: mean seconds per step, and the memory of the process at their end."""

    plain: float
    measured: float
    memory: float  # MiB


def long_run() -> dict[str, Window]:
    """Steps of a tiny model, alternately with and without statistics, so that a slow machine affects both."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss = mlp()
    plain, measured = Training(model, loss), Measured(model, loss, param_grads=True)
    for training in (plain, measured):
        timed(training.step, 20)
    settle()
    seconds = torch.ones(STEPS, 2, dtype=torch.float64)  # allocated first, so that it does not count as growth
    windows = {}
    for step in range(STEPS):
        seconds[step, 0] = timed(plain.step)
        seconds[step, 1] = timed(measured.step)
        for name, end in WINDOWS.items():
            if step + 1 == end:
                windows[name] = Window(*seconds[end - 1000 : end].mean(0).tolist(), resident())
    measured.finish()
    return windows


def resident() -> float:
    """The resident memory of this process, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def costs_table(results: dict[str, Results], ways: tuple[Way, ...]) -> str:
    rows = [[way.title, *(each.cell(way.name) for each in results.values()), way.target] for way in ways]
    return markdown(["training step", *results, "target"], rows)


def growth_table(costs: dict[int, float]) -> str:
    header = ["forward, no_grad", *(f"{size} sites" for size in costs), "target"]
    return markdown(
        header, [["measure adds, per site", *(f"{cost * 1e6:.2f} µs" for cost in costs.values()), "the same"]]
    )


def windows_table(windows: dict[str, Window]) -> str:
    each = windows.values()
    rows = [
        ["no hooks, mean step", *(f"{window.plain * 1e6:.0f} µs" for window in each), ""],
        ["measured, mean step", *(f"{window.measured * 1e6:.0f} µs" for window in each), "the same"],
        ["ratio", *(f"{window.measured / window.plain:.2f}×" for window in each), "the same"],
        ["resident memory at the end", *(f"{window.memory:.1f} MiB" for window in each), "the same"],
    ]
    return markdown([f"{STEPS:,} steps", *windows, "target"], rows)


def verdicts(results: dict[str, Results], costs: dict[int, float], windows: dict[str, Window]) -> list[str]:
    lines = []
    for task, result in results.items():
        for what, target in TARGETS.items():
            ratio = result.ratio(GOAL)
            text = f"{task}, all leaf outputs and parameter gradients, {what}: {ratio:.3f}× no hooks"
            lines.append(verdict(text, f"{target}×", ratio <= target))
    growth = costs[SIZES[-1]] / costs[SIZES[0]]
    text = (
        f"a site costs {growth:.2f}× as much among {SIZES[-1]} as among {SIZES[0]} (linear would be 1×, quadratic 40×)"
    )
    lines.append(verdict(text, f"{GROWTH_TARGET}×", growth <= GROWTH_TARGET))
    first, _, last = windows.values()
    drift = (last.measured / last.plain) / (first.measured / first.plain)
    text = f"relative to steps without hooks, the last thousand steps take {drift:.2f}× the first thousand"
    lines.append(verdict(text, f"{DRIFT_TARGET}×", drift <= DRIFT_TARGET))
    more = last.memory - first.memory
    text = f"resident memory grows by {more:.2f} MiB from step 1,000 to {STEPS:,}"
    lines.append(verdict(text, f"{MEMORY_TARGET} MiB", more <= MEMORY_TARGET))
    return lines


def report(rounds: int, with_peers: bool) -> None:
    share = max(1, round(rounds / PROCESSES))
    results = {
        task: Results([in_fresh_process(trained, task, share, with_peers) for _ in range(PROCESSES)]) for task in TASKS
    }
    costs = in_fresh_process(grown, max(9, rounds))
    windows = in_fresh_process(long_run)
    ways = CORE + PEERS if with_peers else CORE

    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchhook", "torchvision", "transformers"))
    print(f"{machine()}, {packages}; float32, one thread.")
    print(f"Training steps (forward, cross entropy, backward, AdamW, zero_grad): medians of {share * PROCESSES} rounds")
    print(f"in {PROCESSES} processes, a third as many for the slow ways. ×: relative to no hooks in the same round.")
    for task, result in results.items():
        print(f"- {task}: {TASKS[task].__doc__}; {result.runs[0].places} leaf outputs and parameter gradients")
    print(f"\n{costs_table(results, ways)}\n")
    for task, result in results.items():
        for name, why in result.left_out.items():
            print(f"- left out: {name}, {task}: {why}")
    for way in ways:
        print(f"- {way.title}: {way.how}")
    print("\nHalf of the rounds are within:")
    for task, result in results.items():
        for name in (GOAL, AGAIN):
            print(f"- {task}, {name}: {result.spread(name)}")
    print(f"\n{growth_table(costs)}\n\n{windows_table(windows)}\n")
    print(*verdicts(results, costs, windows), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    report(options.rounds, with_peers=not options.no_peers)


if __name__ == "__main__":
    main()
