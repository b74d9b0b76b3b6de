"""The cost of capturing, here and in other libraries, as ratios to a hand-written hook.

Every contender keeps the outputs of all layers of one small model, so nearly all of its time is overhead.
A contender that is missing, fails, or keeps anything other than those outputs is left out, by name.

    python benchmarks/capture.py [--rounds N] [--no-peers]

Peers: those in requirements.txt, and TorchHook 0.2.7 in a separate folder, because it has our import name:

    pip install --no-deps --target .bench/torchhook-0.2.7 TorchHook==0.2.7
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import NamedTuple

import torch
from harness import (
    in_fresh_process,
    interleaved,
    machine,
    markdown,
    median_interval,
    passes_for,
    repeated,
    settle,
    timed,
)
from torch import Tensor, nn

import torchhook

ROOT = Path(__file__).resolve().parents[1]
LAYERS, WIDTH, BATCH = 48, 32, 8
GRADS = (False, True)
TARGETS = {("forward", False): 1.15, ("forward", True): 1.15, ("cycle", False): 1.25, ("cycle", True): 1.25}
Place = tuple[str, str, bool]  # the name of a contender, what is measured, grad mode
IMPORT_TARGET = 50  # ms
PROCESSES = 5  # memory layout is worth a few percent, and is the same for all rounds of a process


def layers(count: int = LAYERS, width: int = WIDTH) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(width, width) for _ in range(count)]


def batch() -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


class Contender:
    """A way to keep outputs: attached, run and removed again. The docstring of a subclass says how it is used."""

    name: str
    version = ""
    per_run = False  # attaches again for every forward: only the whole cycle can be measured

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.x = batch()

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}".rstrip()

    def attach(self) -> None:
        pass

    def forward(self) -> object:
        return self.model(self.x)

    def remove(self) -> None:
        pass

    def cycle(self) -> None:
        self.attach()
        self.forward()
        self.remove()

    def kept(self) -> list[Tensor]:
        """The outputs kept by the latest forward."""
        raise NotImplementedError


class NoHooks(Contender):
    """only the forward"""

    name = "no hooks"

    def kept(self) -> list[Tensor]:
        kept = [self.x]
        for layer in self.model:
            kept.append(layer(kept[-1]))
        return kept[1:]


class BareHook(Contender):
    """one closure per layer, `d[name] = out.detach()`, on each nn.Linear of named_modules"""

    name = "bare hook"

    def attach(self) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.handles = [
            module.register_forward_hook(self.keeping(name, self.outputs))
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear)
        ]

    @staticmethod
    def keeping(name: str, d: dict[str, Tensor]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, out: Tensor) -> None:
            d[name] = out.detach()

        return hook

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def kept(self) -> list[Tensor]:
        return list(self.outputs.values())


class Ours(Contender):
    """`torchhook.capture(model)`, which copies on write where the bare hook keeps an alias"""

    name = "torchhook"
    version = torchhook.__version__

    def attach(self) -> None:
        # "ignore", since the cost of attaching is also measured without a forward
        self.acts = torchhook.capture(self.model, on_silent="ignore").open()

    def remove(self) -> None:
        self.acts.close()

    def kept(self) -> list[Tensor]:
        return [calls.output for calls in self.acts.values()]


class Classic(Contender):
    """`HookManager(model, max_size=1)`, `add(name)` for each layer, `clear_hooks()`"""

    name = "TorchHook"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        classic = load_classic()
        self.manager_of = classic.HookManager
        self.version = classic.__version__

    def attach(self) -> None:
        self.manager = self.manager_of(self.model, max_size=1)
        for name, _ in self.model.named_children():
            self.manager.add(name)

    def remove(self) -> None:
        self.manager.clear_hooks()

    def kept(self) -> list[Tensor]:
        return [outputs[-1] for outputs in self.manager.get_all().values()]


class TransformerLens(Contender):
    """a HookedRootModule with a HookPoint after each layer, `add_caching_hooks()`; cycle: `run_with_cache(x)`"""

    name = "TransformerLens"

    def __init__(self, model: nn.Module) -> None:
        from transformer_lens import HookedRootModule
        from transformer_lens.hook_points import HookPoint

        class Net(HookedRootModule):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(*(step for layer in layers() for step in (layer, HookPoint())))
                self.setup()

            def forward(self, x: Tensor) -> Tensor:
                return self.layers(x)

        super().__init__(Net())
        self.version = version("transformer-lens")

    def attach(self) -> None:
        self.cache = self.model.add_caching_hooks()

    def remove(self) -> None:
        self.model.reset_hooks()

    def cycle(self) -> None:
        self.model.run_with_cache(self.x)

    def kept(self) -> list[Tensor]:
        return list(self.cache.values())


class FeatureExtractor(Contender):
    """`create_feature_extractor(model, names)`, its graph built once; cycle: built for each forward"""

    name = "torchvision"

    def __init__(self, model: nn.Module) -> None:
        from torchvision.models.feature_extraction import create_feature_extractor

        super().__init__(model)
        self.version = version("torchvision")
        self.build = partial(create_feature_extractor, model, [name for name, _ in model.named_children()])
        self.extractor = self.build()

    def forward(self) -> None:
        self.outputs = self.extractor(self.x)

    def cycle(self) -> None:
        self.build()(self.x)

    def kept(self) -> list[Tensor]:
        return list(self.outputs.values())


class NNsight(Contender):
    """`with net.trace(x) as tracer: tracer.cache(modules=layers)`; `net = NNsight(model)` is done once and not timed"""

    name = "nnsight"
    per_run = True

    def __init__(self, model: nn.Module) -> None:
        from nnsight import NNsight

        super().__init__(NNsight(nn.Sequential(*layers())))  # its own model, because it changes the forward of modules
        self.version = version("nnsight")
        self.layers = list(self.model)

    def forward(self) -> None:
        with self.model.trace(self.x) as tracer:
            self.cache = tracer.cache(modules=self.layers)

    def kept(self) -> list[Tensor]:
        return [self.cache[layer.path].output for layer in self.layers]


class TorchLens(Contender):
    """`record(model, x, save=func("linear"))`, its cheapest mode; measured after all others"""

    name = "torchlens"
    per_run = True

    def __init__(self, model: nn.Module) -> None:
        import torchlens

        super().__init__(nn.Sequential(*layers()))
        self.version = version("torchlens")
        self.record = partial(torchlens.record, self.model, self.x, save=torchlens.func("linear"))

    def forward(self) -> None:
        self.recording = self.record()

    def kept(self) -> list[Tensor]:
        return [record.ram_payload for record in self.recording.records]


CORE = (NoHooks, BareHook, Ours)
PEERS = (Classic, TransformerLens, FeatureExtractor, NNsight)
LAST = (TorchLens,)  # once used, it leaves torch's functions wrapped, which slows all others down


def load_classic() -> ModuleType:
    """TorchHook 0.2.7, imported under a different name than ours."""
    name, folder = "torchhook_classic", ROOT / ".bench" / "torchhook-0.2.7" / "torchhook"
    if name not in sys.modules:
        init = folder / "__init__.py"
        if not init.exists():
            raise ModuleNotFoundError(f"no {init.relative_to(ROOT)}")
        spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(folder)])
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def entered(kinds: tuple[type[Contender], ...]) -> tuple[list[Contender], dict[str, str]]:
    """The contenders that work and keep the right outputs, and the reasons why others are left out, by name."""
    found = {kind.name: attempted(kind) for kind in kinds}
    contenders = [each for each in found.values() if isinstance(each, Contender)]
    return contenders, {name: why for name, why in found.items() if isinstance(why, str)}


def attempted(kind: type[Contender]) -> Contender | str:
    """The contender, or the reason why it cannot be used."""
    try:
        contender = kind(nn.Sequential(*layers()))
        require_right(contender)
    except Exception as error:  # a peer may raise anything
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return contender


def require_right(contender: Contender) -> None:
    """Raise unless it keeps all 48 layer outputs, with grad mode on and off."""
    for grad in GRADS:
        with torch.set_grad_enabled(grad):
            right = NoHooks(nn.Sequential(*layers())).kept()
            contender.cycle()
            contender.attach()
            contender.forward()
            kept = contender.kept()
            contender.remove()
        if len(kept) != LAYERS or not all(map(torch.equal, kept, right)):
            raise ValueError(f"it kept {len(kept)} outputs that are not the {LAYERS} outputs of the layers")


def forward_sample(contender: Contender, grad: bool) -> Callable[[], float]:
    """Times the forward with hooks attached, without attaching them."""
    with torch.set_grad_enabled(grad):
        passes = passes_for(contender.forward)

    def sample() -> float:
        with torch.set_grad_enabled(grad):
            contender.attach()
            contender.forward()
            seconds = timed(contender.forward, passes)
            contender.remove()
        return seconds

    return sample


def cycle_sample(contender: Contender, grad: bool) -> Callable[[], float]:
    """Times attaching, one forward and removing."""
    with torch.set_grad_enabled(grad):
        passes = passes_for(contender.cycle)

    def sample() -> float:
        with torch.set_grad_enabled(grad):
            contender.cycle()
            return timed(contender.cycle, passes)

    return sample


def samples_of(contenders: list[Contender]) -> dict[Place, Callable[[], float]]:
    samples: dict[Place, Callable[[], float]] = {}
    for contender in contenders:
        for grad in GRADS:
            samples[contender.name, "cycle", grad] = cycle_sample(contender, grad)
            if not contender.per_run:
                samples[contender.name, "forward", grad] = forward_sample(contender, grad)
    return samples


class Run(NamedTuple):
    """The measurements of one process."""

    titles: dict[str, str]  # by the contender's name
    left_out: dict[str, str]
    seconds: dict[Place, list[float]]


def measured(rounds: int, with_peers: bool) -> Run:
    """The samples of all contenders, taken in this process."""
    torch.set_num_threads(1)
    let_torchvision_import()
    model = nn.Sequential(*layers())  # shared by the three, so that memory layout favours none of them
    core: list[Contender] = [kind(model) for kind in CORE]
    for contender in core:
        require_right(contender)
    peers, left_out = entered(PEERS if with_peers else ())
    settle()
    seconds = interleaved(samples_of(core + peers), rounds)
    last, left_out_last = entered(LAST if with_peers else ())
    seconds |= interleaved(samples_of(last), max(3, rounds // 10))
    return Run({each.name: each.title for each in core + peers + last}, left_out | left_out_last, seconds)


def let_torchvision_import() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "site"))
    import torchvision_cpu

    torchvision_cpu.install()


class Results:
    """The samples of some runs, from which a statistic computes costs and ratios."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.left_out = {name: why for run in runs for name, why in run.left_out.items()}
        self.titles = {name: title for name, title in runs[0].titles.items() if name not in self.left_out}

    def seconds(self, *place: object) -> list[float]:
        return [seconds for run in self.runs for seconds in run.seconds.get(place, ())]

    def cost(self, name: str, measure: str, grad: bool, statistic: Callable = median) -> float | None:
        """The seconds of the whole cycle, or those that attached hooks add to the forward."""
        seconds = self.seconds(name, measure, grad)
        if not seconds:
            return None
        if measure == "cycle":
            return statistic(seconds)
        plain = self.seconds(NoHooks.name, measure, grad)
        if statistic is median:  # of the differences within rounds, so that a slow drift of the machine cancels out
            return median(self.costs(name, measure, grad))
        return statistic(seconds) - statistic(plain)

    def costs(self, name: str, measure: str, grad: bool) -> list[float]:
        """The cost in each round."""
        seconds, plain = self.seconds(name, measure, grad), self.seconds(NoHooks.name, measure, grad)
        if measure == "cycle":
            return seconds
        return [mine - without for mine, without in zip(seconds, plain, strict=True)]

    def ratio(self, name: str, measure: str, grad: bool, statistic: Callable = median) -> float:
        place = measure, grad, statistic
        return self.cost(name, *place) / self.cost(BareHook.name, *place)

    def ratios(self, measure: str, grad: bool) -> list[float]:
        """Our ratio in each round."""
        ours, bare = (self.costs(name, measure, grad) for name in (Ours.name, BareHook.name))
        return [mine / other for mine, other in zip(ours, bare, strict=True)]

    def spread(self) -> str:
        """The range of our ratios over the processes."""
        alone = [Results([run]) for run in self.runs]
        ratios = [sorted(each.ratio(Ours.name, *place) for each in alone) for place in TARGETS]
        return ", ".join(f"{low:.2f}–{high:.2f}×" for low, *_, high in ratios)

    def least(self) -> str:
        return ", ".join(f"{self.ratio(Ours.name, *place, min):.2f}×" for place in TARGETS)

    def table(self) -> str:
        header = ["", *(column(*place) for place in TARGETS)]
        rows = [[title, *(self.cell(name, *place) for place in TARGETS)] for name, title in self.titles.items()]
        return markdown(header, rows)

    def cell(self, name: str, measure: str, grad: bool) -> str:
        cost = self.cost(name, measure, grad)
        if cost is None:
            return "—"
        return f"{cost * 1e6:{'+' if measure == 'forward' else ''},.0f} µs  {self.ratio(name, measure, grad):.2f}×"


class Growth:
    """The cost of attaching and removing per layer, as models grow."""

    sizes = (50, 500, 5000)

    def __init__(self, contenders: list[Contender]) -> None:
        self.titles = {contender.name: contender.title for contender in contenders}
        self.seconds = {each.name: [self.measured(type(each), size) for size in self.sizes] for each in contenders}

    @staticmethod
    def measured(kind: type[Contender], size: int) -> tuple[float, float]:
        """Seconds per layer to attach and to remove."""
        contender = kind(nn.Sequential(*layers(size, width=1)))
        samples = repeated(lambda: (timed(contender.attach), timed(contender.remove)))
        return median(attach for attach, _ in samples) / size, median(remove for _, remove in samples) / size

    def table(self) -> str:
        rows = [
            [self.titles[name], *(f"{attach * 1e6:,.1f} + {remove * 1e6:.1f} µs" for attach, remove in costs)]
            for name, costs in self.seconds.items()
        ]
        return markdown(["attach + remove, per layer", *(f"{size:,} layers" for size in self.sizes)], rows)

    def of(self, name: str) -> float:
        """The cost of a layer in the largest model, relative to the smallest."""
        return sum(self.seconds[name][-1]) / sum(self.seconds[name][0])


def import_milliseconds(repeats: int = 9) -> list[float]:
    """What importing `capture` adds to `import torch`, in fresh processes, with compiled bytecode as pip leaves it."""
    code = "import time, torch; a = time.perf_counter(); from torchhook import capture; print(time.perf_counter() - a)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as cache:
        environment["PYTHONPYCACHEPREFIX"] = cache
        run = partial(subprocess.check_output, [sys.executable, "-c", code], cwd=ROOT, env=environment)
        run()  # writes the bytecode
        return [1000 * float(run()) for _ in range(repeats)]


def verdicts(results: Results, growth: Growth, import_ms: float) -> list[str]:
    lines = []
    for (measure, grad), target in TARGETS.items():
        ratios = results.ratios(measure, grad)
        least, most = median_interval(ratios)
        what = f"{column(measure, grad)}: {median(ratios):.2f}× ({least:.2f} to {most:.2f}) the bare hook within rounds"
        lines.append(verdict(what, f"{target}×", least <= target))
    # A large model misses the processor's caches, so this is never quite 1.
    grown = growth.of(Ours.name)
    what = f"attaching: a layer costs {grown:.1f}× as much among 5,000 as among 50 (linear would be 1×, quadratic 100×)"
    lines.append(verdict(what, "2×", grown <= 2))
    lines.append(verdict(f"import: {import_ms:.0f} ms", f"{IMPORT_TARGET} ms", import_ms <= IMPORT_TARGET))
    return lines


def verdict(what: str, target: str, met: bool) -> str:
    return f"- {'met' if met else 'MISSED'}: {what}; target: at most {target}"


def column(measure: str, grad: bool) -> str:
    return f"{measure}, {'grad' if grad else 'no_grad'}"


def report(rounds: int, with_peers: bool) -> None:
    share = max(1, round(rounds / PROCESSES))
    results = Results([in_fresh_process(measured, share, with_peers) for _ in range(PROCESSES)])
    growth = Growth(entered((BareHook, Ours, Classic) if with_peers else (BareHook, Ours))[0])
    import_ms = import_milliseconds()
    left_out = results.left_out if with_peers else {kind.name: "--no-peers" for kind in PEERS + LAST}

    print(f"{machine()}, torch {version('torch')}, one thread;", end=" ")
    print(f"median of {share * PROCESSES} rounds, in {PROCESSES} processes.")
    print(f"{LAYERS} × Linear({WIDTH}, {WIDTH}), batch {BATCH}, all outputs kept. ×: relative to the bare hook.")
    print("forward: what attached hooks add to it. cycle: attach, forward, remove. The garbage collector is on; in the")
    print("first table it skips the objects left by the imports of all these libraries.")
    print(f"\n{results.table()}\n")
    for name, why in left_out.items():
        print(f"- left out: {name}: {why}")
    for kind in CORE + PEERS + LAST:
        if kind.name in results.titles:
            print(f"- {results.titles[kind.name]}: {kind.__doc__}")
    print(f"\nOver the {PROCESSES} processes, torchhook ranges over {results.spread()};")
    print(f"by the fastest samples instead of the medians, it is at {results.least()}.")
    print(f"\n{growth.table()}\n")
    imports = ["torchhook", f"{median(import_ms):.1f} ms", f"{min(import_ms):.1f} ms"]
    print(markdown(["import, in addition to torch", "median", "minimum"], [imports]), end="\n\n")
    print(*verdicts(results, growth, median(import_ms)), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    report(options.rounds, with_peers=not options.no_peers)


if __name__ == "__main__":
    main()
