"""Runs on disk: what a watched training wrote, in one SQLite file a run, for others to read while it goes on and later.

`writer` writes, `Run` reads, `folders` finds; nothing of a run is ever executed.
"""

from torchhook.training.runs.run import Run
from torchhook.training.runs.writer import RunLog

__all__ = ["Run", "RunLog"]
