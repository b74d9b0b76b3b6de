"""Where the first NaN or Inf of a model began: the call, the operation, the line, and a file that shows it again."""

from torchhook.rules.origin.files import replay
from torchhook.rules.origin.origin import Origin, Range
from torchhook.rules.origin.sink import Catch, origin_of

__all__ = ["Catch", "Origin", "Range", "origin_of", "replay"]
