"""Statistics of all ranks together."""

from torchhook.distributed.merging import merge

__all__ = ["merge"]
