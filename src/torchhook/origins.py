"""Where the first NaN or infinity came from."""

from torchhook.rules.origin import Catch, Origin, Range, origin_of, replay

__all__ = ["Catch", "Origin", "Range", "origin_of", "replay"]
