"""Two trainings by the same script, one healthy, one in which the learning rate slips: what does torchhook say of them?

Run with `make demo`. Takes some seconds, needs no GPU and downloads no data. All is written to demo-output/.
"""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

import torchhook as th

SCRIPT = Path(__file__).with_name("train_digits.py")
OUTPUT = Path("demo-output")
TRAININGS = {"healthy": [], "slipped": ["--slip"]}


def main() -> None:
    OUTPUT.mkdir(exist_ok=True)
    console = Console()
    for name, args in TRAININGS.items():
        train(name, args)
    width = console.width // 2 - 1 if console.width >= 120 else console.width
    console.print(Columns([Panel(report(name, console, width - 4), title=name, width=width) for name in TRAININGS]))
    print("Where to look:")
    print(f"  {OUTPUT / 'slipped.html'} in a browser: the report with plots; {OUTPUT / 'healthy.html'} to compare")
    print(f"  {latest('slipped') / 'samples'}: what the convolutions saw, as pictures")
    print(f"  .venv/bin/torchhook dashboard {OUTPUT / 'runs'} --open: both trainings, layer by layer")
    print("and on a training of your own: torchhook run train.py --its --own arguments")


def train(name: str, args: list[str]) -> None:
    command = ["torchhook", "run", "--to", str(OUTPUT / "runs"), "--name", name]
    command += ["--report", str(OUTPUT / f"{name}.html"), str(SCRIPT), *args]
    print("$", *command, flush=True)
    subprocess.run([sys.executable, "-m", *command], check=True, stderr=subprocess.DEVNULL)  # its report is shown below
    print()


def report(name: str, console: Console, width: int) -> Text:
    """The report of the newest run of that name, as a terminal shows it."""
    page = Console(file=StringIO(), width=width, force_terminal=console.is_terminal)
    with th.Run(latest(name)) as run:
        th.render.terminal(run.report, page)
    return Text.from_ansi(page.file.getvalue())


def latest(name: str) -> Path:
    """The newest run of that name."""
    return max((OUTPUT / "runs").glob(f"{name}-*"))


if __name__ == "__main__":
    main()
