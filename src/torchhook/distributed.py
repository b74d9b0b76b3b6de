"""Statistics of all ranks together."""

from torchhook.stats.ranks import merge

__all__ = ["merge"]
