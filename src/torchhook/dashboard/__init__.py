"""A page in the browser over runs on disk, live while trainings write them: ``torchhook dashboard``.

It runs in a process of its own and reads what others write; ``pip install "torchhook[dashboard]"``.
"""

from torchhook.dashboard.notebook import show

__all__ = ["show"]
