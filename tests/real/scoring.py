"""What torchhook says about the programs, and whether it is right.

A fault counts as found if the first finding of warning or above has one of the causes that the program's file lists; it
is at the right layer if its site is one of those that the file lists. On a repaired twin or a healthy program, any
finding of warning or above is a false alarm. What `torchhook run` costs includes the program's own training.
"""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from types import ModuleType

from torchhook.core.findings import Finding

PROGRAMS = Path(__file__).parent / "programs"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != "__init__")
MODES = ("diagnose", "run")
SECONDS = 300
_PARAMETERS = ("weight", "bias")


@dataclass(frozen=True)
class Case:
    """One program as it was asked about, or its repaired twin, looked at in one way."""

    name: str
    mode: str
    repaired: bool = False
    seed: int = 0

    @property
    def kind(self) -> str:
        """``"faulty"``, ``"repaired"`` or ``"healthy"``."""
        faulty = "faulty" if program(self.name).CAUSES else "healthy"
        return "repaired" if self.repaired else faulty

    def __str__(self) -> str:
        return f"{self.name}{', repaired' if self.repaired else ''}, seed {self.seed}, {self.mode}"


@dataclass(frozen=True)
class Said:
    """A finding of warning or above."""

    severity: str
    code: str
    cause: str
    site: str
    message: str
    tried: str = ""

    def __str__(self) -> str:
        place = f" at {self.site}" if self.site else ""
        return f"{self.code} {self.severity} ({self.cause}){place}: {self.message}{self.tried and f' [{self.tried}]'}"


@dataclass(frozen=True)
class Outcome:
    """What was said in a case, in how many seconds of CPU time; `crash` if nothing could be said."""

    case: Case
    said: tuple[Said, ...]
    seconds: float
    crash: str = ""

    @property
    def found(self) -> bool:
        """The first finding has the right cause."""
        return bool(self.said) and self.said[0].cause in program(self.case.name).CAUSES

    @property
    def right(self) -> int:
        """How many findings have the right cause."""
        return sum(said.cause in program(self.case.name).CAUSES for said in self.said)

    @property
    def has_layer(self) -> bool:
        """The fault is in a certain module."""
        return bool(program(self.case.name).SITES)

    @property
    def at_layer(self) -> bool:
        """The first finding is at a module at fault."""
        return bool(self.said) and _module_of(self.said[0].site) in program(self.case.name).SITES

    @property
    def alarm(self) -> bool:
        """Something is said of a program without a fault."""
        return self.case.kind != "faulty" and bool(self.said or self.crash)

    @property
    def wrong(self) -> str:
        """What was wanted and what was said, if that is not right."""
        got = self.crash or "; ".join(map(str, self.said)) or "nothing"
        if self.case.kind != "faulty":
            return f"wanted nothing; got {got}" if self.alarm else ""
        known = program(self.case.name)
        missed = [] if self.found else [" or ".join(known.CAUSES)]
        if self.has_layer and not self.at_layer:
            missed.append(f"at {' or '.join(site or 'the model' for site in known.SITES[:3])}")
        return f"wanted {' '.join(missed)}; got {got}" if missed else ""


def program(name: str) -> ModuleType:
    """The module with the program."""
    return importlib.import_module(f"real.programs.{name}")


def cases(names: list[str], modes: tuple[str, ...], seeds: range) -> list[Case]:
    """Programs and their twins. A fault in the loop, and a training of bare tensors, are seen by ``run`` alone."""
    found = []
    for name in names:
        known = program(name)
        apt = [mode for mode in modes if mode == "run" or (hasattr(known, "build") and not known.LOOP)]
        twins = (False, True) if known.CAUSES else (False,)
        found += [Case(name, mode, twin, seed) for mode in apt for twin in twins for seed in seeds]
    return found


def outcome(case: Case) -> Outcome:
    """Look at a program. An error is part of the outcome."""
    try:
        said, seconds = (ran if case.mode == "run" else diagnosed)(case.name, case.repaired, case.seed)
    except Exception as error:
        return Outcome(case, (), 0.0, f"{type(error).__name__}: {error}")
    return Outcome(case, tuple(said), seconds)


def diagnosed(name: str, repaired: bool = False, seed: int = 0) -> tuple[list[Said], float]:
    """What `torchhook.diagnose` says of a program that is ready to begin, and its seconds of CPU time."""
    import torch

    import torchhook

    torch.set_num_threads(1)
    build = program(name).build
    twin = {"repaired": repaired} if "repaired" in inspect.signature(build).parameters else {}
    model, data, loss, optimizer, _ = build(seed=seed, **twin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.process_time()
        report = torchhook.diagnose(model, data, loss, optimizer)
        return warnings_of(report.findings), time.process_time() - began


def ran(name: str, repaired: bool = False, seed: int = 0) -> tuple[list[Said], float]:
    """What ``torchhook run`` says of a program, and the seconds of CPU time of both."""
    from torchhook.render.to_json import from_json

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        before = _of_children()
        ended = subprocess.run(
            _command(name, repaired, seed),
            cwd=place,
            env=_environment(),
            timeout=SECONDS,
            capture_output=True,
            text=True,
        )
        seconds = _of_children() - before
        files = sorted(place.glob("report*.json"), key=lambda file: (len(file.stem), file.stem))
        if not files and "nothing was trained here" not in ended.stderr:
            raise RuntimeError(f"there is no report: {ended.stderr[-500:]}")
        reports = [from_json(file.read_text(encoding="utf-8")) for file in files]
    return [said for report in reports for said in warnings_of(report.findings)], seconds


def warnings_of(findings: Iterable[Finding]) -> list[Said]:
    """The findings of warning or above."""
    return [
        Said(str(f.severity), f.code, f.evidence.get("cause", ""), f.site, f.message, str(f.tried or ""))
        for f in findings
        if f.severity >= "warning"
    ]


def _command(name: str, repaired: bool, seed: int) -> list[str]:
    twice = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launcher = twice if name.startswith("ranks_") else []
    command = [sys.executable, *launcher, "-m", "torchhook", "run", "--report", "report.json"]
    return [*command, str(PROGRAMS / f"{name}.py"), "--seed", str(seed), *(["--repaired"] if repaired else [])]


def _environment() -> dict[str, str]:
    import torchhook

    here = PROGRAMS.parents[1]
    paths = [Path(torchhook.__file__).parents[1], here / "site", here]
    inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
    path = os.pathsep.join([*map(str, paths), *inherited])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _of_children() -> float:
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _module_of(site: str) -> str:
    """The module of a site; that of a parameter is the module that has it."""
    module, _, last = site.rpartition(".")
    return module if last in _PARAMETERS else site
