"""The dashboard: runs on disk in the browser, live while they are written (``torchhook dashboard``).

It runs in its own process and only reads runs; ``pip install "torchhook[dashboard]"``.
"""

from torchhook.dashboard.notebook import show

__all__ = ["show"]
