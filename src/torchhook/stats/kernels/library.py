"""Compiles C++ once, with the toolchain of torch.compile, and caches the library in a folder of the user.

Importing that toolchain takes seconds, which a short script would notice; loading a cached library takes none.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import tempfile
from pathlib import Path

import torch

from torchhook.core.progress import announce
from torchhook.core.torch_internals import compile_cpp

_FLAGS = ("-ffp-contract=fast",)


def library(source: str) -> ctypes.CDLL:
    """The compiled library of `source` for this processor, from the cache if it is there."""
    file = _folder() / f"{_key(source)}.so"
    if file.is_file():
        try:
            return ctypes.CDLL(str(file))
        except OSError:  # corrupt, or from another system: compile it again
            pass
    announce(f"building the C++ kernels for statistics, once for this machine and torch; kept in {file.parent}")
    made: ctypes.CDLL = compile_cpp(source, _FLAGS)
    _keep(Path(made._name), file)
    return made


def _folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "torchhook"


def _key(source: str) -> str:
    """The name of the library. It differs between processors, which may share the folder but not machine code."""
    processor = [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()]
    about = Path("/proc/cpuinfo")
    if about.exists():
        wanted = ("model name", "flags", "Features")
        processor += sorted({line for line in about.read_text().splitlines() if line.startswith(wanted)})
    return hashlib.sha256("\n".join([source, *_FLAGS, torch.__version__, *processor]).encode()).hexdigest()[:32]


def _keep(made: Path, file: Path) -> None:
    """Put the library into the cache, by renaming a copy, because another process may be about to load it."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as draft:
            draft.write(made.read_bytes())
        Path(draft.name).replace(file)
    except OSError:  # the home is read-only; the toolchain has a cache of its own
        pass
