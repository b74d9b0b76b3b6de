"""Where the first NaN or Inf of a model began: the call, the operation, the line, and a file that shows it again."""

from torchhook.origins.files import replay
from torchhook.origins.origin import Origin, Range
from torchhook.origins.watch import Catch, origin_of

__all__ = ["Catch", "Origin", "Range", "origin_of", "replay"]
