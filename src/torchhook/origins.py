"""Where the first NaN or Inf of a model came from."""

from torchhook.rules.origin import Catch, Origin, Range, origin_of, replay

__all__ = ["Catch", "Origin", "Range", "origin_of", "replay"]
