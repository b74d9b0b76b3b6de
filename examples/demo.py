"""The same training script twice, once healthy, once with a learning rate that jumps: what does torchhook say?

Run it with `make demo`. It takes half a minute, needs no GPU and downloads no data. Its output goes to demo-output/.
"""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from train_digits import STEPS, Net

import torchhook as th

SCRIPT = Path(__file__).with_name("train_digits.py")
OUTPUT = Path("demo-output")
TRAININGS = {"healthy": [], "slipped": ["--slip"]}
END = f"""Open
  {OUTPUT / "slipped.html"}: the report, with plots
  {OUTPUT / "healthy.html"}: the report of the healthy run, to compare
  {OUTPUT / "gradient_flow.png"}: the size of gradients by layer, at the end
  {OUTPUT / "feature_maps.png"}: what the second convolution sees in a digit
  {OUTPUT / "grad_cam.png"}: what the network looks at in unseen digits
    (red speaks for its answer, blue against it)
See both runs in the browser, step by step
  .venv/bin/torchhook dashboard {OUTPUT / "runs"} --open
Try it on a training script and a model of your own
  .venv/bin/torchhook run train.py --its --own arguments
  .venv/bin/torchhook diagnose package.module:Model --input 8,3,224,224"""


def main() -> None:
    OUTPUT.mkdir(exist_ok=True)
    console = Console()
    for name, args in TRAININGS.items():
        train(name, args)
    width = console.width // 2 - 1 if console.width >= 120 else console.width
    console.print(Columns([Panel(report(name, console, width - 4), title=name, width=width) for name in TRAININGS]))
    draw_gradients()
    draw_what_is_inside(*trained())
    print(END)


def train(name: str, args: list[str]) -> None:
    command = ["torchhook", "run", "--price", "off", "--to", str(OUTPUT / "runs"), "--name", name]
    command += ["--report", str(OUTPUT / f"{name}.html"), str(SCRIPT), *args]
    print("$", *command, flush=True)
    subprocess.run([sys.executable, "-m", *command], check=True, stderr=subprocess.DEVNULL)  # main() shows its report
    print()


def report(name: str, console: Console, width: int) -> Text:
    """The report of the latest run of that name, as a terminal shows it."""
    page = Console(file=StringIO(), width=width, force_terminal=console.is_terminal)
    with th.Run(latest(name)) as run:
        th.render.terminal(run.report, page)
    return Text.from_ansi(page.file.getvalue())


def latest(name: str) -> Path:
    """The folder of the latest run of that name."""
    return max((OUTPUT / "runs").glob(f"{name}-*"))


def draw_gradients() -> None:
    """Plot the gradients of both training runs, read from disk."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    for name, ax in zip(TRAININGS, figure.subplots(len(TRAININGS), sharex=True), strict=True):
        with th.Run(latest(name)) as run:
            th.plot.gradient_flow(run, ax=ax)
        ax.set_title(name, loc="right")
    figure.savefig(OUTPUT / "gradient_flow.png")


def trained() -> tuple[Net, Tensor]:
    """The healthy network, trained again in this process, and digits that it has not seen."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        batch = torch.randint(1500, (64,))
        optimizer.zero_grad()
        F.cross_entropy(net(images[batch]), labels[batch]).backward()
        optimizer.step()
    return net, images[1500:]


def draw_what_is_inside(net: Net, unseen: Tensor) -> None:
    """Plot the output of a layer, and what the network looks at."""
    with th.capture(net, "relu2") as acts:
        net(unseen[:1])
    th.plot.feature_maps(acts["relu2"].output).savefig(OUTPUT / "feature_maps.png")
    heat = th.explain.grad_cam(net, unseen[:8], sites="relu2")
    heat.overlay(unseen[:8]).savefig(OUTPUT / "grad_cam.png")


if __name__ == "__main__":
    main()
