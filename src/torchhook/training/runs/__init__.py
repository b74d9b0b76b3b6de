"""Runs on disk: what a watched training wrote, one SQLite file per run, readable while it is written and later.

`RunLog` in `writer` writes, `Run` reads, `folders` finds runs. Nothing in a run is ever executed.
"""

from torchhook.training.runs.run import Run
from torchhook.training.runs.writer import RunLog

__all__ = ["Run", "RunLog"]
