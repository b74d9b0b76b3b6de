"""Finds where the first NaN or Inf of a model came from: the call, the operation, the line, and a file to replay it."""

from torchhook.rules.origin.catch import Catch, origin_of
from torchhook.rules.origin.files import replay
from torchhook.rules.origin.origin import Origin, Range

__all__ = ["Catch", "Origin", "Range", "origin_of", "replay"]
