"""``torchhook doctor``: what a bug report should say about a machine: versions, devices, extras, and what works.

Each line has a probe of its own; a probe that fails says so in its line. What compiles does so in a child process with
empty caches: it is really compiled, may hang or crash, and leaves nothing behind.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

import typer

from torchhook import __version__
from torchhook.core.progress import progress_bar
from torchhook.render.words import printable

Probes = Mapping[str, Callable[[], str]]

_NOT_FOR_USERS = ("all", "check", "demo", "docs", "test")  # extras that are made of others, or for work on torchhook
_WIDTH = 26  # of the names of lines
_PATIENCE = 180.0  # seconds: on a slow disk the first import of a compiler takes long
_ANSWER = "answer"  # the file in which a child leaves its answer
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[(?P<extras>[\w,-]+)\])?\s*(>=\s*(?P<least>[\d.]+))?")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
_OLDER_PYTHON = re.compile(r"python_version < ['\"]3\.(\d+)['\"]")
_FOLDERS = re.compile(r"(?<![\w.~])(?:[A-Za-z]:)?[\\/](?:[^\s\\/:'\"]+[\\/])+")


def doctor() -> None:
    """Print what a bug report needs: versions, devices, extras, and what works.

    The output is Markdown, ready to paste, without your paths or names.
    It compiles a tiny function and torchhook's kernels, which takes a while.
    The exit code is always 0.

    [bold]torchhook doctor[/]
    """
    typer.echo("```text")
    for probes in (_VERSIONS, _DEVICES, _extras()):
        typer.echo(f"{_lines(probes)}\n")
    with progress_bar("compiling", True):
        compiled = _lines(_compiling())
    typer.echo(f"{compiled}\n```")


def _lines(probes: Probes) -> str:
    """One line per probe."""
    return "\n".join(f"{name:<{_WIDTH}}{_anonymous(_answer(probe))}" for name, probe in probes.items())


def _answer(probe: Callable[[], str]) -> str:
    try:
        return probe()
    except Exception as error:  # a broken part is what the report is about
        return f"failed: {_reason(error)}"


def _reason(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]:.200}" if said else type(error).__name__


def _anonymous(text: str) -> str:
    """`text` on one line, without its folders, which may have the user's name.

    >>> _anonymous("no such file: '/data/alice/net/kernel.so'")
    "no such file: '…/kernel.so'"
    """
    home = os.path.expanduser("~")  # noqa: PTH111  # Path.home() raises where there is none
    line = " ".join(printable(text).split())
    return _FOLDERS.sub("…/", line.replace(home, "~") if len(home) > 1 else line)


def _torch() -> str:
    import torch

    return str(torch.__version__)


def _private_torch() -> str:
    from torchhook.core.torch_internals import FALLBACKS, NAMES, TESTED

    if not FALLBACKS:
        return f"all {len(NAMES)} names found"
    missing = "; ".join(f"{name} ({instead})" for name, instead in FALLBACKS.items())
    return f"{len(FALLBACKS)} of {len(NAMES)} names missing (tested with torch {TESTED}): {missing}"


_VERSIONS: Probes = {
    "torchhook": lambda: __version__,
    "Python": lambda: f"{platform.python_implementation()} {platform.python_version()}",
    "torch": _torch,
    "private parts of torch": _private_torch,
    "system": platform.platform,
}


def _cpu() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {usable} of {os.cpu_count()} cores usable"


def _instructions() -> str:
    import torch

    return f"{torch.backends.cpu.get_cpu_capability()}, threads: {torch.get_num_threads()}"


def _memory() -> str:
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"


def _gpu() -> str:
    import torch

    if torch.cuda.is_available():
        found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        each = [f"{one.name}, {one.total_memory / 2**30:.1f} GiB, capability {one.major}.{one.minor}" for one in found]
        return "; ".join([*each, _built_for()])
    other = torch.accelerator.current_accelerator(check_available=True)
    return f"{other.type if other else 'none'}; {_built_for()}"


def _built_for() -> str:
    import torch

    if torch.version.hip:
        return f"torch is built for ROCm {torch.version.hip}"
    return f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"


_DEVICES: Probes = {"CPU": _cpu, "torch on the CPU": _instructions, "memory": _memory, "GPU": _gpu}


def _extras() -> Probes:
    try:
        lines = metadata.requires("torchhook") or []
    except metadata.PackageNotFoundError:
        return {"extras": lambda: "unknown: torchhook is imported from a folder, not installed"}
    names = dict.fromkeys(found[1] for found in map(_EXTRA.search, lines) if found)
    return {f"extra {name}": partial(extra, name, lines) for name in names if name not in _NOT_FOR_USERS}


def extra(name: str, lines: Sequence[str]) -> str:
    """Which libraries of an extra are installed, given a package's requirements, and what to do if one is missing.

    >>> extra("paint", ["no-such-brush>=2; extra == 'paint'"])
    'no-such-brush is missing: pip install "torchhook[paint]"'
    """
    wanted = [line for line in lines if (found := _EXTRA.search(line)) and found[1] == name]
    states = dict(_state(line) for line in wanted if _is_for_this_python(line))
    remedy = "" if all(states.values()) else f': pip install "torchhook[{name}]"'
    return f"{', '.join(states)}{remedy}"


def _state(line: str) -> tuple[str, bool]:
    """The library that a requirement asks for, with its version, and whether the version is recent enough."""
    asked = _REQUIREMENT.match(line)
    assert asked is not None, line
    name, least = asked["name"], asked["least"] or "0"
    if name == "torchhook":
        return f"extra {asked['extras']}", True  # which has a line of its own
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is missing", False
    is_met = _numbers(version) >= _numbers(least)
    return f"{name} {version}" if is_met else f"{name} {version} is older than {least}", is_met


def _is_for_this_python(line: str) -> bool:
    older = _OLDER_PYTHON.search(line)
    return older is None or sys.version_info < (3, int(older[1]))


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _compiling() -> Probes:
    devices = ["cpu", "cuda:0"] if _answer(_has_cuda) == "yes" else ["cpu"]
    compiled = {f"torch.compile on {device}": partial(_in_child, "compiles", device) for device in devices}
    built = {f"kernel build on {device}": partial(_in_child, "builds", device) for device in devices}
    return {**compiled, "Triton": _triton, **built}


def _has_cuda() -> str:
    import torch

    return "yes" if torch.cuda.is_available() else "no"


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "not installed; torch.compile needs it only on a GPU"


def _in_child(probe: str, device: str, patience: float = _PATIENCE) -> str:
    """The result of `attempt` in a fresh interpreter, with the same modules and empty caches."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"), folder)
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)  # noqa: PTH100  # may be a zip file
        try:
            done = subprocess.run(
                [sys.executable, "-c", f"from torchhook.cli.doctor import attempt; attempt({probe!r}, {device!r})"],
                cwd=folder,
                env={**os.environ, **caches, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=patience,
            )
        except subprocess.TimeoutExpired:
            return f"failed: took longer than {patience:.0f} s"
        answer = Path(folder, _ANSWER)
        return answer.read_text("utf-8") if answer.exists() else f"failed: the process ended with {done.returncode}"


def attempt(probe: str, device: str) -> None:
    """Run a probe, and write the result to the current folder."""
    try:
        import torch  # noqa: F401  # not to be counted in the time

        began = time.perf_counter()
        _ATTEMPTS[probe](device)
        answer = f"works, {time.perf_counter() - began:.1f} s"
    except Exception as error:
        answer = f"failed: {_reason(error)}"
    Path(_ANSWER).write_text(answer, "utf-8")


def compiles(device: str) -> None:
    """Compile a tiny function, and check that its result is the same."""
    import torch

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * 2 + x.mean()

    x = torch.linspace(0, 1, 64, device=device)
    torch.testing.assert_close(torch.compile(function, fullgraph=True)(x), function(x))


def builds(device: str) -> None:
    """Build the kernels of the statistics, and check that they are used."""
    import torch

    from torchhook.stats.kernels import kernels
    from torchhook.stats.kernels.plain import Plain

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if type(kernels(torch.device(device))) is Plain:
            reasons = [str(warning.message) for warning in caught if "plain torch" in str(warning.message)]
            raise RuntimeError(reasons[0] if reasons else "plain torch is used instead, which is slower")


_ATTEMPTS = {"builds": builds, "compiles": compiles}
